"""The command `hqconv`, also as `python -m hqconv`: signals are handled before anything else is loaded.

A signal unwinds the main thread, which closes files and removes temporary folders; the next one ends the process at
once. No file has its final name before it is complete. During an import a signal ends the process at once: Python and
C++ libraries drop an exception there, or abort. Elsewhere an exception that a library dropped is raised again.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MESSAGE = (
    "Interrupted. Incomplete files are marked .partial. `convert` goes on with --resume, "
    "or begins anew with --overwrite; run any other command again."
)

_LOST_S = 0.5  # seconds after which an exception that unwinds nothing counts as lost


def listen() -> None:
    """Let each signal end the process with 128 and its number; ignored ones stay ignored (background jobs, nohup)."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    stop = SystemExit(128 + number)

    def unwind(_: int, frame: FrameType | None) -> None:
        error = sys.exc_info()[1]  # of the block that runs now
        while error is not None:
            if error is stop:
                return
            error = error.__context__
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                with suppress(OSError):
                    os.write(2, f"{MESSAGE}\n".encode())
                os._exit(128 + number)
            frame = frame.f_back
        raise stop

    signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, unwind)
    signal.setitimer(signal.ITIMER_REAL, _LOST_S, _LOST_S)
    sys.unraisablehook = lambda _: None
    unwind(number, frame)


def open_streams() -> None:
    """Open /dev/null for the standard streams that are closed, so that no other file gets their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def run() -> int:
    """Run the command of the command line; return its exit code."""
    code: object = 0
    try:
        listen()
        open_streams()
        from hqconv.cli.app import main

        main()
    except SystemExit as end:
        signal.setitimer(signal.ITIMER_REAL, 0)
        code = end.code
    with suppress(OSError, ValueError):  # nobody reads
        if isinstance(code, int) and code > 128:
            print(MESSAGE, file=sys.stderr)
        sys.stdout.flush()
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `hqconv` command; does not return. Nothing is torn down: that takes torch a second."""
    code = run()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
