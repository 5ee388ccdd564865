"""Progress display on stderr for conversions and verifications."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from hqconv.cli import interrupt
from hqconv.cli.output import say
from hqconv.conversion.progress import Progress
from hqconv.errors import printable_line
from hqconv.reports.texts import human_bytes

_PLAIN_INTERVAL_S = 5.0
_LEAST_S = 1.0  # a speed is shown after this time
_SETTLED_S = 3.0  # the time left is shown if its end was predicted alike for so long
_TOLERANCE = 0.25  # of the time left, between these predictions
_WINDOW_S, _SAMPLE_S = 10.0, 0.25  # the speed is of the last seconds; samples are not taken more often
_NO_BAR = "\r\x1b[2K\x1b[?25h"  # clear the line and show the cursor
_BAR_WIDTH = 12
_AROUND_BAR = _BAR_WIDTH + 7  # with ` 100% `


def human_rate(bytes_per_s: float) -> str:
    """Format a speed with three digits: `1.25 GB/s`, `90.1 MB/s` or `310 kB/s`."""
    number, unit = human_bytes(bytes_per_s).split()
    value = float(number)
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}/s"


def human_seconds(seconds: float) -> str:
    """Format a duration: `4.2 s`, `3:05` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """Speed of a work of `total` bytes over the last seconds, and the time left once its estimate has settled.

    The first seconds go to loading libraries and compiling loops, so that early estimates are far too long.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # time, bytes
        self._ends: deque[tuple[float, float]] = deque()  # time, predicted end

    def update(self, now_s: float, num_bytes: int, total_bytes: int) -> None:
        """Take a sample: `num_bytes` of `total_bytes` were processed in this run until `now_s`."""
        if self._samples and now_s - self._samples[-1][0] < _SAMPLE_S:
            return
        self._samples.append((now_s, num_bytes))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()
        if self.bytes_per_s:
            self._ends.append((now_s, now_s + (total_bytes - num_bytes) / self.bytes_per_s))
            while len(self._ends) > 2 and self._ends[1][0] <= now_s - _SETTLED_S:
                self._ends.popleft()

    @property
    def bytes_per_s(self) -> float | None:
        """Speed over the window; None in the first second, and without any progress."""
        if not self._samples:
            return None
        (begin_s, before), (end_s, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end_s - begin_s) if end_s - begin_s >= _LEAST_S and after > before else None

    @property
    def seconds_left(self) -> float | None:
        """Time left at the last sample; None until predictions of the end agree for some seconds."""
        if not self._ends or self._ends[-1][0] - self._ends[0][0] < _SETTLED_S:
            return None
        ends = [end for _, end in self._ends]
        left_s = ends[-1] - self._ends[-1][0]
        return left_s if max(ends) - min(ends) <= max(_TOLERANCE * left_s, 1.0) else None


def line_of(done: Progress, pace: Pace, width: int | None = None) -> str:
    """Format the line `1.20 GB of 4.00 GB  520 MB/s  0:05 left  (3/12) model.layers.3.mlp.experts`.

    Resumed bytes count as done. If the line exceeds `width` columns, the beginning of the unit's name is cut off, then
    the whole name.
    """
    parts = [f"{human_bytes(done.done_bytes)} of {human_bytes(done.total_bytes)}"]
    if pace.bytes_per_s is not None:
        parts.append(human_rate(pace.bytes_per_s))
    if pace.seconds_left is not None:
        parts.append(f"{human_seconds(pace.seconds_left)} left")
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
        self._pace, self._last_line_s = Pace(), time.monotonic()
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
            self._check, self._pace = check, Pace()
        self._show(done, f"{check}: ")

    def _show(self, done: Progress, before: str) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        self._pace.update(now, done.done_bytes - done.resumed_bytes, done.total_bytes - done.resumed_bytes)
        if self._bar is not None:
            width = self._bar.console.width - _AROUND_BAR - len(before)
            line = before + line_of(done, self._pace, width)
            total = max(done.total_bytes, 1)
            with suppress(OSError):
                self._bar.update(self._task, completed=done.done_bytes, total=total, description=line)
        elif now - self._last_line_s >= _PLAIN_INTERVAL_S:
            self._last_line_s = now
            say(before + line_of(done, self._pace))
