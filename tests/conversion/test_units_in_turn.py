"""Units in work: their batches go in turn by bytes, once their files are there, and some units go alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.conversion import executor, resources
from hqconv.conversion.convert import take_in_turn
from hqconv.conversion.executor import Executor
from hqconv.conversion.hub_prefetch import HubPrefetch
from hqconv.planning.output_units import MoeLayerPlan
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
    """The layer of each batch, in the order in which they are read; files are there as soon as they are asked for."""
    found: list[str] = []
    feed_one, open_unit, create = Executor._feed_one, Executor._open, Executor._create

    def feeding(self: Executor, unit: Any, slot: Any) -> None:
        found.append(unit.unit.name.removesuffix(".mlp.experts")[-1])
        feed_one(self, unit, slot)

    def opening(self: Executor, planned: Any) -> Any:
        unit = open_unit(self, planned)
        create(self, unit)
        return unit

    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1)  # one expert
    monkeypatch.setattr(Executor, "_feed_one", feeding)
    monkeypatch.setattr(Executor, "_open", opening)
    monkeypatch.setattr(Executor, "_create", lambda *_: None)
    return found


def of_layers(fed: list[str]) -> str:
    """The order of the layers' batches; the copied tensors are left out."""
    return "".join(one for one in fed if one.isdigit())


def test_batches_of_two_units_go_in_turn(model: Path, tmp_path: Path, fed: list[str]) -> None:
    hqconv.convert(model, tmp_path / "out", **OPTIONS)
    assert of_layers(fed) == "000101212122"  # the first one beside the copied tensors


