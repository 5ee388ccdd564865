"""The kernels of the search for scales, by Triton's interpreter on the CPU: to the bit what torch's operations give.

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
from hqconv.backends import cuda_scores, cuda_search, cuda_sums
from hqconv.quantization.scale_candidates import candidates, scales_of
from hqconv.humming_layout.transform import humming_schema
from hqconv.quantization.quantize import quantize_stacks
from hqconv.humming_layout.runtime import resident
from tests.make.matrices import any_schema, hard_matrix
from tests.make.tensors import same_bits

is_broken = sys.argv[-1] == "broken"
for case in sys.argv[1 : -1 if is_broken else None]:
    name, dtype = case.split(":")
    schema, is_float32, agree = any_schema(name), dtype == "float32", []
    rows = schema.weight_scale_group_size_n or 32
    stack = torch.stack([hard_matrix(rows, 384, torch.float32 if is_float32 else torch.bfloat16, s) for s in (0, 1)])
    importance = (torch.arange(384) % 5).double() if is_float32 else None
    [done] = quantize_stacks([stack], schema, "bfloat16")
    words = done.tensors["weight"]
    start = scales_of(done.tensors, schema)
    assert cuda_scores.covers(stack, start)
    with resident(torch.device("cpu")):
        table = cuda_sums.code_values(humming_schema(schema), stack.device)
        tried, valid = zip(*candidates(start, schema, "bfloat16", None))
        for scales, stored in ((start, words), (tried[0], None), (tried[-1], None)):
            ours = cuda_scores.errors(stack, scales, stored, None if stored is None else table, schema, importance)
            if is_broken:
                stack = stack.clone()
                stack[1, 20, 7] += 1
            theirs = cuda_search.row_errors(stack, scales, stored, schema, importance)
            known = ~torch.isnan(theirs)
            agree.append(same_bits(torch.where(known, ours, 0.0), torch.where(known, theirs, 0.0)))
        changed = torch.arange(start.scale.numel()).view(start.scale.shape) % 3 > 0
        changed &= valid[-1]
        ours = cuda_scores.codes(stack, tried[-1], changed, words, schema)
        theirs = cuda_search.chosen_codes(stack, tried[-1], changed, words, schema)
        agree.append(same_bits(ours, theirs))
    print(case, *agree)
"""


def agreements(*words: str) -> list[list[str]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.full
def test_the_kernels_do_what_torch_does() -> None:
    cases = [
        *("nvfp4:float32", "int4-g64-zp:float32"),
        *("int5-c-fpzp:bfloat16", "fp8-block:bfloat16"),
    ]
    assert agreements(*cases) == [[case, *["True"] * 4] for case in cases]


def test_another_weight_is_seen() -> None:
    assert "False" in agreements("mxfp4:bfloat16", "broken")[0]
