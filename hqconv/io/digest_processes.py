"""SHA-256 of files in processes of their own, beside threads that need Python's lock.

A thread that hashes takes the lock again after every chunk. Where many threads want it, each of them waits for it.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from hqconv.io import digest_worker
from hqconv.io.file_access import open_limit, sha256_of

MAX_PROCESSES = 8  # of one pool
_MIN_THREADS = 8  # of a run whose files are hashed in processes: with fewer, its threads seldom wait for the lock
_MIN_OPEN_LIMIT = 64  # of the system: each process has two pipes
_POLL_S = 0.1
_START_S = 30.0
_NEWLINE = b"\n"


def digest_processes(num_threads: int) -> DigestProcesses | None:
    """Return a pool for a run with so many threads; None where these should hash themselves."""
    is_of_use = num_threads >= _MIN_THREADS and open_limit() >= _MIN_OPEN_LIMIT
    return DigestProcesses() if is_of_use else None


class _LostError(Exception):
    """The process ended, did not start, or gave no answer that can be understood."""


class DigestProcesses:
    """A pool of processes that hash files, each started when it is needed; a context manager that ends them.

    Any thread may use it. A file whose process is lost is hashed by the calling thread.
    """

    def __init__(self) -> None:
        """Start with no process."""
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_of_use = bool(sys.executable) and not getattr(sys, "frozen", False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the idle processes; no thread may be using one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def sha256_of(self, path: Path, keep_on: Callable[[], object] | None = None) -> str:
        """Compute the SHA-256 of a file's bytes, in hexadecimal. Raises OSError for an unreadable file.

        keep_on: called from time to time; its exception ends the work.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None and self._is_of_use:
            try:
                worker = _Worker(keep_on)
            except (OSError, _LostError):
                self._is_of_use = False
        if worker is None:
            return sha256_of(path, keep_on)
        try:
            answer = worker.ask(path, keep_on)
        except (OSError, _LostError):
            worker.end()
            return sha256_of(path, keep_on)
        except BaseException:
            worker.end()
            raise
        with self._lock:
            self._idle.append(worker)
        kind, _, value = answer.partition(" ")
        if kind == "errno":
            raise OSError(int(value), os.strerror(int(value)), str(path))
        return value


class _Worker:
    def __init__(self, keep_on: Callable[[], object] | None) -> None:
        """Start a process. Raises OSError, _LostError if it is no Python, and what `keep_on` raises."""
        command = [sys.executable, "-I", "-S", str(Path(digest_worker.__file__).resolve())]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # A process group of its own: Ctrl-C is for the process that waits.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0, process_group=0, text=False
        )
        try:
            if self._answer(keep_on, _START_S) != "ready":
                raise _LostError
        except BaseException:
            self.end()
            raise

    def ask(self, path: Path, keep_on: Callable[[], object] | None) -> str:
        """Return the process's answer for a file. Raises OSError, _LostError, and what `keep_on` raises."""
        assert self._process.stdin is not None
        self._process.stdin.write(os.fsencode(path.absolute()).hex().encode() + _NEWLINE)
        answer = self._answer(keep_on, None)
        if not answer.startswith(("sha256 ", "errno ")):
            raise _LostError
        return answer

    def _answer(self, keep_on: Callable[[], object] | None, limit_s: float | None) -> str:
        """Wait for a line."""
        assert self._process.stdout is not None
        descriptor, said, waited_s = self._process.stdout.fileno(), b"", 0.0
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not said.endswith(_NEWLINE):
            if poll.poll(_POLL_S * 1e3):
                more = os.read(descriptor, 4096)
                if not more:
                    raise _LostError
                said += more
            else:
                waited_s += _POLL_S
                if limit_s is not None and waited_s >= limit_s:
                    raise _LostError
            if keep_on is not None:
                keep_on()
        return said.decode(errors="replace").rstrip()

    def end(self) -> None:
        """End the process, also while it hashes."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        self._process.wait()
