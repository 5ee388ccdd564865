"""Placement against vLLM's own formulas written down once more, and TP sizes by brute force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.errors import RequestError
from hqconv.schemas.grid import (
    LINEAR,
    ROUND_ROBIN,
    Grid,
    check_grid,
    slice_unit,
    tp_share,
    tp_slices,
    working_tp_sizes,
)
from hqconv.schemas.weight_schema import resolve_schema

PLACEMENTS = (LINEAR, ROUND_ROBIN)
SCHEMAS = (
    "mxfp4",
    "nvfp4",
    "fp8",
    "fp8-block",
    "fp8-tensor",
    "int4",
    "int4-g64-zp",
    "int7-c",
    "int2-g32-zp",
)


def vllm_owner(num_physical: int, ep: int, placement: str, physical: int) -> int:
    """The EP rank of a physical expert, one at a time: vLLM's determine_expert_map.

    linear: "first `remainder` ranks get one more expert"; round_robin: expert e lives on rank e mod ep.
    """
    if placement == ROUND_ROBIN:
        return physical % ep
    base, remainder = num_physical // ep, num_physical % ep
    for rank in range(ep):
        physical -= base + 1 if rank < remainder else base
        if physical < 0:
            return rank
    raise AssertionError(physical)


grids = st.builds(
    Grid,
    tp=st.integers(1, 4),
    ep=st.integers(1, 12),
    placement=st.sampled_from(PLACEMENTS),
    redundant=st.integers(0, 30),
)


@given(num_experts=st.integers(1, 40), grid=grids)
def test_placement_is_vllms(num_experts: int, grid: Grid) -> None:
    total = num_experts + grid.redundant
    expected: list[list[int]] = [[] for _ in range(grid.ep)]
    for physical in range(total):
        source = physical if physical < num_experts else (physical - num_experts) % num_experts
        expected[vllm_owner(total, grid.ep, grid.placement, physical)].append(source)
    assert [list(grid.local_experts(num_experts, rank)) for rank in range(grid.ep)] == expected


@given(num_experts=st.integers(1, 40), grid=grids)
def test_homes_is_the_exact_inverse_of_local_experts(num_experts: int, grid: Grid) -> None:
    homes = grid.homes(num_experts)
    assert len(homes) == num_experts
    forwards = {
        (rank, local, expert)
        for rank in range(grid.ep)
        for local, expert in enumerate(grid.local_experts(num_experts, rank))
    }
    backwards = [
        (rank, local, expert) for expert, places in enumerate(homes) for rank, local in places
    ]
    assert len(backwards) == len(set(backwards)) == num_experts + grid.redundant
    assert set(backwards) == forwards


@given(name=st.sampled_from(SCHEMAS), tp=st.integers(1, 16), runs=st.integers(1, 60))
def test_tp_ranges_tile_the_dimension(name: str, tp: int, runs: int) -> None:
    """Every rank's part is a whole number of runs and at most its share; the shares of the first ranks are full."""
    schema = resolve_schema(name)
    size = runs * slice_unit(schema)
    ranges = [part[1:3] for part in tp_slices(size, Grid(tp), schema)]
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(size))
    share = tp_share(size, tp, schema)
    lengths = [end - begin for begin, end in ranges]
    assert all(length % slice_unit(schema) == 0 and length <= share for length in lengths)
    assert lengths == sorted(lengths, reverse=True)
    assert share * tp < size + slice_unit(schema) * tp
    if runs % tp == 0:
        assert lengths == [size // tp] * tp


@given(runs=st.integers(1, 200))
def test_padded_tp_sizes_leave_no_rank_empty(runs: int) -> None:
    schema = resolve_schema("mxfp4")
    size = runs * 32
    sizes = working_tp_sizes(size, schema, pads_last_rank=True)
    for tp in range(1, runs + 2):
        _, begin, end, _ = tp_slices(size, Grid(tp), schema)[-1]
        assert (tp in sizes) == (begin < end)


@pytest.mark.parametrize("name", SCHEMAS)
@given(size=st.one_of(st.integers(1, 40).map(lambda x: x * 32), st.integers(1, 2000)))
def test_working_tp_sizes_by_brute_force(name: str, size: int) -> None:
    """A TP size works if every cut falls between scale groups, scale blocks and runs of 32 packed codes."""
    schema = resolve_schema(name)
    periods = [32, schema.weight_scale_group_size or 1, schema.weight_scale_group_size_n or 1]
    expected = [
        tp
        for tp in range(1, size + 1)
        if size % tp == 0
        and all((rank * size // tp) % period == 0 for rank in range(tp + 1) for period in periods)
    ]
    assert working_tp_sizes(size, schema) == expected
    assert slice_unit(schema) == max(periods)  # all are powers of two


def test_impossible_grids_are_refused() -> None:
    options: dict[str, dict[str, Any]] = {"--tp": {"tp": 0}, "--ep": {"ep": -1}}
    options |= {
        "--redundant-experts": {"redundant": -1},
        "--expert-placement": {"placement": "striped"},
    }
    for option, values in options.items():
        with pytest.raises(RequestError, match=option) as caught:
            Grid(**values)
        assert caught.value.exit_code == 2


def test_refusals_say_what_would_work() -> None:
    schema = resolve_schema("int4")  # groups of 128
    check_grid("b", 8, 256, 768, schema, Grid(tp=6))
    with pytest.raises(
        RequestError,
        match=r"TP sizes that work: 1, 2, 3, 6; --tp 4 works with --tp-split groups\.$",
    ):
        check_grid("b", 8, 256, 768, schema, Grid(tp=4))
    with pytest.raises(RequestError, match="TP sizes that work: none"):
        check_grid("b", 8, 256, 704, schema, Grid())
    with pytest.raises(RequestError, match="hidden size"):
        check_grid("b", 8, 320, 768, schema, Grid())
    check_grid("b", 8, 256, 256, resolve_schema("mxfp4"), Grid(ep=10, redundant=2))
    with pytest.raises(RequestError, match="expected: --ep <= 10"):
        check_grid("b", 8, 256, 256, resolve_schema("mxfp4"), Grid(ep=11, redundant=2))
