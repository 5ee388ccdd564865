"""The CPU against what Humming's CUDA ops gave on a real GPU (`scripts/record.py golden`), to the bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.make.golden import SHAPES, case_name, digest, outputs
from tests.make.matrices import SCHEMAS, SECOND_SCALES
from tests.make.places import GOLDEN


@functools.cache
def recorded() -> dict[str, Any]:
    return dict(json.loads((GOLDEN / "golden.json").read_bytes())["cases"])


def first_difference(schema: str, key: str, ours: torch.Tensor) -> str:
    """Where a tensor of the small bfloat16 case first differs from the recorded bytes."""
    with np.load(GOLDEN / f"{schema}.npz") as arrays:
        theirs = arrays[key]
    mine = ours.contiguous().flatten().view(torch.uint8).numpy()
    if mine.shape != theirs.shape:
        return f"{mine.size} bytes, recorded {theirs.size}"
    size = ours.element_size()
    wrong = np.flatnonzero((mine != theirs).reshape(-1, size).any(axis=1))
    if not wrong.size:
        return "same bytes, so dtype or shape differ"
    at = tuple(int(i) for i in np.unravel_index(wrong[0], tuple(ours.shape)))
    span = slice(wrong[0] * size, (wrong[0] + 1) * size)
    return f"{wrong.size} of {ours.numel()} elements, first at {at}: {mine[span]}, recorded {theirs[span]}"


def compare(schema: str, param_dtype: str, shape: tuple[int, int]) -> list[str]:
    golden = recorded()[case_name(schema, param_dtype, shape)]
    tensors, sums = outputs(schema, param_dtype, shape, "cpu")
    assert tensors.keys() == golden["sha256"].keys()
    has_bytes = (param_dtype, shape) == ("bfloat16", SHAPES[0])
    complaints = [
        f"{key} {tuple(value.shape)}: "
        + (first_difference(schema, key, value) if has_bytes else "another digest")
        for key, value in tensors.items()
        if digest(value) != golden["sha256"][key]
    ]
    # nan and inf are recorded as such: a scale may overflow in float16.
    return complaints + (
        [] if sums == golden["sums"] else [f"sums {sums}, recorded {golden['sums']}"]
    )


def test_every_case_is_recorded_and_none_besides() -> None:
    assert set(recorded()) == cases_of((*SCHEMAS, *SECOND_SCALES))


def cases_of(schemas: Sequence[str]) -> set[str]:
    return {
        case_name(s, p, shape) for s in schemas for p in ("bfloat16", "float16") for shape in SHAPES
    }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("schema", [*SCHEMAS, *SECOND_SCALES])
def test_the_cpu_repeats_the_gpu(schema: str, param_dtype: str, shape: tuple[int, int]) -> None:
    assert compare(schema, param_dtype, shape) == []


def test_a_difference_is_found_and_named() -> None:
    """The comparison itself: one changed byte of a kernel tensor is reported with its place."""
    tensors, _ = outputs("mxfp4", "bfloat16", SHAPES[0], "cpu")
    damaged = tensors["kernel.weight"].clone()
    damaged[0, 1, 2] ^= 1 << 9
    assert digest(damaged) != recorded()["mxfp4/bfloat16/128x128"]["sha256"]["kernel.weight"]
    report = first_difference("mxfp4", "kernel.weight", damaged)
    assert report.startswith(f"1 of {damaged.numel()} elements, first at (0, 1, 2)")
    assert first_difference("mxfp4", "kernel.weight", tensors["kernel.weight"]).startswith(
        "same bytes"
    )
