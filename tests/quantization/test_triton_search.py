"""The Triton kernel that sweeps scales, run by Triton's interpreter, gives the bits of torch's operations.

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
from hqconv.quantization import quantize, quantized, triton_sweep
from hqconv.quantization.group_scales import scales_of
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.scale_search import ladder_of, least_byte
from tests.make.matrices import any_schema, hard_matrix
from tests.make.tensors import same_bits

def same(ours, theirs):
    known = ~torch.isnan(theirs)
    return same_bits(torch.where(known, ours, 0), torch.where(known, theirs, 0))

for case in sys.argv[1:]:
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


@pytest.mark.full
def test_the_sweep_gives_the_bits_of_torch() -> None:
    """Steps and errors, of each scale and code type."""
    cases = [
        "nvfp4:float32",
        "mxfp4:float32",
        "fp4-g32-e8m0-row:float32",
        "int4-g32:bfloat16",
        "uint4-e4m3:bfloat16",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, *cases]
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.stdout.splitlines() == [f"{case} True True" for case in cases], done.stderr[-2000:]
