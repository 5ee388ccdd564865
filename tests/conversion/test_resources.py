"""Memory limits: host and GPU, before the work and while it runs out. No GPU is needed to say so."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hqconv
from hqconv.conversion import resources
from hqconv.conversion.convert import convert
from hqconv.conversion.encode import LayerEncoder
from hqconv.conversion.resources import (
    Resources,
    bounded_gpu,
    cpu_need,
    gpu_need,
    pinned_need,
    plan_staging,
    time_text,
)
from hqconv.errors import RequestError
from hqconv.io.durable_files import copy_whole
from hqconv.models.moe_layer import RawLayout
from hqconv.sources.opening import open_source
from tests.make.conversions import open_plan, run
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

GIB = 1 << 30
CUDA, CPU = "cuda:0", "cpu"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_qwen3_moe(tmp_path / "model", num_layers=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU of 80 GiB of which 10 are free; what is asked of it is noted."""
    state: dict[str, Any] = {"fraction": 1.0, "set": [], "reserved": 0}

    def set_fraction(fraction: float, _: object) -> None:
        state["set"].append(fraction)
        state["fraction"] = fraction

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state["reserved"])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: state["fraction"])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return state


def test_workers_fit_into_both_memories(model: Path, gpu: dict[str, Any]) -> None:
    source, plan = open_plan(model, "mxfp4")
    source.close()
    layers, total = plan.layers, plan.layers[0].layer.num_experts
    host, device, pinned = (
        need(layers[0]).num_bytes(1) for need in (cpu_need, gpu_need, pinned_need)
    )

    def staged(*bounds: Any) -> tuple[int, int]:
        staging = plan_staging(layers, Resources(*bounds))
        whole = RawLayout(layers[0].layer, range(staging.num_experts)).num_bytes
        assert whole <= staging.slot_bytes <= 1.1 * whole
        return staging.num_lanes, staging.num_experts

    assert staged(CPU, 3 * host, 4) == (3, 1)
    assert staged(CPU, GIB, 8) == (4, total)  # each with a helper
    two = 2 * cpu_need(layers[0]).num_bytes(2)
    assert staged(CPU, two, 2) == (2, 2)  # as many lanes as asked for, then experts
    assert staged(CUDA, GIB, 8, 2 * device) == (2, 1)
    assert staged(CUDA, pinned, 8, GIB) == (1, 1)
    assert staged(CUDA, GIB, 8) == (3, total)  # of a GPU that is free enough
    for limits, option in (
        (Resources(CPU, host - 1, 8), "--max-memory"),
        (Resources(CUDA, pinned - 1, 8), "--max-memory"),
        (Resources(CUDA, GIB, 8, device - 1), "--max-gpu-memory"),
    ):
        with pytest.raises(RequestError, match="does not fit") as caught:
            plan_staging(plan.layers, limits)
        assert caught.value.where == option


def test_torch_is_held_to_the_bound_and_given_back(gpu: dict[str, Any]) -> None:
    with bounded_gpu(Resources(CUDA, GIB, 1, 8 * GIB), "Go on."):
        assert gpu["fraction"] == 0.1
    assert gpu["set"] == [0.1, 1.0]
    gpu["set"].clear()
    with bounded_gpu(Resources(CUDA, GIB, 1), "Go on."):  # most of the 10 GiB that are free
        assert gpu["fraction"] == pytest.approx(0.1)
    gpu["reserved"] = 32 * GIB  # a caller's own model
    with bounded_gpu(Resources(CUDA, GIB, 1, 8 * GIB), "Go on."):
        assert gpu["fraction"] == 0.5
    with bounded_gpu(Resources(CPU, GIB, 1), "Go on."):
        pass
    assert len(gpu["set"]) == 4


def test_running_out_of_gpu_memory_is_a_request_that_cannot_be_met(gpu: dict[str, Any]) -> None:
    with (
        pytest.raises(RequestError, match="GPU's memory is not enough") as caught,
        bounded_gpu(Resources(CUDA, GIB, 1, 8 * GIB), "Go on."),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert "8192 MiB" in caught.value.expected
    assert caught.value.found == "10240 MiB free"
    assert "--device cpu" in caught.value.remedy
    assert caught.value.remedy.endswith("Go on.")
    assert gpu["fraction"] == 1.0


def test_running_out_in_a_worker_ends_the_conversion_so(
    model: Path, tmp_path: Path, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the worker's thread to the caller, and the unfinished folder can be resumed on the CPU."""
    real, calls = LayerEncoder.encode, []

    def fail(*arguments: Any, **words: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments, **words)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(LayerEncoder, "encode", fail)
        patch.setattr(Resources, "is_cuda", True)
        patch.setattr("hqconv.conversion.convert.check_kernels", lambda _: None)
        patch.setattr(resources, "_CUDA_BATCH_BYTES", 1)  # one expert at a time
        with pytest.raises(RequestError, match="GPU's memory is not enough") as caught:
            run(model, out, "mxfp4")
        assert caught.value.remedy.endswith("Then go on with --resume.")
    assert not (out / "hqconv.json").exists()
    run(model, out, "mxfp4", resume=True)
    run(model, tmp_path / "undisturbed", "mxfp4")
    assert snapshot(out) == snapshot(tmp_path / "undisturbed")


def test_loose_files_are_copied_a_piece_at_a_time(tmp_path: Path) -> None:
    """However large: a tokenizer of 64 MiB takes no more memory than one of 8."""
    source, out = tmp_path / "big.bin", tmp_path / "out"
    with source.open("wb") as file:
        file.write(b"head")
        file.truncate(64 << 20)
    tracemalloc.start()
    record = copy_whole(source, out, "sub/big.bin")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20
    assert record.size_bytes == 64 << 20
    assert (out / "sub/big.bin").read_bytes() == source.read_bytes()


def test_a_gpu_without_a_c_compiler_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.device) -> None:
        raise RequestError(
            "Triton cannot build the kernels.", where="cuda:0", remedy="Use --device cpu."
        )

    monkeypatch.setattr("hqconv.conversion.convert.check_kernels", fail)
    model = write_qwen3_moe(tmp_path / "model")
    source, plan = (
        open_source(model),
        hqconv.plan(model, schema="int4", target="sm90", quantizer="mse"),
    )
    gpu = Resources("cuda:0", 1 << 30, 2, max_gpu_bytes=1 << 30)
    with source, pytest.raises(RequestError, match="Triton cannot build"):
        convert(source, plan, tmp_path / "out", gpu)
    assert not (tmp_path / "out").exists()


def test_the_time_of_a_calibration_on_processors_stands_beside_a_gpus() -> None:
    """Of Qwen3-30B-A3B: more than a day on two processors, some minutes on a GPU, and a fraction without it."""
    layer = SimpleNamespace(
        num_experts=128, hidden_size=2048, intermediate_size=768, roles=("w1", "w3", "w2")
    )
    layer.num_bytes = 128 * 3 * 2048 * 768 * 2
    plans: dict[str, Any] = {
        quantizer: [
            SimpleNamespace(
                layer=layer, encoding=SimpleNamespace(quantizer=quantizer, is_direct=False)
            )
        ]
        * 48
        for quantizer in ("rtn", "gptq")
    }
    two = Resources(CPU, GIB, 2)
    assert time_text(plans["rtn"], two) == "about a minute on 2 threads, without downloads"
    told = "about 3 days on 2 threads, 5 minutes on an H200, without downloads"
    assert time_text(plans["gptq"], two) == told
    assert two.estimate_s(plans["gptq"], on_gpu=True) > 60
