"""Our CPU twins against Humming's CUDA ops, to the bit. Needs the GPU; everything else lives off its goldens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hqconv.humming_ops import cpu_ops
from hqconv.humming_ops.runtime import humming
from hqconv.kernel_layout.transform import kernel_form, to_kernel
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.options import MSE
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.matrices import SCHEMAS, hard_matrix
from tests.make.quantized import quantize
from tests.make.tensors import same_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = ((384, 1024), (128, 2944))


def differences(cpu: dict[str, torch.Tensor], cuda: dict[str, torch.Tensor]) -> list[str]:
    assert cpu.keys() == cuda.keys()
    return [name for name in cpu if not same_bits(cpu[name], cuda[name])]


@pytest.mark.parametrize("name", SCHEMAS)
def test_quantize_and_layout_are_the_same_bits(name: str) -> None:
    """Source dtypes take turns by schema and size."""
    schema, sources = resolve_schema(name), (torch.bfloat16, torch.float16, torch.float32)
    for seed, (n, k) in enumerate(SIZES):
        source = sources[(SCHEMAS.index(name) + seed) % 3]
        param_dtype = "bfloat16" if source == torch.bfloat16 else "float16"
        pair = [hard_matrix(n, k, source, 10 * seed + i) for i in range(2)]
        on_cpu = quantize(pair, schema, param_dtype)
        on_gpu = quantize([m.cuda() for m in pair], schema, param_dtype)
        for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
            assert not differences(cpu.tensors, gpu.tensors), (n, k)
            assert cpu.error_sums.is_finite
            assert gpu.error_sums.is_finite
            ours_theirs = [
                (getattr(cpu.error_sums, n), getattr(gpu.error_sums, n)) for n in ("error", "power")
            ]
            for ours, theirs in ours_theirs:
                assert ours == theirs or (math.isnan(ours) and math.isnan(theirs)), (n, k)
        stacks = []
        for side in (on_cpu, on_gpu):
            names = side[0].tensors
            stacks.append(
                {
                    x: torch.stack([q.tensors[x] for q in side]).reshape(
                        _stacked(side[0].tensors[x], x)
                    )
                    for x in names
                }
            )
        form = kernel_form(n, k, kernel_spec_of(schema, param_dtype, 90))
        assert not differences(*(to_kernel(form, stack) for stack in stacks)), (n, k)


def _stacked(one: torch.Tensor, name: str) -> tuple[int, ...]:
    is_tensor_scale = one.shape == (1,) and name in ("weight_scale", "weight_scale_2")
    return (2,) if is_tensor_scale else (2, *one.shape)


@pytest.mark.parametrize("name", SCHEMAS)
def test_stacks_are_the_same_bits(name: str) -> None:
    """Codes, scales, layout and error sums of several experts at once after a search, from either device."""
    schema, param_dtype = resolve_schema(name), "float16"
    stacks = [
        torch.stack([hard_matrix(256, 640, torch.bfloat16, 10 * i + e) for e in range(5)])
        for i in range(2)
    ]
    on_cpu = quantize_stacks(stacks, schema, param_dtype, count_exact=True, quantizer=MSE)
    on_gpu = quantize_stacks(
        [s.cuda() for s in stacks], schema, param_dtype, count_exact=True, quantizer=MSE
    )
    form = kernel_form(256, 640, kernel_spec_of(schema, param_dtype, 90))
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert not differences(cpu.tensors, gpu.tensors)
        assert repr(cpu.error_sums()) == repr(gpu.error_sums())  # NaN among them
        assert not differences(to_kernel(form, cpu.tensors), to_kernel(form, gpu.tensors))


# Of other schemas the code for GPUs calls it; for a second scale the contract has a recipe of its own.
@pytest.mark.parametrize("name", ["int4", "fp8-tensor"])
def test_our_cpu_quantizer_is_hummings_quant_tensor_on_the_gpu(name: str) -> None:
    schema = resolve_schema(name)
    reference = humming().schema.HummingWeightSchema
    target = reference(**schema.humming_fields())
    matrix = hard_matrix(256, 1024, torch.bfloat16, 5)
    ours = quantize([matrix], schema, "bfloat16")[0].tensors
    theirs = reference.quant_tensor(matrix.cuda(), target, torch.bfloat16)
    assert not differences(ours, theirs)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_unpack_and_repack(bits: int) -> None:
    ops = humming().ops
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (2, 192, 384), generator=generator, dtype=torch.int32)
    packed = cpu_ops.pack_weight(codes, bits)
    assert same_bits(packed, ops.pack_weight(codes.cuda(), bits))
    assert same_bits(cpu_ops.unpack_weight(packed, bits), codes)
    zeros = torch.randint(0, 2**bits, (2, 192, 6), generator=generator, dtype=torch.int32)
    packed_zeros = (
        cpu_ops.pack_weight(zeros.transpose(1, 2).contiguous(), bits).transpose(1, 2).contiguous()
    )
    combinations = itertools.product(
        (16, 8, 4), (False, True), (False, True), (False, True), (False, True), (3, 2)
    )
    possible = []
    for a_bits, centre, with_zero, packed_k, native, mode in combinations:
        impossible = (
            (with_zero and not centre) or (packed_k and (a_bits != 8 or bits % 2)) or bits > a_bits
        )
        if (
            impossible
            or (native and (centre or packed_k))
            or (mode == 2 and (a_bits != 8 or centre))
        ):
            continue
        possible.append((a_bits, centre, with_zero, packed_k, native, mode))
    # Each is a kernel to compile; layouts that are in use are all recorded (`test_transform`).
    for a_bits, centre, with_zero, packed_k, native, mode in possible[bits % 3 :: 3]:
        options = {
            "weight_bits": bits,
            "activation_bits": a_bits,
            "is_weight_packed": True,
            "should_preprocess_for_int2fp": centre,
            "should_preprocess_with_zp": with_zero,
            "interleave_mode": mode,
            "group_size_zp": 64 if with_zero else 0,
            "use_packed_k_layout": packed_k,
            "use_native_dequant": native,
        }
        zero = packed_zeros if with_zero else None
        ours = cpu_ops.repack_weight(packed, zero_point=zero, **options)
        theirs = ops.repack_weight(
            packed.cuda(), zero_point=None if zero is None else zero.cuda(), **options
        )
        assert same_bits(ours, theirs), options


@pytest.mark.parametrize(
    ("exponent", "mantissa"), [(2, 1), (3, 2), (2, 3), (4, 3), (5, 2), (5, 3), (0, 3)]
)
def test_dequant_weight(exponent: int, mantissa: int) -> None:
    for signed in (True, False):
        codes = torch.arange(2 ** (exponent + mantissa + signed), dtype=torch.int32).repeat(32)
        ours = cpu_ops.dequant_weight(codes, exponent, mantissa, signed)
        assert same_bits(
            ours, humming().ops.dequant_weight(codes.cuda(), exponent, mantissa, signed)
        )


def test_process_mxfp4() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (256, 64), generator=generator, dtype=torch.int32)
    shifts = torch.arange(256, dtype=torch.uint8).repeat(16)
    ours = cpu_ops.process_mxfp4_w4a8_weight(words, shifts)
    assert same_bits(ours, humming().ops.process_mxfp4_w4a8_weight(words.cuda(), shifts.cuda()))
