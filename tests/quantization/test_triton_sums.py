"""The kernel that sums up errors, by Triton's interpreter on the CPU: to the bit what the compiled loops give.

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
from hqconv.kernel_layout.transform import humming_schema
from hqconv.quantization.quantize import quantize_stacks
from hqconv.kernel_layout.runtime import resident
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.matrices import hard_matrix
from tests.make.tensors import same_bits

flip = sys.argv[-1] == "flip"
hard = torch.stack([hard_matrix(32, 384, torch.bfloat16, seed) for seed in range(2)])
plain = torch.randn(2, 96, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
for name in sys.argv[1 : -1 if flip else None]:
    schema, agree = resolve_schema(name), []
    for stack in (hard, plain):  # widths of 3 and 1 beside a power of two, rows too
        [done] = quantize_stacks([stack], schema, "bfloat16")
        tensors = dict(done.tensors)
        if flip:
            tensors["weight"] = tensors["weight"] ^ 1
        with resident(torch.device("cpu")):
            error, power = triton_kernels.error_sums(stack, tensors, humming_schema(schema))
        assert same_bits(power, done.power)
        agree.append(same_bits(error, done.error))
    print(name, *agree)
"""


def sums_agree(*words: str) -> list[list[str]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.full
def test_kernel_gives_the_sums_of_the_compiled_loops() -> None:
    schemas = ["nvfp4", "int4-g64-zp", "fp8-tensor"]
    assert sums_agree(*schemas) == [[schema, "True", "True"] for schema in schemas]


@pytest.mark.full
def test_flipped_bits_are_detected() -> None:
    assert sums_agree("mxfp4", "flip")[0][2] == "False"
