"""Units in work take turns by bytes, and copied shards are taken from the first on."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.conversion import executor, resources
from hqconv.conversion.convert import take_in_turn
from hqconv.planning.output_units import MoeLayerPlan
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

OPTIONS: dict[str, Any] = {"schema": "int4", "target": "sm90", "device": "cpu", "threads": 2}


def test_copied_shards_alternate_with_layers(tmp_path: Path) -> None:
    plan = hqconv.plan(write_qwen3_moe(tmp_path / "model", num_layers=3), schema="int4", target="sm90")
    layers = [unit for unit in plan.units if isinstance(unit, MoeLayerPlan)]
    (copied,) = (unit for unit in plan.units if not isinstance(unit, MoeLayerPlan))
    first, second, third = layers
    assert take_in_turn([*layers, copied, copied]) == [copied, first, copied, second, third]
    assert take_in_turn([copied, first]) == take_in_turn([first, copied]) == [copied, first]
    assert take_in_turn([]) == []


def test_units_get_as_many_bytes_in_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=6)
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(4096, 128).bfloat16()}, model / "model.safetensors")
    plain = snapshot(hqconv.convert(model, tmp_path / "plain", **OPTIONS).out)
    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1 << 18)
    monkeypatch.setattr(executor, "_CHUNK_BYTES", 1 << 12)  # pieces are far smaller than batches
    fed: list[tuple[str, int]] = []
    read_ahead = executor.Executor._read_ahead

    def noted(self: executor.Executor, in_flight: Any) -> None:
        fed.append((in_flight.job.unit.name, in_flight.item.num_bytes))
        read_ahead(self, in_flight)

    def open_at_once(self: executor.Executor, job: Any) -> None:
        open_files(self, job)
        self._stages.wait(lambda: job.writer is not None)

    open_files = executor.Executor._open
    monkeypatch.setattr(executor.Executor, "_open", open_at_once)
    monkeypatch.setattr(executor.Executor, "_read_ahead", noted)
    assert snapshot(hqconv.convert(model, tmp_path / "out", **OPTIONS).out) == plain
    (copied,) = {name for name, _ in fed if "layers" not in name}
    last = max(place for place, (name, _) in enumerate(fed) if name == copied)
    of_unit: dict[str, int] = defaultdict(int)
    for name, num_bytes in fed[: last + 1]:
        of_unit[name] += num_bytes
    of_layers = sum(of_unit.values()) - of_unit[copied]
    largest = max(num_bytes for _, num_bytes in fed)
    assert of_unit[copied] > 4 * largest
    # Two units at a time: beside the shard, batches of as many bytes, but for the begin and the end of a unit.
    assert of_unit[copied] - largest <= of_layers < of_unit[copied] + 3 * largest
