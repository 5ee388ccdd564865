"""The Triton kernels, run by Triton's interpreter, give the bits of torch's operations, and of the CPU's loop.

In a process of its own: Triton decides when the kernels are loaded whether it interprets them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.make.places import REPO

SEARCH = """
import torch
from hqconv.humming_ops.runtime import resident
from hqconv.quantization import quantize, quantized, triton_sweep
from hqconv.quantization.group_scales import scales_of
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.scale_search import ladder_of, least_byte
from tests.make.matrices import any_schema, hard_matrix
from tests.make.tensors import same_bits

def same(ours, theirs):
    known = ~torch.isnan(theirs)
    return same_bits(torch.where(known, ours, 0), torch.where(known, theirs, 0))

for case in (
    "nvfp4:float32",
    "mxfp4:float32",
    "fp4-g32-e8m0-row:float32",
    "int4-g32:bfloat16",
    "uint4-e4m3:bfloat16",
):
    name, dtype = case.split(":")
    schema, is_float32 = any_schema(name), dtype == "float32"
    source = torch.float32 if is_float32 else torch.bfloat16
    stack = torch.stack([hard_matrix(8, 64, source, seed) for seed in (0, 1)])
    param_dtype = "float16" if is_float32 else "bfloat16"
    [done] = quantize_stacks([stack], schema, param_dtype)
    start, ladder = scales_of(done.tensors, schema), ladder_of(schema, param_dtype)
    assert triton_sweep.can_sweep(schema)
    with resident(torch.device("cpu")):
        least = quantized.row_errors(stack, start, done.tensors["weight"], schema) * (1 - 2.0**-20)
        floor = least_byte([start.stored], param_dtype, has_row_scale=schema.has_row_scale)
        ours = triton_sweep.sweep(stack, start, least, ladder, floor, schema)
        meter = quantize._Meter(stack, done.tensors, schema)
        theirs = meter.sweep(start, least, ladder, floor)
    print(case, *(same(*pair) for pair in zip(ours, theirs)))
"""

ROUNDING = """
import torch
from hqconv.calibration import gptq
from hqconv.quantization import cpu, triton_sweep
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.calibrated import correlated, products_of

def with_gaps(tensor):
    # a copy with the strides of a part of larger matrices
    larger = torch.zeros(len(tensor), 3 * tensor.size(1), tensor.size(2))[:, : tensor.size(1)]
    return larger.copy_(tensor)

class Both:
    @staticmethod
    def round_columns(group, *args, **kwargs):
        names = ("pull", "number", "value")
        copies = {name: with_gaps(getattr(group, name)) for name in names}
        theirs = group._replace(**copies, scale=group.scale.clone(), loss=group.loss.clone())
        change = triton_sweep.round_columns(theirs, *args, **kwargs)
        ours = cpu.round_columns(group, *args, **kwargs)
        same.append(torch.equal(theirs.number, group.number))
        for pair in ((change, ours), (theirs.value, group.value), (theirs.scale, group.scale)):
            same.append(torch.allclose(*pair, rtol=0, atol=1e-6))
        same.append(torch.allclose(theirs.loss, group.loss))
        return ours

gptq.cpu = Both
for name in ("int3-g64", "nvfp4", "mxfp4", "int2-g32-zp", "int4"):
    same = []
    weights = torch.randn(2, 48, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    products = products_of([correlated(600, 128, seed) for seed in (2, 3)])
    gptq.quantize_by_outputs([weights], resolve_schema(name), "bfloat16", products)
    print(name, len(same) > 0, all(same))
"""


@pytest.mark.full
@pytest.mark.parametrize("script", [SEARCH, ROUNDING])
def test_kernels_do_as_the_cpu(script: str) -> None:
    """Steps and errors of a search, of each scale and code type; every step of a calibration, which rounds columns."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    results = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert results == 5 * ["True True"], done.stdout + done.stderr[-2000:]
