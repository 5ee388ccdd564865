"""Shows a conversion's progress on stderr."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_PLAIN_INTERVAL_S = 5.0


def human_bytes(num_bytes: float) -> str:
    """Bytes in the decimal units that disks and shards are measured in."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def human_seconds(seconds: float) -> str:
    """`4.2 s`, `3:05` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(text: str) -> None:
    """One message on stderr."""
    print(text, file=sys.stderr, flush=True)


class Meter:
    """Bytes done, speed and time left. Resumed bytes count as done but not for the speed."""

    def __init__(self, total_bytes: int, num_groups: int) -> None:
        self.total_bytes, self.num_groups = total_bytes, num_groups
        self.done_bytes = self.resumed_bytes = self.num_groups_done = 0
        self.group = ""
        self._of_group: dict[str, int] = {}
        self._started = time.monotonic()

    def advance(self, group: str, num_bytes: int) -> None:
        self.group = group
        self.done_bytes += num_bytes
        self._of_group[group] = self._of_group.get(group, 0) + num_bytes

    def finish(self, group: str, resumed: bool) -> None:
        num_bytes = self._of_group.pop(group, 0)
        self.num_groups_done += 1
        if resumed:
            self.resumed_bytes += num_bytes

    @property
    def bytes_per_second(self) -> float:
        return (self.done_bytes - self.resumed_bytes) / max(time.monotonic() - self._started, 1e-9)

    def line(self) -> str:
        """`1.20 / 4.00 GB  0.52 GB/s  0:05 left  model.layers.3.mlp.experts`."""
        speed = self.bytes_per_second
        left = (self.total_bytes - self.done_bytes) / speed if speed else None
        return "  ".join(
            (
                f"{human_bytes(self.done_bytes)} of {human_bytes(self.total_bytes)}",
                f"{speed / 1e9:.2f} GB/s",
                f"{human_seconds(left)} left" if left is not None else "",
                f"({self.num_groups_done}/{self.num_groups}) {self.group}",
            )
        )


class ConversionProgress:
    """A live bar where stderr is a terminal, a plain line every few seconds elsewhere, nothing if quiet.

    `report` and `on_group` are `convert`'s callbacks and may come from any thread. They never fail: a
    closed stderr ends the progress, not the conversion.
    """

    def __init__(self, total_bytes: int, num_groups: int, *, quiet: bool) -> None:
        self.meter = Meter(total_bytes, num_groups)
        self._lock = threading.Lock()
        self._quiet = quiet
        self._last_line_s = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if not quiet and sys.stderr.isatty():
            columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
            console = Console(stderr=True, markup=False, highlight=False)
            self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task("", total=max(total_bytes, 1))

    def __enter__(self) -> ConversionProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, group: str, num_bytes: int) -> None:
        with self._lock:
            self.meter.advance(group, num_bytes)
            self._show()

    def on_group(self, group: str, resumed: bool) -> None:
        with self._lock:
            self.meter.finish(group, resumed)
            self._show()

    def _show(self) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            line = self.meter.line()
            self._bar.update(self._task, completed=self.meter.done_bytes, description=line)
            return
        now = time.monotonic()
        if now - self._last_line_s >= _PLAIN_INTERVAL_S:
            self._last_line_s = now
            try:
                say(self.meter.line())
            except OSError:
                self._quiet = True
