"""One case for every kernel layout that differs: what `scripts/record.py layouts` records on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from hqconv.kernel_layout.transform import (
    kernel_form,
    layer_config,
    needs_cuda,
    packed_form,
    to_kernel,
    why_not,
)
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.grid import slice_unit
from hqconv.schemas.input_schema import INPUT_PRESETS, KernelSpec
from hqconv.schemas.tensors import torch_dtype
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, WeightSchema, resolve_schema

NUM_EXPERTS = 3
_OF_INPUTS = (
    "sm_version",
    "as_dtype",
    "input_quant_mode",
    "input_scale_group_size",
)  # they change no byte
NAMES = (
    *PRESETS,
    *(
        f"int{bits}-{kind}"
        for bits in range(1, 9)
        for kind in ("c", "g128", "g64-zp", "g128-zp", "g64-fpzp")
    ),
    *("int4-g64", "int8-g32", "int2-g64", "int3-g32"),
)
FLOATS = tuple(
    f"float{1 + e + m}e{e}m{m}" for e in (0, 2, 3, 4) for m in range(1, 8 - e) if 1 + e + m >= 3
)


def schemas() -> Iterator[WeightSchema]:
    """Those that people name, every float type in groups and per channel, and rare scales."""
    yield from map(resolve_schema, NAMES)
    for code in (*FLOATS, "float8e5m2"):
        yield WeightSchema(f"{code}-mx", code, "float8e8m0", "group", 32)
        yield WeightSchema(f"{code}-c", code, None, "channel")
    for scale in ("float8e4m3", "float8e5m2", "float8e5m3"):
        yield WeightSchema(f"e2m1-{scale}", "float4e2m1", scale, "group", 16)
    yield WeightSchema("e2m1-e4m3-channel", "float4e2m1", "float8e4m3", "group", 16, 0, "channel")
    yield WeightSchema("e0m3-g16", "float4e0m3", "float8e8m0", "group", 16)
    # Below the schemas above, whose place decides the seeds of their cases.
    yield from map(
        resolve_schema, ("int4-g32-e4m3", "int4-g32-e4m3-row", "int8-g32-e4m3", "int4-g16-e4m3")
    )
    yield from map(
        resolve_schema, ("fp4-g32-e4m3", "fp8-g32-e4m3", "fp4-g32-e8m0-row", "fp8-g32-e8m0-row")
    )


@functools.cache
def cases() -> dict[str, KernelSpec]:
    """A kind for every layout that differs from those before it, by a name that says which."""
    found: dict[str, KernelSpec] = {}
    seen: set[tuple[object, ...]] = set()
    for schema, inputs, sm_version, param in itertools.product(
        list(schemas()), INPUT_PRESETS.values(), TARGETS, PARAM_DTYPES
    ):
        kind = KernelSpec(schema, param, GpuTarget(sm_version, (13, 0)), inputs)
        compilers = ((11, 0), (13, 2)) if needs_cuda(kind) else (None,)
        for cuda in compilers:
            one = replace(kind, target=GpuTarget(sm_version, cuda))
            if why_not(one):
                continue
            form = kernel_form(256, 512, one)
            tiles = sm_version // 10 if form.flags["use_block_scaled_mma"] else 0
            layout = {
                key: value for key, value in form.config.items() if key not in _OF_INPUTS
            } | form.flags
            is_umma = layer_config(form.config_json(1)).is_umma_supported
            key = (schema, param, inputs.a_dtype, tuple(layout.values()), tiles, is_umma)
            if key not in seen:
                seen.add(key)
                found[f"{schema.name}/{inputs.name}/{param}/{one.target}"] = one
    return found


def packed(kind: KernelSpec, seed: int) -> tuple[tuple[int, int], dict[str, torch.Tensor]]:
    """Sizes that need padding, and packed tensors [E, …] of random bits, on the CPU; scales are finite and varied."""
    generator = torch.Generator().manual_seed(seed)
    unit = slice_unit(kind.schema)
    n, k = (5 * unit, 3 * unit) if unit < 128 else (3 * unit, 5 * unit)
    tensors = {}
    for name, spec in packed_form(n, k, kind.schema, kind.param_dtype, True).items():
        shape, dtype = (NUM_EXPERTS, *spec.shape), torch_dtype(spec.dtype)
        if spec.shape == (1,):
            shape = (NUM_EXPERTS,)
        if name in ("weight", "zero_point") and dtype == torch.int32:
            tensor = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
        elif spec.dtype == "F8_E8M0":
            tensor = torch.randint(100, 140, shape, generator=generator).to(torch.uint8).view(dtype)
        elif spec.dtype == "U8":
            tensor = torch.randint(1, 250, shape, generator=generator).to(torch.uint8)
        else:
            tensor = (torch.rand(shape, generator=generator) * 2 + 0.01).to(dtype)
        tensors[name] = tensor
    return (n, k), tensors


def laid_out(kind: KernelSpec, seed: int, device: str) -> dict[str, torch.Tensor]:
    """The kernel tensors of a case, by Humming's transform on a device."""
    (n, k), tensors = packed(kind, seed)
    form = kernel_form(n, k, kind, True)
    return to_kernel(form, {name: tensor.to(device) for name, tensor in tensors.items()})
