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
from hqconv.backends import cuda_sums
from hqconv.backends.layout import humming_schema
from hqconv.backends.quantize import quantize_stacks
from hqconv.backends.runtime import resident
from hqconv.schemas.target import resolve_schema
from tests.make.matrices import hard_matrix
from tests.make.tensors import same_bits

flip = sys.argv[2:] == ["flip"]
schema = resolve_schema(sys.argv[1])
hard = torch.stack([hard_matrix(32, 384, torch.bfloat16, seed) for seed in range(2)])
plain = torch.randn(2, 96, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
for stack in (hard, plain):  # widths of 3 and 1 beside a power of two, rows too
    [done] = quantize_stacks([stack], schema, "bfloat16")
    tensors = dict(done.tensors)
    if flip:
        tensors["weight"] = tensors["weight"] ^ 1
    with resident(torch.device("cpu")):
        error, power = cuda_sums.error_sums(stack, tensors, humming_schema(schema))
    assert same_bits(power, done.power)
    print(same_bits(error, done.error))
"""


def sums_agree(schema: str, *words: str) -> list[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, schema, *words]
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.parametrize(
    "schema", ["mxfp4", "nvfp4", "int3-g64", "int4-g64-zp", "int5-c-fpzp", "fp8-tensor", "int8-g32"]
)
def test_the_kernel_sums_as_the_loops_do(schema: str) -> None:
    assert sums_agree(schema) == ["True", "True"]


def test_flipped_bits_are_seen() -> None:
    assert sums_agree("mxfp4", "flip")[1] == "False"
