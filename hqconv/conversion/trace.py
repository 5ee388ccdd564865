"""A trace of a conversion in Chrome's trace format: what every slot, thread and GPU stream does, and when."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hqconv.io.durable_files import output_errors

SLOTS, THREADS, STREAMS = GROUPS = ("slots", "threads", "GPU streams")

_BUFFERED = 4096  # spans that wait to be written: about a megabyte
_REMEDY = "The artifact is not affected; choose another file next time."


class Trace:
    """Spans on named tracks, written to a file for ui.perfetto.dev and chrome://tracing. Any thread may add one.

    The file is one JSON list. A buffer of spans is written whenever it is full, so that memory does not grow with the
    model; the viewers also read the unfinished list of a killed process.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or empty it. Raises OutputError."""
        self._path = path
        self._lock = threading.Lock()
        self._tracks: dict[tuple[str, str], tuple[int, int]] = {}  # group and track → process and thread of the format
        self._buffer: list[dict[str, Any]] = []
        self._error: OSError | None = None
        self._is_begun = False
        self.started_s = time.monotonic()
        with output_errors(path, _REMEDY):
            self._file = path.open("w", encoding="utf-8")
            self._file.write("[")
        for number, group in enumerate(GROUPS, start=1):
            self._name("process_name", group, number, 0)

    def add(self, group: str, track: str, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        """Add a span to a track of one of GROUPS. begin_s, end_s: of `time.monotonic`.

        Spans of one track either nest or do not overlap.
        """
        with self._lock:
            process, thread = self._numbers(group, track)
            span: dict[str, Any] = {"ph": "X", "name": name, "pid": process, "tid": thread}
            span["ts"] = round((begin_s - self.started_s) * 1e6, 1)  # µs
            span["dur"] = round((end_s - begin_s) * 1e6, 1)
            if arguments:
                span["args"] = arguments
            self._buffer.append(span)
            if len(self._buffer) >= _BUFFERED:
                self._write()

    def _numbers(self, group: str, track: str) -> tuple[int, int]:
        """Return the numbers of a track; at its first use, name it."""
        numbers = self._tracks.get((group, track))
        if numbers is None:
            numbers = self._tracks[group, track] = (GROUPS.index(group) + 1, len(self._tracks) + 1)
            self._name("thread_name", track, *numbers)
        return numbers

    def _name(self, kind: str, name: str, process: int, thread: int) -> None:
        self._buffer.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})

    def _write(self) -> None:
        """Write the buffer. After an error nothing more is kept: the conversion goes on without its trace."""
        lines, self._buffer = self._buffer, []
        if self._error is not None:
            return
        try:
            for line in lines:
                self._file.write((",\n" if self._is_begun else "\n") + json.dumps(line))
                self._is_begun = True
            self._file.flush()
        except OSError as error:
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the list and close the file. Raises OutputError if spans could not be written and nothing else failed."""
        with self._lock:
            self._write()
            try:
                if self._error is None:
                    self._file.write("\n]\n")
                self._file.close()
            except OSError as closing:
                self._error = self._error or closing
        if self._error is not None and kind is None:
            with output_errors(self._path, _REMEDY):
                raise self._error
