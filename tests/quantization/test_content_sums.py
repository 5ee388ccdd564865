"""Content sums: what they are by their definition, in numbers without an end, and the same by every way."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.quantization.content_sums import compiled_row_sums, expert_sums, row_sums, sum_names
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.sum_factors import ContentSums, factors, of_expert
from hqconv.schemas.weight_schema import resolve_schema

DTYPES = {torch.uint8: (0, 255), torch.int16: (-(1 << 15), (1 << 15) - 1), torch.int32: (-(1 << 31), (1 << 31) - 1)}


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
    stack = torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape, np.int64, endpoint=True)).to(dtype)
    columns = [int(factor) for factor in factors("column", shape[2])]
    expected = [[sum(a * b for a, b in zip(row, columns, strict=True)) for row in of] for of in stack.tolist()]
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
