"""Progress display on stderr for conversions and verifications."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column

from hqconv.cli.output import say
from hqconv.conversion.stages import Progress
from hqconv.errors import printable_line

_PLAIN_INTERVAL_S = 5.0


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, e.g. `4.20 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


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


class ShownProgress:
    """Live bar on a terminal, a plain line every few seconds elsewhere, nothing if quiet.

    `update` is the callback for `hqconv.convert`, `of_check` for `hqconv.verify`. Neither fails if stderr is closed.
    Resumed bytes count as done, but not for the speed.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last_line_s = time.monotonic()
        self._announced = ExitStack()
        self._tasks: dict[str, TaskID] = {}  # by check
        self._begun_s: dict[str, float] = {}  # by check
        self._bar: Bar | None = None
        if not quiet and sys.stderr.isatty():
            name = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            self._bar = Bar(
                BarColumn(12),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(compact=True),
                name,
                console=Console(stderr=True, markup=False, highlight=False),
                transient=True,
                refresh_per_second=4,
            )

    def __enter__(self) -> ShownProgress:
        if not self._quiet:
            from hqconv.jit import announced

            self._announced.enter_context(announced(say))
        if self._bar is not None:
            with suppress(OSError):
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
        self._announced.close()

    def update(self, done: Progress) -> None:
        """Show the progress of a conversion."""
        self.of_check("", done)

    def of_check(self, check: str, done: Progress) -> None:
        """Show the progress of one check of a verification."""
        if self._quiet:
            return
        text = f"{check} ({done.num_units_done}/{done.num_units}) {printable_line(done.unit)}"
        text = text.strip()
        if self._bar is not None:
            with suppress(OSError):
                self._update_bar(self._bar, check, done, text)
            return
        now_s = time.monotonic()
        passed_s = now_s - self._begun_s.setdefault(check, now_s)
        if now_s - self._last_line_s < _PLAIN_INTERVAL_S:
            return
        self._last_line_s = now_s
        speed = ""
        if passed_s:
            speed = f"{human_rate((done.done_bytes - done.resumed_bytes) / passed_s)}  "
        say(f"{human_bytes(done.done_bytes)} of {human_bytes(done.total_bytes)}  {speed}{text}")

    def _update_bar(self, bar: Bar, check: str, done: Progress, text: str) -> None:
        if check not in self._tasks:
            for task in self._tasks.values():
                bar.update(task, visible=False)
            self._tasks[check] = bar.add_task(
                "", total=max(done.total_bytes, 1), completed=done.resumed_bytes
            )
        bar.update(self._tasks[check], completed=done.done_bytes, description=text)
