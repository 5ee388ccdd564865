"""Signal handling: SIGINT, SIGTERM and SIGHUP end the command at once, with one line on stderr.

A separate thread waits for signals: Python handles them only between two instructions of the main thread, and some
libraries swallow an exception that is raised there. Nothing is unwound: a command may be killed at any moment, and no
file has its final name before it is complete. This module is loaded before all libraries, so it imports little.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MESSAGE = (
    "Interrupted. Nothing unfinished passes for finished: run the same command again; "
    "`convert` goes on with --resume, or begins anew with --overwrite."
)
_WAIT_MS = 500  # for a blocked terminal or pipe

_taken: list[signal.Signals] = []
_once = threading.Lock()
_prefix: list[str] = [""]


def listen() -> None:
    """Install the handlers for the rest of the process. Ignored signals stay ignored (background jobs, nohup)."""
    if _taken:
        return
    for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)
            _taken.append(number)
    _open_streams()
    atexit.register(_ignore_signals)  # registered first, so it runs last
    os.register_at_fork(
        before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_in_child
    )
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        threading.Thread(target=_watch, args=(reader,), name="hqconv-signals", daemon=True).start()
    except RuntimeError:  # no more threads: signals are handled by the main thread alone
        return
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def leave(code: object) -> NoReturn:
    """End the process at once with the exit code of a SystemExit, after running the registered exit functions.

    Python needs a second to tear down torch, and no signal would be handled meanwhile.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            OSError, ValueError, AttributeError
        ):  # a closed stream, or one without a reader
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def set_prefix(text: str) -> None:
    """Set text that is written before the message, e.g. the escape sequence that shows the cursor again."""
    _prefix[:] = [text]


def _handle(number: int, _: FrameType | None) -> None:
    _stop(number)


def _watch(reader: int) -> None:
    """Wait for signals: Python writes the number of each signal into this pipe at once."""
    while data := os.read(reader, 1):
        if data[0] in _taken:
            _stop(data[0])


def _stop(number: int) -> None:
    """End the process; further signals change nothing."""
    if not _once.acquire(blocking=False):
        return
    _end_children()
    with suppress(OSError):  # stderr is closed
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(_WAIT_MS):
            os.write(2, f"{_prefix[0]}{MESSAGE}\n".encode())
    os._exit(128 + number)


def _end_children() -> None:
    """Terminate the compilers that this process has started."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - pathlib is not loaded yet
        with suppress(OSError, ValueError), open(f"/proc/self/task/{task}/children") as file:  # noqa: PTH123
            for child in file.read().split():
                with suppress(OSError):
                    os.kill(int(child), signal.SIGTERM)


def _ignore_signals() -> None:
    """Ignore further signals, because the work is done and the exit code is fixed."""
    for number in _taken:
        signal.signal(number, signal.SIG_IGN)


def _reset_in_child() -> None:
    """Remove the handlers in a forked process: it has no watching thread and must not write to the parent's pipe."""
    signal.set_wakeup_fd(-1)
    for number in _taken:
        signal.signal(number, signal.SIG_DFL)
    _taken.clear()
    _unblock_signals()


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _open_streams() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
