"""The Triton kernels of the scale search, run by Triton's interpreter on the CPU, give the bits of torch's operations.

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
from hqconv.quantization import triton_kernels
from hqconv.quantization.scale_search import candidates, scales_of
from hqconv.humming_layout.transform import humming_schema
from hqconv.quantization.quantize import quantize_stacks
from hqconv.humming_layout.runtime import resident
from tests.make import torch_kernels
from tests.make.matrices import any_schema, hard_matrix
from tests.make.tensors import same_bits

is_broken = sys.argv[-1] == "broken"
for case in sys.argv[1 : -1 if is_broken else None]:
    name, dtype = case.split(":")
    schema, is_float32, agree = any_schema(name), dtype == "float32", []
    rows = schema.weight_scale_group_size_n or 32
    rows, columns = (32, 2 * size) if (size := schema.weight_scale_group_size) > 384 else (rows, 384)
    source = torch.float32 if is_float32 else torch.bfloat16
    stack = torch.stack([hard_matrix(rows, columns, source, seed) for seed in (0, 1)])
    importance = (torch.arange(columns) % 5).double() if is_float32 else None
    [done] = quantize_stacks([stack], schema, "bfloat16")
    words = done.tensors["weight"]
    start = scales_of(done.tensors, schema)
    with resident(torch.device("cpu")):
        table = triton_kernels.code_values(humming_schema(schema), stack.device)
        tried, valid = zip(*candidates(start, schema, "bfloat16", None))
        for scales, stored in ((start, words), (tried[0], None), (tried[-1], None)):
            values = None if stored is None else table
            ours = triton_kernels.row_errors(stack, scales, stored, values, schema, importance)
            if is_broken:
                stack = stack.clone()
                stack[1, 20, 7] += 1
            theirs = torch_kernels.row_errors(stack, scales, stored, None, schema, importance)
            known = ~torch.isnan(theirs)
            agree.append(same_bits(torch.where(known, ours, 0.0), torch.where(known, theirs, 0.0)))
        changed = torch.arange(start.scale.numel()).view(start.scale.shape) % 3 > 0
        changed &= valid[-1]
        ours = triton_kernels.chosen_codes(stack, tried[-1], changed, words, schema)
        theirs = torch_kernels.chosen_codes(stack, tried[-1], changed, words, schema)
        agree.append(same_bits(ours, theirs))
    print(case, *agree)
"""


def agreements(*words: str) -> list[list[str]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.full
def test_kernels_give_the_bits_of_torch() -> None:
    cases = [*("nvfp4:float32", "int4-g64-zp:bfloat16"), *("fp8-block:bfloat16", "int4-g8192:bfloat16")]
    assert agreements(*cases) == [[case, *["True"] * 4] for case in cases]


def test_a_changed_weight_is_detected() -> None:
    assert "False" in agreements("mxfp4:bfloat16", "broken")[0]
