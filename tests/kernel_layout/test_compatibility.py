"""Pairs that run, and what is known of their layouts without Humming, held to Humming for every schema."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hqconv.errors import RequestError
from hqconv.kernel_layout import transform
from hqconv.kernel_layout.compatibility import config_entries
from hqconv.kernel_layout.transform import why_not
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.grid import slice_unit
from hqconv.schemas.input_schema import (
    A_DTYPES,
    INPUT_PRESETS,
    INPUT_SCALE_DTYPES,
    QUANT_MODES,
    InputSchema,
    KernelSpec,
)
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, WeightSchema
from tests.make.conversions import kernel_spec_of, run, schema_of
from tests.make.places import REPO
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
SCALE_DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float8e8m0",
    "float8e4m3",
    "float8e5m2",
    "float8e5m3",
)


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
    fields = itertools.product(
        A_DTYPES, (0, 16, 32, 64, 128), (None, *INPUT_SCALE_DTYPES), (None, *QUANT_MODES)
    )
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
    names = (
        *PRESETS,
        "int4-c",
        "int4-g64-zp",
        "int4-g128-fpzp",
        "int2-g64",
        "int3",
        "int6",
        "int8-g128",
        "int8-zp",
    )
    for name, inputs, sm, param in itertools.product(
        names, INPUT_PRESETS.values(), TARGETS, PARAM_DTYPES
    ):
        yield KernelSpec(schema_of(name), param, GpuTarget(sm, (13, 0)), inputs)


def test_what_is_known_without_humming_is_hummings(schemas: list[WeightSchema]) -> None:
    """Of every kind that runs: entries of the layer config, flags that rules ask for, and the size of its tensors."""
    chosen = [
        kind for kind in (*presets(), *kinds(schemas, 20_000, seed=2)) if why_not(kind) is None
    ]
    flags = set()
    for number, kind in enumerate(chosen):
        unit, has_bias = slice_unit(kind.schema), number % 3 == 0
        form = transform.kernel_form(3 * unit, 5 * unit, kind, has_bias)
        entries = config_entries(kind, form.flags)
        assert {key: form.config[key] for key in entries} == entries, (
            kind,
            kind.inputs,
            kind.schema,
        )
        assert not form.config["use_int_weight_scale"], "a layout that cannot be read back"
        flags |= {name for name, is_set in form.flags.items() if is_set}
    assert flags == set(transform.LAYOUT_FLAGS), "a layout that nothing here met"


def test_the_compiler_is_asked_for_where_it_decides(schemas: list[WeightSchema]) -> None:
    for kind in kinds(schemas, 5_000, seed=3):
        if why_not(kind) is not None:
            continue
        found = {
            transform.kernel_form(
                256, 512, replace(kind, target=replace(kind.target, cuda=cuda))
            ).flags["use_native_dequant"]
            for cuda in COMPILERS
        }
        assert transform.needs_cuda(kind) == (len(found) == 2), kind


def test_a_form_needs_no_compiled_loop_and_no_compiler_of_torchs() -> None:
    """`--dry-run` and `hqconv.plan` need a form of each shape before anything else: milliseconds."""
    code = (
        "import sys, torch, time\n"
        "from hqconv.humming_ops.runtime import humming\n"
        "from hqconv.kernel_layout.transform import kernel_form\n"
        "from tests.make.conversions import kernel_spec_of\n"
        "humming()\n"
        "before = time.process_time()\n"
        "for name in ('mxfp4', 'int4', 'fp8-block', 'nvfp4'):\n"
        "    kernel_form(4096, 2048, kernel_spec_of(name))\n"
        "print(time.process_time() - before, 'torch._dynamo' in sys.modules, 'sympy' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True
    )
    seconds, *loaded = done.stdout.split()
    assert loaded == ["False", "False"]
    assert float(seconds) < 1


def test_a_humming_without_kernels_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=1)
    monkeypatch.setattr("hqconv.conversion.convert.is_compatible", lambda _: False)
    with pytest.raises(RequestError, match="no kernel") as caught:
        run(model, tmp_path / "out", "int4")
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
