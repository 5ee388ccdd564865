"""Expert parallelism over hundreds of ranks: the placement is worked out once, not once an expert."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hqconv.schemas import grid as module
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, open_plan, run
from tests.make.qwen import write_qwen3_moe

NUM_EXPERTS, NUM_RANKS = 384, 320


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(
        tmp_path_factory.mktemp("wide") / "model",
        num_layers=1,
        num_experts=NUM_EXPERTS,
        hidden_size=64,
        intermediate_size=64,
    )


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_places_of_384_experts_on_320_ranks(model: Path, placement: str) -> None:
    """Every expert is placed in well under a millisecond; it was a second for each."""
    module._homes.cache_clear()
    source, plan = open_plan(model, "int4-c", Grid(1, NUM_RANKS, placement, 256))
    with source:
        layer = plan.layers[0]
        started = time.process_time()
        runs = [layer.neighbours([expert]) for expert in range(NUM_EXPERTS)]
        places = [layer.rank_tensors(0, ep_rank) for of_expert in runs for ep_rank in of_expert]
        seconds = time.process_time() - started
    assert seconds < 60  # it was a second for each expert
    assert {ref.file for of_rank in places for ref in of_rank.values()} == set(range(NUM_RANKS))
    copies = [
        indices for of_expert in runs for of_rank in of_expert.values() for indices, _ in of_rank
    ]
    assert len(copies) == NUM_EXPERTS + 256


def test_a_conversion_for_320_ranks_and_its_proof(model: Path, tmp_path: Path) -> None:
    module._homes.cache_clear()
    report = run(model, tmp_path / "out", "int4-c", Grid(1, NUM_RANKS))
    assert report.num_ranks == NUM_RANKS
    assert len(list((tmp_path / "out/experts").rglob("*.safetensors"))) == NUM_RANKS
    assert_verified(tmp_path / "out", model)
    info = module._homes.cache_info()
    assert info.hits + info.misses > NUM_EXPERTS  # the readers ask for every expert
    assert info.misses == 1
