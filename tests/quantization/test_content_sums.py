"""Content sums: what they are by their definition, in numbers without an end, and the same by every way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.quantization.content_sums import (
    compiled_row_sums,
    expert_sums,
    row_sums,
    sum_names,
    sum_of_bytes,
    sums_of_parts,
)
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.sum_factors import ROW_WORDS, ContentSums, factors, of_copied, of_expert
from hqconv.schemas.weight_schema import resolve_schema

DTYPES = {
    torch.uint8: (0, 255),
    torch.int16: (-(1 << 15), (1 << 15) - 1),
    torch.int32: (-(1 << 31), (1 << 31) - 1),
}


def test_factors_are_odd_differ_and_do_not_depend_on_how_many_are_asked_for() -> None:
    seen: set[int] = set()
    for axis in ("expert", "row", "column"):
        found = factors(axis, 4096)
        assert ((found > 0) & (found % 2 == 1)).all()
        assert np.array_equal(factors(axis, 17), found[:17])
        seen |= set(found.tolist())
    assert len(seen) > 3 * 4096 - 40  # of 2**30 numbers hardly any is drawn twice


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(DTYPES)), st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 1 << 30))
def test_rows_are_summed_alike(dtype: torch.dtype, shape: tuple[int, int, int], seed: int) -> None:
    low, high = DTYPES[dtype]
    stack = torch.from_numpy(
        np.random.default_rng(seed).integers(low, high, shape, np.int64, endpoint=True)
    ).to(dtype)
    columns = [int(factor) for factor in factors("column", shape[2])]
    expected = [
        [sum(a * b for a, b in zip(row, columns, strict=True)) for row in of]
        for of in stack.tolist()
    ]
    wrapped = [[(total + (1 << 63)) % (1 << 64) - (1 << 63) for total in of] for of in expected]
    assert row_sums(stack).tolist() == compiled_row_sums(stack).tolist() == wrapped


def test_one_value_in_another_place_shows() -> None:
    schema = resolve_schema("int4-g64-zp")
    [done] = quantize_stacks([torch.randn(3, 64, 256).bfloat16()], schema, "bfloat16")
    good = expert_sums({"w2": done.tensors}, schema)
    assert sum_names({"w2": done.tensors}) == [("w2", name) for name in done.tensors]
    for index, (name, tensor) in enumerate(done.tensors.items()):
        flat = tensor.clone()
        bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).view(3, -1)
        differs = (bits[1] != bits[1, 0]).nonzero()[0, 0]
        bits[1, 0], bits[1, differs] = bits[1, differs].clone(), bits[1, 0].clone()
        changed = (expert_sums({"w2": {**done.tensors, name: flat}}, schema) != good).tolist()
        assert changed == [[False, number == index, False] for number in range(len(good))]


def test_experts_come_in_any_order_but_are_not_interchangeable() -> None:
    def words(order: list[int], totals: list[int]) -> object:
        sums = ContentSums()
        for expert in order:
            sums.add("w1", "weight", expert, totals[expert])
        return sums.to_dict()

    totals = [5, -(1 << 63), (1 << 63) - 1, 7]
    assert words([0, 1, 2, 3], totals) == words([3, 1, 0, 2], totals)
    assert words([0, 1, 2, 3], totals) != words([0, 1, 2, 3], [7, *totals[1:3], 5])
    assert of_expert(300, 1) == int(factors("expert", 301)[300])


# --- copied tensors ------------------------------------------------------------------------------------------


def plain_sum(data: bytes) -> int:
    """By the definition, in numbers without an end."""
    data += bytes(-len(data) % 4)
    total = 0
    for start in range(0, len(data), 4):
        row, column = divmod(start // 4, ROW_WORDS)
        word = int.from_bytes(data[start : start + 4], "little", signed=True)
        total += (
            word * int(factors("row", row + 1)[row]) * int(factors("column", ROW_WORDS)[column])
        )
    return total % (1 << 64)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9000), st.lists(st.integers(0, 9000), max_size=4), st.integers(0, 1 << 30))
def test_parts_of_a_copied_tensor_add_up_however_it_is_cut(
    size: int, cuts: list[int], seed: int
) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    total = sum(sum_of_bytes(data[a:b], a) for a, b in pairwise(edges))
    assert total % (1 << 64) == sum_of_bytes(data, 0) % (1 << 64) == plain_sum(data.tobytes())


def test_several_rows_of_words() -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 * ROW_WORDS * 2 + 22, np.uint8)
    assert sum_of_bytes(data, 0) % (1 << 64) == plain_sum(data.tobytes())
    cut = 4 * ROW_WORDS + 5
    parts = sum_of_bytes(data[:cut], 0) + sum_of_bytes(data[cut:], cut)
    assert parts % (1 << 64) == plain_sum(data.tobytes())


SIZES = st.one_of(
    st.integers(0, 40), st.sampled_from([8191, 8192, 8193, 4 * ROW_WORDS, 4 * ROW_WORDS + 7])
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SIZES, max_size=30), st.integers(0, 100), st.integers(0, 100), st.integers(0, 1 << 30)
)
def test_many_tensors_are_summed_as_each_by_itself(
    sizes: list[int], first: int, last: int, seed: int
) -> None:
    """Tensors one by one at any byte, the first begun before and the last cut, as in a piece of a shard."""
    tensors = [
        np.random.default_rng(seed + n).integers(0, 256, size, np.uint8)
        for n, size in enumerate(sizes)
    ]
    ranges = [(0, size) for size in sizes]
    if sizes:
        ranges[0] = (min(first, sizes[0]), sizes[0])
        ranges[-1] = (ranges[-1][0], max(ranges[-1][0], sizes[-1] - last))
    parts = [one[begin:end] for one, (begin, end) in zip(tensors, ranges, strict=True)]
    data = np.concatenate([*parts, np.full(9, 255, np.uint8)])  # what follows is no tensor's
    found = sums_of_parts(data, [(begin, end - begin) for begin, end in ranges])
    alone = [sum_of_bytes(part, begin) for part, (begin, _) in zip(parts, ranges, strict=True)]
    assert [one % (1 << 64) for one in found] == [one % (1 << 64) for one in alone]
    whole = [n for n, (begin, end) in enumerate(ranges) if (begin, end) == (0, sizes[n])]
    assert all(found[n] % (1 << 64) == plain_sum(tensors[n].tobytes()) for n in whole)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, (1 << 20) - 1),
    st.integers(0, (1 << 20) - 1),
    st.sampled_from(["flip", "swap", "both signs"]),
)
def test_a_change_of_a_copied_tensor_shows(one: int, other: int, change: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 17, np.uint8)
    changed = data.copy()
    if change == "flip":
        changed[one // 8] ^= 1 << one % 8
    elif change == "swap":
        changed[one // 8], changed[other // 8] = data[other // 8], data[one // 8]
    else:  # the highest bit of two words
        for position in {one // 32, other // 32}:
            changed[4 * position + 3] ^= 128
    is_same = np.array_equal(data, changed)
    assert (sum_of_bytes(data, 0) == sum_of_bytes(changed, 0)) == is_same
    assert sum_of_bytes(np.roll(data, 2), 0) != sum_of_bytes(data, 0)


def test_the_dtype_and_the_shape_count() -> None:
    found = {
        of_copied(5, dtype, shape) for dtype in ("BF16", "F16") for shape in ((2, 3), (3, 2), (6,))
    }
    assert len(found) == 6
    assert all(len(one) == 16 for one in found)
