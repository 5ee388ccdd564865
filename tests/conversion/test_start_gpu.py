"""The CUDA context that is created beside the start of a conversion."""

from __future__ import annotations

import threading

import pytest
import torch

from hqconv.conversion import option_values
from hqconv.conversion.option_values import start_gpu


def test_the_context_of_this_process_gpu_is_created_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure is no message of the thread: the first use of the GPU fails again, and is reported."""
    asked, is_asked = list[tuple[str, str]](), threading.Event()

    def create(name: str) -> None:
        asked.append((name, threading.current_thread().name))
        is_asked.set()
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(threading, "excepthook", lambda failed: asked.append(("failed", str(failed.exc_value))))
    monkeypatch.setattr(option_values, "_num_gpus", lambda: 4)
    monkeypatch.setattr(option_values, "local_rank", lambda: (2, 3))
    monkeypatch.setattr(torch.cuda, "synchronize", create)
    for device, in_team, expected in (("auto", False, "cuda:0"), ("cuda", True, "cuda:2"), ("cuda:3", True, "cuda:3")):
        asked.clear()
        is_asked.clear()
        start_gpu(device, in_team=in_team)
        assert is_asked.wait(60)
        for thread in threading.enumerate():
            if thread.name == "hqconv-context":
                thread.join()
        assert asked == [(expected, "hqconv-context")]


@pytest.mark.parametrize("device", ["cpu", "cuda:7", "gpu", "auto"])
def test_nothing_begins_without_such_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of a wrong device come later, where all processes hear of them."""
    monkeypatch.setattr(option_values, "_num_gpus", lambda: 0)
    monkeypatch.setattr(option_values, "_create_context", lambda name: pytest.fail("a context was asked for"))
    start_gpu(device)
    assert not any(thread.name == "hqconv-context" for thread in threading.enumerate())
