"""Live weights in one engine, step after step: for serve_once.py, which runs in the engine's process.

A step is {"name", "path", "fails_after", "sleeps"}: an artifact or a delta to load in place (None: what is served);
the read of its files after which the disk "dies" (None: it lives); and if the engine sleeps deeply before it.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def run(llm: Any, steps: list[dict[str, Any]], ask: Callable[[], tuple[Any, Any]], *, in_process: bool) -> list[Any]:
    """Take each step, ask again after it, and tell times (s) and memory (bytes); memory only `in_process`."""
    return [_taken(llm, step, ask, in_process) for step in steps]


def _taken(llm: Any, step: dict[str, Any], ask: Callable[[], tuple[Any, Any]], in_process: bool) -> dict[str, Any]:
    if step.get("sleeps"):
        llm.sleep(2)
        llm.wake_up(["weights"])
    found: dict[str, Any] = {"name": step["name"]}
    with _watched(found, in_process), _dying(step["path"], step.get("fails_after")):
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": step["path"]})
        except Exception as error:  # noqa: BLE001 - it is what the step reports
            found["error"] = f"{type(error).__name__}: {error}"
    if step.get("sleeps"):
        llm.wake_up(["kv_cache"])
    llm.reset_prefix_cache()
    found["answers"], found["first"] = ask()
    return found


@contextmanager
def _watched(found: dict[str, Any], in_process: bool) -> Iterator[None]:
    import torch

    if in_process:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gpu, host = torch.cuda.memory_allocated(), _host_bytes("VmRSS")
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    begun = time.perf_counter()
    yield
    if in_process:
        torch.cuda.synchronize()
    found["seconds"] = time.perf_counter() - begun
    if in_process:
        found["gpu_more_bytes"] = torch.cuda.max_memory_allocated() - gpu
        found["host_more_bytes"] = _host_bytes("VmHWM") - host  # pages of mapped files included


def _host_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return 0 if found is None else int(found[1]) * 1024


@contextmanager
def _dying(path: str | None, num_reads: int | None) -> Iterator[None]:
    """Let reads of an artifact's rank files fail after so many, as a disk does that dies."""
    if path is None or num_reads is None:
        yield
        return
    tensor_filler: Any = importlib.import_module("hqconv.artifact.tensor_filler")
    own, left, folder = tensor_filler.PieceReader, [num_reads], Path(path)

    class Dying(own):  # type: ignore[misc, valid-type]
        """The reader of a disk that dies."""

        def __init__(self, file: Path, *words: Any) -> None:
            super().__init__(file, *words)
            self.is_on_it = folder in Path(file).parents

        def fill(self, *words: Any) -> Any:
            self._count()
            return super().fill(*words)

        def fill_buffer(self, *words: Any) -> Any:
            self._count()
            return super().fill_buffer(*words)

        def _count(self) -> None:
            left[0] -= self.is_on_it
            if left[0] < 0 and self.is_on_it:
                raise OSError("this disk died, as the check wants it")

    tensor_filler.PieceReader = Dying
    try:
        yield
    finally:
        tensor_filler.PieceReader = own
