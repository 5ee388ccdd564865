"""The Triton kernels compile for sm90 on a machine without a GPU, and every operation is rounded once there.

Each launch of the functions that call them is recorded instead of run, and compiled with the types of its arguments.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hqconv.quantization.group_scales import scales_of
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.scale_search import ladder_of, least_byte
from tests.make.matrices import any_schema, hard_matrix

triton = pytest.importorskip("triton")

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
}
COLUMNS = 384
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels and arguments of all launches, none of which runs."""
    found: list[Launch] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append((self, args, kwargs))

    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", run)
    return found


def ptx_of(launch: Launch) -> str:
    """Compile a launch as Triton does at its first run: an integer 1 is a constant, multiples of 16 are known."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, args, kwargs = launch
    assert kwargs["enable_fp_fusion"] is False
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        n: kwargs[n] for n in kernel.arg_names if n in kwargs
    }
    is_constant = {p.name: p.is_constexpr for p in kernel.params}
    signature, constants, multiples = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        value = values[name]
        if is_constant[name] or (type(value) is int and value == 1):
            signature[name], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if signature[name][0] == "*" or (signature[name] == "i32" and value % 16 == 0):
            multiples[(number,)] = [["tt.divisibility", 16]]
    target, options = GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}
    if "num_warps" in kwargs:
        options["num_warps"] = kwargs["num_warps"]
    source = ASTSource(kernel, signature, constants, multiples)
    ptx: str = triton.compile(source, target=target, options=options).asm["ptx"]
    return ptx


def assert_rounded_once(ptx: str) -> None:
    """No product is fused with a sum, quotients are exact, and small numbers are kept."""
    assert not re.findall(r"\bfma\.[a-z.]*f(?:32|64)", ptx)
    assert set(re.findall(r"\bdiv\.[a-z.]*f(?:32|64)", ptx)) <= {"div.rn.f32", "div.rn.f64"}
    assert ".ftz" not in ptx


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("nvfp4", torch.bfloat16), ("mxfp4", torch.float32), ("int4-g32", torch.bfloat16)],
)
def test_the_sweep_compiles_for_a_gpu(
    name: str, dtype: torch.dtype, launches: list[Launch]
) -> None:
    from hqconv.quantization import triton_sweep

    schema, param_dtype = any_schema(name), "bfloat16" if dtype == torch.bfloat16 else "float16"
    stack = torch.stack([hard_matrix(128, COLUMNS, dtype, seed) for seed in (0, 1)])
    [done] = quantize_stacks([stack], schema, param_dtype)
    start = scales_of(done.tensors, schema)
    least = torch.ones(2, 128, start.scale.size(2), dtype=torch.float64)
    floor = least_byte([start.stored], param_dtype, has_row_scale=schema.has_row_scale)
    triton_sweep.sweep(stack, start, least, ladder_of(schema, param_dtype), floor, schema)
    assert launches
    for launch in launches:
        assert_rounded_once(ptx_of(launch))
