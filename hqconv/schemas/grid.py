"""Rows, columns and experts of each rank. Integer arithmetic only.

TP slices w1 and w3 along N and w2 along K, both of which are the expert's intermediate size I. EP deals whole
experts. Every (tp, ep) pair is one rank. Placement formulas: vLLM's `expert_map_manager.determine_expert_map`;
redundant copies: `eplb_state.build_initial_global_physical_to_logical_map`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, NoReturn, get_args

from hqconv.errors import RequestError
from hqconv.schemas.weight_schema import LayerSchema

Placement = Literal["linear", "round_robin"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
LINEAR, ROUND_ROBIN = PLACEMENTS
TpSplit = Literal["even", "groups"]
TP_SPLITS: tuple[TpSplit, ...] = get_args(TpSplit)
# equal parts of the intermediate size; whole scale groups, of which the last ranks hold fewer
EVEN, GROUPS = TP_SPLITS
PACK_UNIT = 32  # codes along a packed dimension come in whole runs of 32


MAX_COUNT = 1 << 16  # of ranks, experts or copies: a larger number is a mistake, or damage
MAX_SIZE = 1 << 24  # above every hidden size, every number of layers and of experts for a token


@dataclass(frozen=True)
class Grid:
    """A grid of tp × ep ranks. `redundant` appends copies of experts i mod E before placement.

    split: way in which TP ranks share the intermediate size, see `tp_slices`.
    """

    tp: int = 1
    ep: int = 1
    placement: str = LINEAR
    redundant: int = 0
    split: str = EVEN

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--tp", self.tp, 1),
            ("--ep", self.ep, 1),
            ("--redundant-experts", self.redundant, 0),
        ):
            is_whole = type(value) is int  # True would be written as true
            if not is_whole or not least <= value <= MAX_COUNT:
                expected = f"a whole number from {least} to {MAX_COUNT}"
                self._refuse(option, expected, repr(value))
        if self.tp * self.ep > MAX_COUNT:
            expected = f"--tp times --ep at most {MAX_COUNT}"
            self._refuse("--tp, --ep", expected, self.tp * self.ep)
        if self.placement not in PLACEMENTS:
            self._refuse("--expert-placement", " or ".join(PLACEMENTS), self.placement)
        if self.split not in TP_SPLITS:
            self._refuse("--tp-split", " or ".join(TP_SPLITS), self.split)

    def _refuse(self, option: str, expected: str, found: object) -> NoReturn:
        raise RequestError(
            "There is no such grid of ranks.", where=option, expected=expected, found=found
        )

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """Every (tp rank, ep rank), tp first."""
        return tuple((t, p) for t in range(self.tp) for p in range(self.ep))

    def local_experts(self, num_experts: int, ep_rank: int) -> tuple[int, ...]:
        """Return the source experts that one EP rank holds, in its local order; copies may repeat an expert."""
        return _dealt(self, num_experts)[ep_rank]

    def homes(self, num_experts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the (EP rank, local index) pairs of each source expert."""
        return _homes(self, num_experts)


