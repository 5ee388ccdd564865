"""The libraries and the CUDA context that are loaded beside the start of a conversion."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from hqconv.conversion import option_values
from hqconv.conversion.option_values import start_gpu


def wait_for_threads() -> int:
    """The number of threads that had been started."""
    threads = [thread for thread in threading.enumerate() if thread.name == "hqconv-start"]
    for thread in threads:
        thread.join(60)
    return len(threads)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contexts that were asked for, and errors of threads; the GPU has no memory left."""
    found: list[str] = []

    def create(name: str) -> None:
        found.append(name)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(
        threading, "excepthook", lambda failed: found.append(f"failed: {failed.exc_value}")
    )
    monkeypatch.setattr(option_values, "has_driver", lambda: True)
    monkeypatch.setattr(option_values, "_num_gpus", lambda: 4)
    monkeypatch.setattr(option_values, "local_rank", lambda: (2, 3))
    monkeypatch.setattr(torch.cuda, "synchronize", create)
    return found


def test_the_context_of_this_process_gpu_is_created_in_a_thread(asked: list[str]) -> None:
    """Its failure is no message of the thread: the first use of the GPU fails again, and is reported."""
    for device, is_part, expected in (
        ("auto", False, "cuda:0"),
        ("cuda", True, "cuda:2"),
        ("cuda:3", True, "cuda:3"),
    ):
        start_gpu(device, is_part=is_part)
        wait_for_threads()
        assert asked.pop() == expected
        assert not asked


@pytest.mark.parametrize("device", ["cuda:7", "gpu"])
def test_a_wrong_device_is_told_later(device: str, asked: list[str]) -> None:
    """Where all processes hear of it."""
    start_gpu(device)
    wait_for_threads()
    assert not asked


@pytest.mark.parametrize(
    ("device", "has_driver"), [("cpu", True), ("auto", False), ("cuda", False)]
)
def test_nothing_is_loaded_without_a_gpu(device: str, has_driver: bool) -> None:
    program = f"""
import sys, threading
from hqconv.conversion import option_values
option_values.has_driver = lambda: {has_driver}
option_values.start_gpu({device!r})
assert len(threading.enumerate()) == 1
print(sorted(sys.modules.keys() & {{"torch", "numba"}}))
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"
