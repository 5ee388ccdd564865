"""Progress display on stderr for conversions and verifications."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from hqconv.cli import interrupt
from hqconv.cli.output import say
from hqconv.conversion.progress import Progress
from hqconv.errors import printable_line

_PLAIN_INTERVAL_S = 5.0
_LEAST_S = 1.0  # a speed is shown after this time
_SETTLED_S = 3.0  # before it, the speed is that of loading libraries and compiling loops
_NO_BAR = "\r\x1b[2K\x1b[?25h"  # clear the line and show the cursor
_BAR_WIDTH = 12
_AROUND_BAR = _BAR_WIDTH + 7  # with ` 100% `


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, e.g. `4.20 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def human_seconds(seconds: float) -> str:
    """Format a duration: `4.2 s`, `3:05` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def line_of(done: Progress, seconds: float, width: int | None = None) -> str:
    """Format the line `1.20 GB of 4.00 GB  0.52 GB/s  0:05 left  (3/12) model.layers.3.mlp.experts`.

    Resumed bytes count as done, but not for the speed. The speed is shown after one second, the time left after three.
    If the line exceeds `width` columns, the beginning of the unit's name is cut off, then the whole name.
    """
    speed = (done.done_bytes - done.resumed_bytes) / max(seconds, 1e-9)
    parts = [f"{human_bytes(done.done_bytes)} of {human_bytes(done.total_bytes)}"]
    if seconds >= _LEAST_S:
        parts.append(f"{speed / 1e9:.2f} GB/s")
    if speed and seconds >= _SETTLED_S:
        parts.append(f"{human_seconds((done.total_bytes - done.done_bytes) / speed)} left")
    figures, count = "  ".join(parts), f"({done.num_groups_done}/{done.num_groups})"
    group = printable_line(done.group)
    if width is not None:
        room = width - len(figures) - len(count) - 3
        group = group if len(group) <= room else f"…{group[len(group) - room + 1 :]}" if room > 8 else ""
    return "  ".join([figures, f"{count} {group}".rstrip()])


class ShownProgress:
    """Live bar on a terminal, a plain line every few seconds elsewhere, nothing if quiet.

    `update` is the callback for `hqconv.convert`, `of_check` for `hqconv.verify`. Neither fails if stderr is closed.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._started_s = self._last_line_s = time.monotonic()
        self._bar: Bar | None = None
        self._task, self._check = TaskID(0), ""
        self._announced = ExitStack()
        if not quiet and sys.stderr.isatty():
            said = TextColumn("{task.description}", markup=False)
            columns = (BarColumn(_BAR_WIDTH), TextColumn("{task.percentage:>3.0f}%"), said)
            console = Console(stderr=True, markup=False, highlight=False)
            self._bar = Bar(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> ShownProgress:
        if not self._quiet:
            from hqconv.jit import announced

            self._announced.enter_context(announced(say))
        if self._bar is not None:
            interrupt.set_prefix(_NO_BAR)
            with suppress(OSError):
                self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            interrupt.set_prefix("")
        self._announced.close()

    def update(self, done: Progress) -> None:
        """Show the progress of a conversion."""
        self._show(done, "")

    def of_check(self, check: str, done: Progress) -> None:
        """Show the progress of one check of a verification."""
        if check != self._check:
            self._check, self._started_s = check, time.monotonic()
        self._show(done, f"{check}: ")

    def _show(self, done: Progress, before: str) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        if self._bar is not None:
            width = self._bar.console.width - _AROUND_BAR - len(before)
            line = before + line_of(done, now - self._started_s, width)
            total = max(done.total_bytes, 1)
            with suppress(OSError):
                self._bar.update(self._task, completed=done.done_bytes, total=total, description=line)
        elif now - self._last_line_s >= _PLAIN_INTERVAL_S:
            self._last_line_s = now
            say(before + line_of(done, now - self._started_s))