# Computed once for a grid: there are hundreds of ranks and experts, and every expert needs the result.
@functools.lru_cache(maxsize=64)
def _dealt(grid: Grid, num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Return the source experts of every EP rank."""
    physical = [*range(num_experts), *(i % num_experts for i in range(grid.redundant))]
    if grid.placement == ROUND_ROBIN:
        return tuple(tuple(physical[ep_rank :: grid.ep]) for ep_rank in range(grid.ep))
    base, remainder = divmod(len(physical), grid.ep)
    starts = [ep_rank * base + min(ep_rank, remainder) for ep_rank in range(grid.ep + 1)]
    return tuple(tuple(physical[start:stop]) for start, stop in pairwise(starts))


@functools.lru_cache(maxsize=64)
def _homes(grid: Grid, num_experts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (EP rank, local index) pairs of every source expert."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for ep_rank, experts in enumerate(_dealt(grid, num_experts)):
        for local, expert in enumerate(experts):
            places[expert].append((ep_rank, local))
    return tuple(map(tuple, places))


def tp_share(size: int, tp: int, schema: LayerSchema) -> int:
    """Return a TP rank's size of a dimension, padding included: whole runs of `slice_unit`, as equal as possible."""
    unit = slice_unit(schema)
    return math.ceil(math.ceil(size / unit) / tp) * unit


class TpSlice(NamedTuple):
    """One TP rank's part of a dimension: [begin, end), padded to `share`."""

    rank: int
    begin: int
    end: int
    share: int


def tp_slices(size: int, grid: Grid, schema: LayerSchema) -> tuple[TpSlice, ...]:
    """Return every TP rank's part of a dimension; the last ranks' may be shorter than their share.

    With the split `groups` the first ranks hold one run of `slice_unit` more than the others, as far as runs are left.
    With `even` every rank but the last holds a whole share, as vLLM deals the rows of GPT-OSS.
    """
    tp = grid.tp
    share = tp_share(size, tp, schema)
    size = stored_size(size, schema)
    ends = [min((rank + 1) * share, size) for rank in range(tp)]
    if grid.split == GROUPS:
        unit = slice_unit(schema)
        runs, more = divmod(size // unit, tp)
        ends = [((rank + 1) * runs + min(rank + 1, more)) * unit for rank in range(tp)]
    return tuple(
        TpSlice(rank, begin, end, share) for rank, (begin, end) in enumerate(pairwise([0, *ends]))
    )


def stored_size(size: int, schema: LayerSchema) -> int:
    """Return the intermediate size in whole runs of `slice_unit`: zeros fill the last scale group of the matrices."""
    return math.ceil(size / slice_unit(schema)) * slice_unit(schema)


def slice_unit(schema: LayerSchema) -> int:
    """Return the smallest run of the intermediate size that cuts no scale group and no rotated block.

    The intermediate size is the rows of w13 and the columns of w2, the hidden size the reverse.
    """
    return _unit(schema, rows_of="w13", columns_of="w2")


def hidden_unit(schema: LayerSchema) -> int:
    """Return the smallest run of the hidden size that cuts no scale group and no rotated block."""
    return _unit(schema, rows_of="w2", columns_of="w13")


def _unit(schema: LayerSchema, rows_of: str, columns_of: str) -> int:
    tall = schema.of(rows_of)
    wide = schema.of(columns_of)
    sizes = (tall.weight_scale_group_size_n, wide.weight_scale_group_size, wide.rotation)
    return math.lcm(PACK_UNIT, *(size or 1 for size in sizes))


def working_tp_sizes(
    intermediate_size: int, schema: LayerSchema, *, pads_last_rank: bool = False, split: str = EVEN
) -> list[int]:
    """Return all TP sizes that cut no scale group and no packed word of this expert size; none has an empty rank.

    With `pads_last_rank` the last rank may hold less than the others. With the split `groups` the last group of the
    matrices may be smaller, and any number of ranks may hold a group less.
    """
    runs, rest = divmod(intermediate_size, slice_unit(schema))
    # Padded rows must be zero, which an integer code under a scale that all rows share cannot be.
    can_pad = not any(
        gemm_schema.is_integer and gemm_schema.weight_scale_type == "tensor"
        for gemm_schema in schema.each
    )
    if split == GROUPS and can_pad:
        return list(range(1, runs + bool(rest) + 1))
    if rest:
        return []
    is_padded = pads_last_rank and can_pad
    return [
        t
        for t in range(1, runs + 1)
        if runs % t == 0 or (is_padded and (t - 1) * math.ceil(runs / t) < runs)
    ]


def is_split_even(
    intermediate_size: int, schema: LayerSchema, grid: Grid, *, pads_last_rank: bool
) -> bool:
    """Return whether both TP splits deal this expert size in the same way."""
    slices = (
        tp_slices(intermediate_size, replace(grid, split=split), schema) for split in TP_SPLITS
    )
    works = grid.tp in working_tp_sizes(intermediate_size, schema, pads_last_rank=pads_last_rank)
    return works and len(set(slices)) == 1


def check_grid(
    layer: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    schema: LayerSchema,
    grid: Grid,
    *,
    pads_last_rank: bool = False,
    is_served: Callable[[int], bool] = lambda _: True,
    can_split: bool = True,
) -> None:
    """Refuse a layer that the schema or the grid cannot cut, naming the TP sizes that would work.

    For the message alone: is_served returns whether the server can start with a TP size, and can_split tells whether it
    can with these ranks of whole groups.
    """
    unit = hidden_unit(schema)
    if hidden_size % unit:
        raise RequestError(
            f"The schema '{schema.name}' does not fit the hidden size.",
            where=layer,
            expected=f"a multiple of {unit}",
            found=hidden_size,
            remedy="Choose a schema with smaller groups, or a smaller rotated block.",
        )
    sizes: dict[str, list[int]] = {
        split: working_tp_sizes(
            intermediate_size, schema, pads_last_rank=pads_last_rank, split=split
        )
        for split in TP_SPLITS
    }
    if grid.tp not in sizes[grid.split]:
        served = [str(size) for size in sizes[grid.split] if is_served(size)]
        works = ", ".join(served) or "none: choose a schema with smaller groups"
        if can_split and is_served(grid.tp) and grid.tp in sizes[GROUPS]:
            works += f"; --tp {grid.tp} works with --tp-split {GROUPS}"
        raise RequestError(
            f"--tp {grid.tp} would cut a scale group or a rotated block of the experts.",
            where=f"{layer}, intermediate size {intermediate_size}, schema {schema.name}",
            expected=f"slices that are multiples of {slice_unit(schema)}",
            found=f"{intermediate_size} / {grid.tp}",
            remedy=f"TP sizes that work: {works}.",
        )
    if grid.ep > num_experts + grid.redundant:
        raise RequestError(
            "There are more EP ranks than experts.",
            where=layer,
            expected=f"--ep <= {num_experts + grid.redundant}",
            found=grid.ep,
        )
