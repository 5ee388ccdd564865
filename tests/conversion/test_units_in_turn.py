"""Units in work: their batches go in turn, and some units go alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.conversion import executor, resources
from hqconv.conversion.executor import Executor
from hqconv.conversion.hub_prefetch import HubPrefetch
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

OPTIONS: dict[str, Any] = {"schema": "int4-g32", "target": "sm90", "device": "cpu", "threads": 2}
NUM_LAYERS, NUM_BATCHES = 3, 4  # of each layer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(
        tmp_path_factory.mktemp("turns") / "model", num_layers=NUM_LAYERS, num_experts=NUM_BATCHES
    )


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layer of each batch, in the order in which they are read."""
    found: list[str] = []
    feed_one = Executor._feed_one

    def feeding(self: Executor, unit: Any, slot: Any) -> None:
        found.append(unit.unit.name.removesuffix(".mlp.experts")[-1])
        feed_one(self, unit, slot)

    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1)  # one expert
    monkeypatch.setattr(Executor, "_feed_one", feeding)
    return found


def of_layers(fed: list[str]) -> str:
    """The order of the layers' batches; the copied tensors are left out."""
    return "".join(one for one in fed if one.isdigit())


def test_units_go_in_turn_and_every_order_gives_the_same_bytes(
    model: Path, tmp_path: Path, fed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = {}
    for in_work in (1, 2, 3):
        monkeypatch.setattr(executor, "_UNITS_IN_WORK", in_work)
        out = tmp_path / str(in_work)
        hqconv.convert(model, out, **OPTIONS)
        orders[of_layers(fed)] = snapshot(out)
        fed.clear()
    assert list(orders) == ["000011112222", "001010121222", "010210210212"]
    first, *others = orders.values()
    assert all(other == first for other in others)


def test_nothing_is_waited_for_beside_a_unit_in_work(
    model: Path, tmp_path: Path, fed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may only come when another unit is done: waiting for it in the middle of that unit would be for ever."""
    begun: list[str] = []
    has_work: list[bool] = []
    may_open = Executor._may_open

    def waiting(self: Executor, unit: Any, *, has_other_work: bool) -> bool:
        has_work[:] = [has_other_work]
        if not has_other_work:
            begun.append(f"{len(of_layers(fed))} {unit.name}")
        return may_open(self, unit, has_other_work=has_other_work)

    monkeypatch.setattr(Executor, "_may_open", waiting)
    monkeypatch.setattr(HubPrefetch, "is_ready", lambda *_: not has_work[0])
    hqconv.convert(model, tmp_path / "out", **OPTIONS)
    assert of_layers(fed) == "".join(digit * NUM_BATCHES for digit in "012")
    assert [one for one in begun if "layers" in one] == [
        f"{number * NUM_BATCHES} model.layers.{number}.mlp.experts" for number in range(NUM_LAYERS)
    ]
