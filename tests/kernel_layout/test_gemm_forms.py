"""What a plan says of the layouts without Humming, held to Humming's own transform for every schema there can be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hqconv.errors import RequestError
from hqconv.kernel_layout import gemm_forms, transform
from hqconv.kernel_layout.compatibility import why_incompatible, why_not
from hqconv.kernel_layout.layer_config import needs_cuda
from hqconv.schemas.artifact_names import CHECKPOINT, KERNEL
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.grid import slice_unit
from hqconv.schemas.input_schema import A_DTYPES, INPUT_PRESETS, INPUT_SCALE_DTYPES, QUANT_MODES, InputSchema
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, WeightSchema
from tests.make.conversions import kernel_spec_of, run, schema_of
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


def all_schemas() -> Iterator[WeightSchema]:
    """Every combination of fields that `WeightSchema` takes, with group sizes below, at and above the padding."""
    zeros = ((False, False), (True, False), (True, True))
    second = ("none", "tensor", "channel")
    for code, scale, (kind, *sizes), scale_2, zero in itertools.product(
        CODES, (None, *SCALE_DTYPES), SCALES, second, zeros
    ):
        try:
            yield WeightSchema("any", code, scale, kind, *sizes, scale_2, *zero)
        except RequestError:
            continue


@pytest.fixture(scope="module")
def schemas() -> list[WeightSchema]:
    found = list(all_schemas())
    fields = [schema.humming_fields() for schema in found]
    presets = (*PRESETS.values(), *map(schema_of, ("int4-g128-zp", "int3-c-fpzp", "int8-g32")))
    assert all(schema.humming_fields() in fields for schema in presets)
    return found


def all_inputs() -> Iterator[InputSchema]:
    """The presets, and every combination of fields that `InputSchema` takes."""
    yield from INPUT_PRESETS.values()
    fields = itertools.product(A_DTYPES, (0, 16, 32, 64, 128), (None, *INPUT_SCALE_DTYPES), (None, *QUANT_MODES))
    for words in fields:
        try:
            yield InputSchema("any", *words)
        except RequestError:
            continue


def is_well_typed(schema: WeightSchema, param_dtype: str) -> bool:
    """What `check_request` asks of scales."""
    return schema.bs_dtype not in PARAM_DTYPES or schema.bs_dtype == param_dtype


COMPILERS = ((11, 0), (12, 0), (13, 0), (13, 2))  # on both sides of every bound


def kinds(schemas: list[WeightSchema], count: int, seed: int) -> list[KernelSpec]:
    """Kinds at random, of all there can be: weights, parameters, activations, GPUs, compilers."""
    dice, inputs = random.Random(seed), list(all_inputs())
    found = [
        KernelSpec(
            dice.choice(schemas),
            dice.choice(PARAM_DTYPES),
            GpuTarget(dice.choice(TARGETS), dice.choice(COMPILERS)),
            dice.choice(inputs),
        )
        for _ in range(count)
    ]
    return [kind for kind in found if is_well_typed(kind.schema, kind.param_dtype)]


def presets() -> Iterator[KernelSpec]:
    """Every pair that people name, on every target."""
    names = (*PRESETS, "int4-c", "int4-g64-zp", "int4-g128-fpzp", "int2-g64", "int3", "int6", "int8-g128", "int8-zp")
    for name, inputs, sm, param in itertools.product(names, INPUT_PRESETS.values(), TARGETS, PARAM_DTYPES):
        yield KernelSpec(schema_of(name), param, GpuTarget(sm, (13, 0)), inputs)


def test_humming_runs_every_schema_with_16_bit_activations(schemas: list[WeightSchema]) -> None:
    for schema, param_dtype, target in itertools.product(schemas, PARAM_DTYPES, TARGETS):
        kind = KernelSpec(schema, param_dtype, GpuTarget(target, (13, 0)))
        expected = is_well_typed(schema, param_dtype) and (target > 75 or param_dtype == "float16")
        assert transform.is_compatible(kind) == expected, (schema, kind)
        if expected:
            assert why_not(kind) is None, kind


def test_the_rule_is_hummings(schemas: list[WeightSchema]) -> None:
    """Which pairs run on which GPU; and what else we refuse, Humming's own configuration or kernels refuse."""
    num_compatible = 0
    for kind in (*presets(), *kinds(schemas, 20_000, seed=1)):
        assert (why_incompatible(kind) is None) == transform.is_compatible(kind), (kind, kind.inputs, kind.schema)
        num_compatible += why_incompatible(kind) is None
    assert num_compatible > 2000


