"""The CPU against what Humming's CUDA ops gave on a real GPU (`scripts/record.py golden`), to the bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.make.golden import SHAPES, case_name, digest, outputs
from tests.make.matrices import SCHEMAS, SECOND_SCALES
from tests.make.places import GOLDEN


@functools.cache
def recorded() -> dict[str, Any]:
    return dict(json.loads((GOLDEN / "golden.json").read_bytes())["cases"])


def compare(schema: str, param_dtype: str, shape: tuple[int, int]) -> list[str]:
    golden = recorded()[case_name(schema, param_dtype, shape)]
    tensors, sums = outputs(schema, param_dtype, shape, "cpu")
    assert tensors.keys() == golden["sha256"].keys()
    complaints = [
        f"{key} {tuple(value.shape)}: another digest"
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
