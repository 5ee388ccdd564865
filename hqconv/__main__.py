"""`python -m hqconv`."""

from hqconv.cli import main

main()
