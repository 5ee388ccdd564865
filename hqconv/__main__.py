"""The command `hqconv`, also as `python -m hqconv`: it listens to signals before it loads anything else."""

from hqconv.cli.interrupt import leave, listen


def main() -> None:
    """Entry point of the `hqconv` command; does not return."""
    listen()
    from hqconv.cli.app import main as run

    try:
        run()
    except SystemExit as end:
        leave(end.code)
    leave(0)


if __name__ == "__main__":
    main()
