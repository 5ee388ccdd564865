"""The Triton kernels of sweep and compensation, run by Triton's interpreter, give the bits of torch's operations.

In a process of its own: Triton decides when the kernels are loaded whether it interprets them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.make.places import REPO

SCRIPT = """
import sys
import torch
from hqconv.humming_ops.runtime import resident
from hqconv.quantization import cuda, torch_ops, triton_sweep
from hqconv.quantization.group_scales import scales_of
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.scale_search import ladder_of, least_byte
from tests.make.matrices import any_schema, hard_matrix
from tests.make.tensors import same_bits

def same(ours, theirs):
    known = ~torch.isnan(theirs)
    return same_bits(torch.where(known, ours, 0), torch.where(known, theirs, 0))

is_broken = sys.argv[-1] == "broken"
for case in sys.argv[1 : -1 if is_broken else None]:
    name, dtype = case.split(":")
    schema, is_float32 = any_schema(name), dtype == "float32"
    source = torch.float32 if is_float32 else torch.bfloat16
    stack = torch.stack([hard_matrix(8, 384, source, seed) for seed in (0, 1)])
    importance = (torch.arange(2 * 384) % 5).double().view(2, 384) if is_float32 else None
    param_dtype = "float16" if is_float32 else "bfloat16"
    [done] = quantize_stacks([stack], schema, param_dtype)
    start, ladder = scales_of(done.tensors, schema), ladder_of(schema, param_dtype)
    assert triton_sweep.can_sweep(schema)
    with resident(torch.device("cpu")):
        least = torch_ops.row_errors(stack, start, done.tensors["weight"], schema, importance) * (1 - 2.0**-20)
        floor = least_byte([start.stored], param_dtype, has_row_scale=schema.has_row_scale)
        ours = triton_sweep.sweep(stack, start, least, ladder, floor, schema, importance)
        if is_broken:
            stack[1] *= 1.5
        meter = cuda._Meter(stack, done.tensors, schema, None)
        meter._importance = importance
        theirs = meter.sweep(start, least, ladder, floor)
    print(case, *(same(*pair) for pair in zip(ours, theirs)))
"""

COMPENSATION = """
import sys
import torch
from hqconv.quantization import triton_compensation
from hqconv.quantization.gptq import hessian_factors
from hqconv.quantization.group_scales import scales_of
from hqconv.quantization.quantize import quantize_stacks
from hqconv.humming_ops.runtime import resident
from tests.make import torch_kernels
from tests.make.matrices import any_schema, hard_matrix
from tests.make.structured_inputs import as_tiles, structured_inputs
from tests.make.tensors import same_bits

is_broken = sys.argv[-1] == "broken"
triton_compensation._PROGRAMS = 3  # of four or more visits
for case in sys.argv[1 : -1 if is_broken else None]:
    name, dtype = case.split(":")
    schema, agree = any_schema(name), []
    rows = schema.weight_scale_group_size_n or (96 if schema.has_zero_point else 72)  # more than a program's 128
    columns = 192 if schema.weight_scale_group_size <= 64 else 256
    source = torch.float32 if dtype == "float32" else torch.bfloat16
    stack = torch.stack([hard_matrix(rows, columns, source, seed) for seed in (0, 1)])
    x = structured_inputs(300, columns, 0)
    tiles = as_tiles(x.T @ x / 300).numpy().tobytes()
    factors = hessian_factors(tiles, columns, schema.weight_scale_group_size, 0)
    [done] = quantize_stacks([stack], schema, "bfloat16")
    words, scales = done.tensors["weight"], scales_of(done.tensors, schema)
    with resident(torch.device("cpu")):
        table = triton_compensation.code_values(schema, stack.device)
        for one, stored in ((factors.wide, None), (factors.wide, words), (factors.narrow or factors.wide, None)):
            values = None if stored is None else table
            ours = triton_compensation.tile_losses(stack, scales, stored, values, schema, one)
            if is_broken:
                one.feedback[:, 0, 1] += 1e-9
            theirs = torch_kernels.tile_losses(stack, scales, stored, None, schema, one)
            known = ~torch.isnan(theirs)
            agree.append(same_bits(torch.where(known, ours, 0.0), torch.where(known, theirs, 0.0)))
            if one is factors.wide and stored is None:
                changed = known & (torch.arange(known.numel()).view(known.shape) % 3 > 0)  # NaN never wins
        ours = triton_compensation.compensated_codes(stack, scales, changed, words, schema, factors.wide)
        theirs = torch_kernels.compensated_codes(stack, scales, changed, words, schema, factors.wide)
        agree.append(same_bits(ours, theirs))
    print(case, *agree)
"""


def agreements(*words: str, script: str = SCRIPT) -> list[list[str]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.full
def test_the_sweep_gives_the_bits_of_torch() -> None:
    """Steps and errors, of each scale and code type."""
    cases = ["nvfp4:float32", "mxfp4:float32", "fp4-g32-e8m0-row:float32", "int4-g32:bfloat16", "uint4-e4m3:bfloat16"]
    assert agreements(*cases) == [[case, "True", "True"] for case in cases]


@pytest.mark.full
def test_a_changed_weight_is_detected() -> None:
    assert "False" in agreements("mxfp4:bfloat16", "broken")[0]


@pytest.mark.full
def test_compensation_gives_the_bits_of_torch() -> None:
    cases = ["nvfp4:float32", "int4-g64-zp:bfloat16", "int4-c:bfloat16"]
    assert agreements(*cases, script=COMPENSATION) == [[case, *["True"] * 4] for case in cases]


@pytest.mark.full
def test_a_changed_factor_is_detected() -> None:
    assert "False" in agreements("int4-c:bfloat16", "broken", script=COMPENSATION)[0]
