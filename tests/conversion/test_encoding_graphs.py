"""CUDA graphs of encodings: which batches get one, and that only a graph with the bytes of the operations is used.

On the CPU a stand-in runs the captured encoding again at each replay. Conversions on a GPU use CUDA's own graphs; the
tests marked `cuda` compare their artifacts with the CPU's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.conversion import convert, encoding_graphs, executor, resources
from hqconv.conversion.devices import CudaLane
from hqconv.conversion.encode_batch import EncodedTensors
from hqconv.conversion.encoding_graphs import EncodingGraphs
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

OPTIONS: dict[str, Any] = {"target": "sm90", "device": "cpu", "threads": 1, "ep": 2}
NUM_LAYERS = 6


class Event:
    """A CUDA event of work that is done at once."""

    def __init__(self, **_: object) -> None: ...
    def record(self, _: object) -> None: ...
    def synchronize(self) -> None: ...


class Graph:
    """A CUDA graph on the CPU: a replay encodes the bytes that lie in its input now."""

    num_replays = 0
    begins = True  # CUDA allows the capture
    replays = True  # else the results stay those of the capture
    capturing: Graph | None = None
    again: Callable[[], EncodedTensors]
    results: torch.Tensor

    def capture_begin(self, **_: object) -> None:
        if not type(self).begins:
            raise RuntimeError("operation not permitted when stream is capturing")
        type(self).capturing = self

    def capture_end(self) -> None:
        type(self).capturing = None

    def replay(self) -> None:
        type(self).num_replays += 1
        if type(self).replays:
            self.results.copy_(encoding_graphs._joined(self.again().outputs))


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    """A lane of a GPU in memory of the CPU, with graphs."""

    class Here(Graph):
        """Counted for one test."""

    joined = encoding_graphs._joined

    def join(tensors: list[torch.Tensor]) -> torch.Tensor:
        found = joined(tensors)
        if Here.capturing is not None:
            Here.capturing.results = found
        return found

    def lane(number: int, device: torch.device, *_: object) -> CudaLane:
        made = CudaLane(number, device)

        def encode(batch: Any, raw: Any) -> EncodedTensors:
            def again() -> EncodedTensors:
                return executor.encode_on_device(source, batch, raw, device)

            if Here.capturing is not None:
                Here.capturing.again = again
            return again()

        source: Any = None  # floats that lie in memory are encoded without it
        made.graphs = EncodingGraphs(encode)
        return made

    plan_staging = convert.plan_staging

    def with_out(*args: Any, **options: Any) -> Any:
        staging = plan_staging(*args, **options)
        return replace(staging, out_bytes=2 * staging.slot_bytes)

    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1 << 19)
    monkeypatch.setattr(convert, "plan_staging", with_out)
    monkeypatch.setattr(executor, "make_lane", lane)
    monkeypatch.setattr(encoding_graphs, "_joined", join)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Here)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return Here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("graphs") / "model", num_layers=NUM_LAYERS)


def converted(model: Path, out: Path, schema: str = "mxfp4", **options: Any) -> dict[str, str]:
    return snapshot(hqconv.convert(model, out, schema=schema, **OPTIONS, **options).out)


@pytest.mark.parametrize("schema", ["mxfp4", "int4-g64-zp", "nvfp4", "fp8-block"])
def test_replays_give_the_bytes_of_a_conversion(
    schema: str, model: Path, tmp_path: Path, graph: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = converted(model, tmp_path / "out", schema)
    assert graph.num_replays == NUM_LAYERS  # one lane: not of the first batch, twice of the second
    monkeypatch.undo()
    assert found == converted(model, tmp_path / "plain", schema)


def test_a_graph_with_other_bytes_is_not_used(
    model: Path, tmp_path: Path, graph: type[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph.replays = False
    with caplog.at_level(logging.INFO):
        found = converted(model, tmp_path / "out")
    assert "gave other bytes" in caplog.text
    assert 0 < graph.num_replays < NUM_LAYERS
    monkeypatch.undo()
    assert found == converted(model, tmp_path / "plain")


def test_a_refused_capture_leaves_the_operations(
    model: Path, tmp_path: Path, graph: type[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph.begins = False
    with caplog.at_level(logging.INFO):
        found = converted(model, tmp_path / "out")
    assert "without a CUDA graph: operation not permitted" in caplog.text
    assert graph.num_replays == 0
    monkeypatch.undo()
    assert found == converted(model, tmp_path / "plain")


def test_searches_are_not_captured(model: Path, tmp_path: Path, graph: type[Graph]) -> None:
    converted(model, tmp_path / "out", quantizer="mse")
    assert graph.num_replays == 0