def test_forms_are_hummings_for_every_pair_and_gpu(schemas: list[WeightSchema]) -> None:
    """Of every kind that runs: names, order, shapes, dtypes, config and flags of its tensors."""
    chosen = [kind for kind in (*presets(), *kinds(schemas, 20_000, seed=2)) if why_not(kind) is None]
    flags = set()
    for number, kind in enumerate(chosen):
        unit = slice_unit(kind.schema)
        words = (3 * unit, 5 * unit, kind, number % 3 == 0)
        planned, real = gemm_forms.planned_kernel_form(*words), transform.kernel_form(*words)
        assert planned == real, (kind, kind.inputs, kind.schema)
        assert list(planned.tensors) == list(real.tensors), kind
        assert planned.config_json(7) == real.config_json(7), kind
        flags |= {name for name, is_set in planned.flags.items() if is_set}
    assert flags == set(gemm_forms.LAYOUT_FLAGS), "a layout that nothing here met"


def test_the_compiler_is_asked_for_where_it_decides(schemas: list[WeightSchema]) -> None:
    for kind in kinds(schemas, 5_000, seed=3):
        if why_not(kind) is not None:
            continue
        found = {
            transform.kernel_form(256, 512, replace(kind, target=replace(kind.target, cuda=cuda))).flags[
                "use_native_dequant"
            ]
            for cuda in COMPILERS
        }
        assert needs_cuda(kind) == (len(found) == 2), kind


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rows", "columns", "has_bias"), [(1, 1, True), (3, 5, False), (24, 40, True)])
def test_forms_are_hummings(schemas: list[WeightSchema], rows: int, columns: int, has_bias: bool) -> None:
    """Of one scale group, of some that need padding, of many; 16-bit activations on sm90, every schema."""
    chosen = schemas if rows < 24 else [*PRESETS.values(), *schemas[::29]]
    for schema, param_dtype in itertools.product(chosen, PARAM_DTYPES):
        if not is_well_typed(schema, param_dtype):
            continue
        shape = (rows * slice_unit(schema), columns * slice_unit(schema))
        words = (*shape, kernel_spec_of(schema, param_dtype), has_bias)
        planned, real = gemm_forms.planned_kernel_form(*words), transform.kernel_form(*words)
        assert planned == real, words
        assert list(planned.tensors) == list(real.tensors), words
        assert planned.config_json(7) == real.config_json(7), words
        assert list(planned.flags) == list(real.flags)
        assert transform.is_as_planned(planned, *words)
        packed = (*shape, schema, param_dtype, has_bias)
        found = gemm_forms.planned_packed_form(*packed)
        assert list(found.items()) == list(transform.packed_form(*packed).items()), packed


def test_another_humming_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=1)
    other = transform.packed_form(384, 128, PRESETS["int4"], "bfloat16")
    for name, answer, kind, what in (
        ("is_compatible", False, KERNEL, "no kernel"),
        ("is_as_planned", False, KERNEL, "in another way"),
        ("packed_form", other, CHECKPOINT, "in another way"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"hqconv.conversion.convert.{name}", lambda *_, answer=answer: answer)
            with pytest.raises(RequestError, match=what) as caught:
                run(model, tmp_path / "out", "int4", layout=kind)
        assert "humming-kernels" in str(caught.value.found)
        assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_not_as_planned_is_not_written() -> None:
    schema = PRESETS["int4"]
    form = transform.kernel_form(256, 256, kernel_spec_of(schema, "bfloat16", 90))
    packed = transform.packed_form(256, 256, schema, "bfloat16")
    tensors = {
        "weight": torch.zeros(2, *packed["weight"].shape, dtype=torch.int32),
        "weight_scale": torch.zeros(2, *packed["weight_scale"].shape, dtype=torch.bfloat16),
    }
    assert transform.to_kernel(form, tensors)["weight"].shape == (2, *form.tensors["weight"].shape)
    wrong = {**form.tensors, "weight_scale": replace(form.tensors["weight_scale"], dtype="F16")}
    with pytest.raises(AssertionError, match="planned"):
        transform.to_kernel(replace(form, tensors=wrong), tensors)
