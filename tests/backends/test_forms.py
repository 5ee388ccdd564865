"""What a plan says of the layouts without Humming, held to Humming's own transform for every schema there can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hqconv.backends import forms, layout
from hqconv.errors import RequestError
from hqconv.schemas.artifact import CHECKPOINT, KERNEL
from hqconv.schemas.grid import slice_unit
from hqconv.schemas.target import PARAM_DTYPES, PRESETS, SUPPORTED_TARGETS, TargetSchema
from tests.make.conversions import run, schema_of
from tests.make.qwen import write_qwen3_moe

SCALES = (
    *(("group", size, 0) for size in (16, 32, 128, 512)),
    *(("block", size, size_n) for size, size_n in ((128, 128), (16, 64), (512, 256))),
    *(("channel", 0, 0), ("tensor", 0, 0)),
)
CODES = (
    *(f"uint{bits}" for bits in range(1, 9)),
    *(f"float{1 + e + m}e{e}m{m}" for e in range(6) for m in range(1, 8 - e)),
)
SCALE_DTYPES = ("bfloat16", "float16", "float32", "float8e8m0", "float8e4m3", "float8e5m2", "float8e5m3")


def all_schemas() -> Iterator[TargetSchema]:
    """Every combination of fields that `TargetSchema` takes, with group sizes below, at and above the padding."""
    zeros = ((False, False), (True, False), (True, True))
    second = ("none", "tensor", "channel")
    for code, scale, (kind, *sizes), scale_2, zero in itertools.product(
        CODES, (None, *SCALE_DTYPES), SCALES, second, zeros
    ):
        try:
            yield TargetSchema("any", code, scale, kind, *sizes, scale_2, *zero)
        except RequestError:
            continue


@pytest.fixture(scope="module")
def schemas() -> list[TargetSchema]:
    found = list(all_schemas())
    fields = [schema.humming_fields() for schema in found]
    presets = (*PRESETS.values(), *map(schema_of, ("int4-g128-zp", "int3-c-fpzp", "int8-g32")))
    assert all(schema.humming_fields() in fields for schema in presets)
    return found


def is_well_typed(schema: TargetSchema, param_dtype: str) -> bool:
    """What `check_request` asks of scales."""
    return schema.bs_dtype not in PARAM_DTYPES or schema.bs_dtype == param_dtype


def test_humming_runs_every_schema_that_a_plan_takes(schemas: list[TargetSchema]) -> None:
    for schema, param_dtype, target in itertools.product(schemas, PARAM_DTYPES, SUPPORTED_TARGETS):
        expected = is_well_typed(schema, param_dtype)
        assert layout.is_compatible(schema, param_dtype, target) == expected, (schema, param_dtype)


@pytest.mark.parametrize(("rows", "columns", "has_bias"), [(1, 1, True), (3, 5, False), (24, 40, True)])
def test_forms_are_hummings(schemas: list[TargetSchema], rows: int, columns: int, has_bias: bool) -> None:
    """Of one scale group, of some that need padding, of many; names, order, shapes, dtypes, config and flags."""
    chosen = schemas if rows < 24 else [*PRESETS.values(), *schemas[::29]]
    for schema, param_dtype, target in itertools.product(chosen, PARAM_DTYPES, SUPPORTED_TARGETS):
        if not is_well_typed(schema, param_dtype):
            continue
        shape = (rows * slice_unit(schema), columns * slice_unit(schema))
        words = (*shape, schema, param_dtype, target, has_bias)
        planned, real = forms.planned_kernel_form(*words), layout.kernel_form(*words)
        assert planned == real, words
        assert list(planned.tensors) == list(real.tensors), words
        assert planned.config_json(7) == real.config_json(7), words
        assert list(planned.flags) == list(real.flags)
        assert layout.is_as_planned(planned, *words)
        packed = (*shape, schema, param_dtype, has_bias)
        found = forms.planned_packed_form(*packed)
        assert list(found.items()) == list(layout.packed_form(*packed).items()), packed


def test_another_humming_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=1)
    other = layout.packed_form(384, 128, PRESETS["int4"], "bfloat16")
    for name, answer, kind, what in (
        ("is_compatible", False, KERNEL, "no kernel"),
        ("is_as_planned", False, KERNEL, "in another way"),
        ("packed_form", other, CHECKPOINT, "in another way"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"hqconv.pipeline.forms.{name}", lambda *_, answer=answer: answer)
            with pytest.raises(RequestError, match=what) as caught:
                run(model, tmp_path / "out", "int4", layout=kind)
        assert "humming-kernels" in str(caught.value.found)
        assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_not_as_planned_is_not_written() -> None:
    schema = PRESETS["int4"]
    form = layout.kernel_form(256, 256, schema, "bfloat16", 90)
    packed = layout.packed_form(256, 256, schema, "bfloat16")
    tensors = {
        "weight": torch.zeros(2, *packed["weight"].shape, dtype=torch.int32),
        "weight_scale": torch.zeros(2, *packed["weight_scale"].shape, dtype=torch.bfloat16),
    }
    assert layout.to_kernel(form, tensors)["weight"].shape == (2, *form.tensors["weight"].shape)
    wrong = {**form.tensors, "weight_scale": replace(form.tensors["weight_scale"], dtype="F16")}
    with pytest.raises(AssertionError, match="planned"):
        layout.to_kernel(replace(form, tensors=wrong), tensors)
