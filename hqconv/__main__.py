"""`python -m hqconv`."""

from hqconv.cli.app import main

main()
