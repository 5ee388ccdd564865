"""Stop means stop: SIGINT, SIGTERM and SIGHUP end the command at once, with one line, whatever its threads are at.

A thread of its own waits for them, for Python would look only between two instructions of the main thread, and some
libraries swallow an exception that is raised there. Nothing is unwound: what a kill leaves can be resumed. The process
becomes `interrupt_process`, so that no thread of it works on while the line is found, and the line stays true.

Loaded before all libraries: it imports little.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from hqconv.cli import interrupt_process
from hqconv.conversion.torchrun import is_rank_zero

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING = "Interrupted. Nothing was written."
Case = tuple[
    str, ...
]  # a text, and the conditions under which it is true, as `interrupt_process.choose` has them

_taken: list[signal.Signals] = []
_once = threading.Lock()
_cases: list[Case] = [(NOTHING,)]
_before: list[str] = [""]


def listen() -> None:
    """Take the signals, for the rest of the process. Those that are ignored stay so: in the background, under nohup."""
    if _taken:
        return
    for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _heard)
            _taken.append(number)
    _open_streams()
    atexit.register(_let_go)  # the first to be registered is the last to run
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        threading.Thread(target=_watch, args=(reader,), name="hqconv-signals", daemon=True).start()
    except RuntimeError:  # no more threads: then the main thread has to do
        return
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def leave(code: object) -> NoReturn:
    """End the process with the exit code of a SystemExit, at once: Python takes a second to take torch apart.

    While it does, no signal would be heard. What was registered for the end is run.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def expect(*cases: Case) -> None:
    """What will be said: the text of the first case that is true then; one without conditions comes last."""
    _cases[:] = cases


def put_before(text: str) -> None:
    """What must be written before it, such as what gives a terminal its cursor back."""
    _before[:] = [text]


def words() -> str:
    """What would be said just now."""
    return interrupt_process.choose(_flat())


def _flat() -> list[str]:
    return [word for case in _cases for word in (*case, "")]


def _heard(number: int, _: FrameType | None) -> None:
    _stop(number)


def _watch(reader: int) -> None:
    """Every signal that Python handles is a byte in this pipe, at once."""
    while data := os.read(reader, 1):
        if data[0] in _taken:
            _stop(data[0])


def _stop(number: int) -> None:
    if not _once.acquire(blocking=False):
        return
    _hold()  # also in what follows: it needs no more of them
    said = _flat() if is_rank_zero() else []  # of several processes the first speaks
    try:
        program = [sys.executable, "-I", "-S", interrupt_process.__file__]
        os.execv(sys.executable, [*program, str(int(number)), *_before, *said])
    except (OSError, ValueError):
        interrupt_process.end(number, _before[0], said)


def _let_go() -> None:
    """All is done and said: from here on the exit code stays."""
    for number in _taken:
        signal.signal(number, signal.SIG_IGN)


def _forget() -> None:
    """A forked process has no such thread, and must not write into its parent's pipe."""
    signal.set_wakeup_fd(-1)
    for number in _taken:
        signal.signal(number, signal.SIG_DFL)
    _taken.clear()
    _release()


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _open_streams() -> None:
    """Where the shell closed stdin, stdout or stderr, no other file may get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