def test_every_order_gives_the_same_bytes(
    model: Path, tmp_path: Path, fed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = {}
    for in_work, in_turn in ((1, 1), (2, 1), (3, 2), (3, 3)):
        monkeypatch.setattr(executor, "_UNITS_IN_WORK", in_work)
        monkeypatch.setattr(executor, "_UNITS_IN_TURN", in_turn)
        out = tmp_path / f"{in_work}-{in_turn}"
        hqconv.convert(model, out, **OPTIONS)
        orders[of_layers(fed)] = snapshot(out)
        fed.clear()
    assert len(orders) == 3
    first, *others = orders.values()
    assert all(other == first for other in others)


def test_a_unit_waits_for_its_files_while_another_is_read(
    model: Path, tmp_path: Path, fed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer's files come after the first layer's last batch."""
    opening, feed_one = Executor._open, Executor._feed_one
    late: list[Callable[[], None]] = []

    def open_late(self: Executor, planned: Any) -> Any:
        unit = opening(self, planned)
        if ".layers.1." in planned.name:
            writer, unit.writer = unit.writer, None
            late.append(lambda: setattr(unit, "writer", writer))
        return unit

    def feeding(self: Executor, unit: Any, slot: Any) -> None:
        feed_one(self, unit, slot)
        if of_layers(fed).count("0") == NUM_BATCHES:
            for come in late:
                come()
            late.clear()

    monkeypatch.setattr(Executor, "_open", open_late)
    monkeypatch.setattr(Executor, "_feed_one", feeding)
    hqconv.convert(model, tmp_path / "out", **OPTIONS)
    order = of_layers(fed)
    assert order.startswith("00" + "02" * (NUM_BATCHES - 3) + "0")
    assert order.index("1") > order.rindex("0")


def test_nothing_is_waited_for_beside_a_unit_in_work(
    model: Path, tmp_path: Path, fed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may only come when another unit is done: waiting for it in the middle of that unit would be for ever."""
    begun: list[str] = []
    beside: list[Any] = []
    may_open = Executor._may_open

    def waiting(self: Executor, unit: Any, in_work: Any) -> bool:
        beside[:] = in_work
        if not in_work:
            begun.append(f"{len(of_layers(fed))} {unit.name}")
        return may_open(self, unit, in_work)

    monkeypatch.setattr(Executor, "_may_open", waiting)
    monkeypatch.setattr(HubPrefetch, "is_ready", lambda *_: not beside)
    hqconv.convert(model, tmp_path / "out", **OPTIONS)
    assert of_layers(fed) == "".join(digit * NUM_BATCHES for digit in "012")
    assert [one for one in begun if "layers" in one] == [
        f"{number * NUM_BATCHES} model.layers.{number}.mlp.experts" for number in range(NUM_LAYERS)
    ]


def test_copied_shards_alternate_with_layers(tmp_path: Path) -> None:
    plan = hqconv.plan(
        write_qwen3_moe(tmp_path / "model", num_layers=3), schema="int4", target="sm90"
    )
    layers = [unit for unit in plan.units if isinstance(unit, MoeLayerPlan)]
    (copied,) = (unit for unit in plan.units if not isinstance(unit, MoeLayerPlan))
    first, second, third = layers
    assert take_in_turn([*layers, copied, copied]) == [first, copied, second, copied, third]
    assert take_in_turn([copied, first]) == take_in_turn([first, copied]) == [first, copied]
    assert take_in_turn([]) == []


def copied_and_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A model with a copied shard of many pieces, and its artifact; from now on files are there before their bytes."""
    model = write_qwen3_moe(tmp_path / "model", num_layers=6)
    tensors = load_file(model / "model.safetensors")
    save_file(
        {**tensors, "model.embed_tokens.weight": torch.zeros(4096, 128).bfloat16()},
        model / "model.safetensors",
    )
    plain = snapshot(hqconv.convert(model, tmp_path / "plain", **OPTIONS).out)
    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1 << 18)
    open_files = Executor._open

    def open_at_once(self: Executor, planned: Any) -> Any:
        unit = open_files(self, planned)
        self._stages.wait(lambda: unit.writer is not None)
        return unit

    monkeypatch.setattr(Executor, "_open", open_at_once)
    return model, plain


def test_units_get_as_many_bytes_in_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = copied_and_layers(tmp_path, monkeypatch)
    monkeypatch.setattr(executor, "_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(executor, "_PIECES_IN_FLIGHT", 100)
    fed: list[tuple[str, int]] = []
    feed_one = Executor._feed_one

    def noted(self: Executor, unit: Any, slot: Any) -> None:
        fed.append((unit.unit.name, unit.items[0].num_bytes))
        feed_one(self, unit, slot)

    monkeypatch.setattr(Executor, "_feed_one", noted)
    assert snapshot(hqconv.convert(model, tmp_path / "out", **OPTIONS).out) == plain
    (copied,) = {name for name, _ in fed if "layers" not in name}
    last = max(place for place, (name, _) in enumerate(fed) if name == copied)
    of_unit: dict[str, int] = defaultdict(int)
    for name, num_bytes in fed[: last + 1]:
        of_unit[name] += num_bytes
    of_layers = sum(of_unit.values()) - of_unit[copied]
    largest = max(num_bytes for _, num_bytes in fed)
    assert of_unit[copied] > 4 * largest
    # Two units at a time: beside the shard, batches of as many bytes, but for the begin and the end of a unit, and
    # for a piece, which is as large as a batch.
    assert of_unit[copied] - 2 * largest <= of_layers < of_unit[copied] + 3 * largest


def test_a_copied_file_takes_few_slots_while_layers_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces are written one after the other: layers go on while two of them wait."""
    model, plain = copied_and_layers(tmp_path, monkeypatch)
    may_write, fed = threading.Event(), list[str]()
    feed_one, write = Executor._feed_one, Executor._write

    def noted(self: Executor, unit: Any, slot: Any) -> None:
        fed.append("layers" if ".layers." in unit.unit.name else "copied")
        if fed.count("layers") == 8:
            may_write.set()
        feed_one(self, unit, slot)

    def slow(self: Executor, in_flight: Any, runs: Any) -> None:
        if ".layers." not in in_flight.unit.unit.name:
            assert may_write.wait(60)
        write(self, in_flight, runs)

    monkeypatch.setattr(Executor, "_feed_one", noted)
    monkeypatch.setattr(Executor, "_write", slow)
    assert snapshot(hqconv.convert(model, tmp_path / "out", **OPTIONS).out) == plain
    before = fed[: [place for place, kind in enumerate(fed) if kind == "layers"][7]]
    assert before.count("copied") == 2
    assert fed.count("copied") > 4
