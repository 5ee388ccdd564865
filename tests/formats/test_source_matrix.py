"""Decoding: refused values, expression in target schemas, packing, and one result on every device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.errors import InputError, RequestError
from hqconv.formats.encoding import decode_matrix
from hqconv.formats.source_format import SourceFormat, why_not_direct
from hqconv.humming_ops import cpu_ops
from hqconv.quantization.bit_codec import (
    pack,
    pack_along_rows,
    transpose_4bit,
    unpack,
    unpack_along_rows,
)
from hqconv.quantization.coded_matrix import CodedMatrix, dequantize, scale_values
from hqconv.quantization.quantized import express, share_scale
from hqconv.schemas.weight_schema import PRESETS, WeightSchema, resolve_schema
from tests.make.coded import Case, cases, humming_format, int32
from tests.make.packing import Draw
from tests.make.tensors import same_bits

ALL = {case.name: case for case in cases()}


def refused(case: Case, name: str) -> str:
    """The message with which a case is refused; it names the tensor."""
    with pytest.raises(InputError) as info:
        case.coded()
    assert f"where: e.{name}" in str(info.value)
    return str(info.value)


def changed(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    """A copy with one element set; bytes where torch cannot set the dtype's elements."""
    copy = tensor.clone()
    copy.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).view(-1)[index] = value
    return copy


# --- values that are refused -------------------------------------------------------------------------------

BAD_VALUES = [
    ("fp8-block", "weight_scale_inv", float("nan"), "NaN or infinite"),
    ("fp8-channel", "weight_scale", float("inf"), "NaN or infinite"),
    ("fp8-channel", "weight_scale", -1.0, "negative"),
    ("fp8-channel", "weight_scale", 0.0, "zero, but its codes are not"),
    ("fp8-tensor", "weight_scale", float("inf"), "NaN or infinite"),
    ("fp8-tensor", "weight", 0x7F, "NaN or infinite"),
    ("fp8-tensor", "weight", 0xFF, "NaN or infinite"),
    ("fp8-e5m2", "weight", 0x7C, "NaN or infinite"),
    ("fp8-e5m2", "weight", 0xFE, "NaN or infinite"),
    ("fp8-block-e8m0", "weight_scale_inv", 255, "NaN"),
    ("mxfp4-deepseek-v4", "scale", 255, "NaN"),
    ("mxfp4-deepseek-v4", "scale", 254, "would be infinite"),
    ("mxfp4-gpt-oss", "scales", 255, "NaN"),
    ("modelopt-mxfp8", "weight_scale", 255, "NaN"),
    ("modelopt-nvfp4", "weight_scale_2", float("inf"), "scale is not usable"),
    ("modelopt-nvfp4", "weight_scale_2", float("nan"), "scale is not usable"),
    ("modelopt-nvfp4", "weight_scale", 0x7F, "NaN or infinite"),
    ("ct-nvfp4", "weight_global_scale", 0.0, "scale is not usable"),
    ("ct-nvfp4", "weight_global_scale", -2.0, "scale is not usable"),
    ("ct-int4-g128", "weight_scale", float("nan"), "NaN or infinite"),
    ("ct-int4-g128-zp", "weight_scale", 0.0, "zero, but its codes are not"),
    ("ct-w8-channel", "weight_scale", 0.0, "zero, but its codes are not"),
    ("ct-int4-actorder", "weight_g_idx", 4, "group does not exist"),
    ("gptq-int4-zp", "g_idx", -1, "group does not exist"),
    ("gptq-int4-zp", "g_idx", 1, "another order"),
    ("gptq-desc-act", "g_idx", 9, "group does not exist"),
    ("gptq-int4", "qzeros", 0, "other than the midpoint"),
    ("ascend", "weight_offset", 1.0, "offset that is not zero"),
    ("ascend", "weight_offset", float("nan"), "offset that is not zero"),
    ("awq", "scales", float("inf"), "NaN or infinite"),
    ("bitnet", "weight", 0xC0, "not ternary"),
    ("bitnet", "weight_scale", 0.0, "not usable"),
    ("quark-fp4-fp8", "weight_scale_2", float("inf"), "second scale is not usable"),
    ("quark-fp8-channel", "weight", 0x7F, "NaN or infinite"),
    ("quark-mxfp4-embedded", "weight", 128, "out of range"),
    ("humming-mxfp4", "weight_scale", 255, "NaN"),
    ("humming-int4-g128-fpzp", "zero_point", float("nan"), "zero point"),
]


@pytest.mark.parametrize(("name", "tensor", "value", "message"), BAD_VALUES)
def test_bad_values_are_refused(name: str, tensor: str, value: float, message: str) -> None:
    case = ALL[name]
    assert message in refused(
        case.with_tensor(tensor, changed(case.tensors[tensor], 0, value)), tensor
    )


def test_a_scale_that_is_no_power_of_two_under_ue8m0() -> None:
    case = ALL["fp8-block"]
    strict = replace(case, declared=replace(case.declared, options=(("scale_fmt", "ue8m0"),)))
    assert "power of two" in refused(strict, "weight_scale_inv")
    powers = torch.tensor([[0.25, 2.0**-120, 1.0], [2.0, 4.0, 8.0]])
    assert torch.equal(strict.with_tensor("weight_scale_inv", powers).coded().scale, powers)


@pytest.mark.parametrize("name", ["fp8-channel", "ct-w8-channel"])
def test_a_zero_scale_over_zeros_is_fine(name: str) -> None:
    case = ALL[name]
    codes = case.tensors["weight"].clone()
    codes.view(torch.uint8)[0] = 0
    good = case.with_tensor("weight_scale", changed(case.tensors["weight_scale"], 0, 0.0))
    assert not dequantize(good.with_tensor("weight", codes).coded())[0].any()


@pytest.mark.parametrize(
    ("name", "scale", "value"),
    [
        ("modelopt-nvfp4", "weight_scale_2", 0.0),
        ("ct-nvfp4", "weight_global_scale", float("inf")),
        ("quark-fp4-fp8", "weight_scale_2", 0.0),
        ("fp8-tensor", "weight_scale", 0.0),
        ("bitnet", "weight_scale", float("inf")),
    ],
)
def test_one_scale_that_makes_all_weights_zero_is_a_matrix_of_zeros(
    name: str, scale: str, value: float
) -> None:
    case = ALL[name]
    good = case.with_tensor(scale, changed(case.tensors[scale], 0, value))
    if "nv" in name:  # as modelopt has the groups of such a matrix
        groups = next(
            part for part in ("weight_scale", scale) if good.tensors[part].element_size() == 1
        )
        good = good.with_tensor(groups, changed(good.tensors[groups], 0, 0x7F))
    assert not dequantize(good.coded()).any()


def test_negative_scales_are_fine_for_integers() -> None:
    case = ALL["ct-int4-g128"]
    scale = -case.tensors["weight_scale"]
    assert torch.equal(case.with_tensor("weight_scale", scale).coded().scale, scale)


def test_gptq_symmetric_zeros_depend_on_the_version() -> None:
    case = ALL["gptq-int4"]
    second = replace(case, declared=replace(case.declared, options=(("zero_offset", 0),)))
    assert "midpoint" in refused(second, "qzeros")


@pytest.mark.parametrize(
    "zeros", ["77777777", "00000000", "eeeeeeee", "01234567", "f0f0f0f0", "0000000f"]
)
def test_gptq_version_1_is_one_less_in_whole_words(zeros: str) -> None:
    """As GPTQModel saves it: 0x11111111 is taken off the packed word, so a zero of 0 borrows from the next."""
    case = ALL["gptq-int4-zp"]
    word = (int(zeros, 16) - 0x11111111) % 2**32
    stored = torch.full_like(case.tensors["qzeros"], word - 2**32 if word >= 2**31 else word)
    zero_point = case.with_tensor("qzeros", stored).coded().zero_point
    assert zero_point is not None
    expected = torch.tensor([int(digit, 16) for digit in reversed(zeros)], dtype=torch.uint8)
    assert torch.equal(zero_point[:, 0].view(-1, 8), expected.expand(len(zero_point) // 8, 8))


def test_a_group_scale_under_a_second_one_may_have_underflowed() -> None:
    """Then its weights are 0, as for whoever else loads them; a matrix of such scales is damage."""
    case = ALL["modelopt-nvfp4"]
    scales = changed(case.tensors["weight_scale"], 0, 0)
    values = dequantize(case.with_tensor("weight_scale", scales).coded())
    assert not values[0, :16].any()
    assert values[0, 16:].any()
    nothing = torch.zeros_like(case.tensors["weight_scale"].view(torch.uint8)).view(
        torch.float8_e4m3fn
    )
    with pytest.raises(InputError, match="zero, but its codes are not"):
        case.with_tensor("weight_scale", nothing).coded()


# --- scales ------------------------------------------------------------------------------------------------


def test_every_e8m0_and_e5m3_byte() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    e8m0 = scale_values(data.view(torch.float8_e8m0fnu))
    assert e8m0[255].isnan()
    assert e8m0[:255].double().tolist() == [2.0 ** (i - 127) for i in range(255)]
    e5m3 = scale_values(data)
    assert e5m3[255].isnan()
    expected = [
        (i & 7) / 8 * 2.0**-14 if i < 8 else (1 + (i & 7) / 8) * 2.0 ** ((i >> 3) - 15)
        for i in range(255)
    ]
    assert e5m3[:255].tolist() == expected


# --- expression --------------------------------------------------------------------------------------------

SCHEMAS = (
    *PRESETS.values(),
    resolve_schema("int4-g32-zp"),
    resolve_schema("int4-g64"),
    resolve_schema("int2-g16-zp"),
    WeightSchema("fp8-64", "float8e4m3", "float32", "block", 64, 64),
    WeightSchema("fp8-g32", "float8e4m3", None, "group", 32),
    WeightSchema("mxfp4-wide", "float4e2m1", None, "group", 16),
    WeightSchema("ternary", "float2e0m1", "float32", "tensor"),
)


@pytest.mark.parametrize("name", ALL)
def test_express_keeps_every_weight(name: str) -> None:
    """Wherever a schema is direct, its own decoder gives back exactly what the source's decoder gives."""
    case = ALL[name]
    fmt, coded = case.completed().format, case.coded()
    values = dequantize(coded)
    for schema in SCHEMAS:
        for param in ("bfloat16", "float16"):
            if why_not_direct(fmt, schema, param) or coded.column_groups is not None:
                continue
            if fits(schema, case.shape):
                tensors = express(coded, schema, param)
                check_attributes(tensors, schema, case.shape, param)
                target = Case("t", humming_format(schema), tensors, case.shape)
                assert same_bits(dequantize(target.coded()), values), schema.name
            else:
                with pytest.raises(RequestError, match="does not fit"):
                    express(coded, schema, param)


def fits(schema: WeightSchema, shape: tuple[int, int]) -> bool:
    rows, columns = schema.weight_scale_group_size_n or 1, schema.weight_scale_group_size or 1
    return shape[0] % rows == 0 and shape[1] % columns == 0


def check_attributes(
    tensors: dict[str, torch.Tensor], schema: WeightSchema, shape: tuple[int, int], param: str
) -> None:
    from hqconv.humming_ops.runtime import humming_schema

    expected = humming_schema(schema).get_tensors_attrs(*shape, getattr(torch, param))
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (words["shape"], words["dtype"]) for name, words in expected.items()
    }
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_direct_formats_are_really_direct() -> None:
    """Guards the test above against comparing nothing."""
    pairs = {
        "fp8-block": "fp8-block",
        "mxfp4-mimo": "mxfp4",
        "modelopt-mxfp8": "mxfp8",
        "modelopt-nvfp4": "nvfp4",
        "fp8-tensor": "fp8-tensor",
    }
    for source, schema in {
        **pairs,
        "ct-int4-g128-zp": "int4-g32-zp",
        "ct-w8-channel-zp": "",
    }.items():
        why = why_not_direct(
            ALL[source].completed().format, resolve_schema(schema or "int4"), "bfloat16"
        )
        assert bool(why) == (not schema), why


def test_express_refuses_to_round() -> None:
    coded = CodedMatrix(
        "uint4", torch.zeros(32, 4, dtype=torch.int32), torch.full((32, 1), 0.1), 1, 0
    )
    with pytest.raises(RequestError, match="rounded"):
        express(coded, resolve_schema("int4-c"), "bfloat16")


def test_share_scale() -> None:
    first = ALL["fp8-tensor"].coded()
    double = replace(first, scale=first.scale * 2)
    schema, nvfp4 = resolve_schema("fp8-tensor"), resolve_schema("nvfp4")
    assert share_scale([first, first], schema)
    assert not share_scale([first, double], schema)
    assert share_scale([first, double], resolve_schema("fp8"))
    assert not share_scale([ALL["fp8-channel"].coded()] * 2, schema)
    second = ALL["modelopt-nvfp4"].coded()
    assert second.scale_2 is not None
    without = replace(second, scale_2=None)
    assert share_scale([second, second], nvfp4)
    for unlike in (replace(second, scale_2=second.scale_2 * 2), without):
        assert not share_scale([second, unlike], nvfp4)
    assert not share_scale([without, without], nvfp4)


# --- packing -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_packing_is_little_endian_and_back(bits: int, rows: int, blocks: int, seed: int) -> None:
    codes = Draw(seed).integers(0, 2**bits, rows, 32 * blocks).to(torch.uint8)
    packed = pack(codes, bits)
    assert same_bits(packed, cpu_ops.pack_weight(codes.int(), bits))
    numbers = [sum(c << (bits * i) for i, c in enumerate(row)) for row in codes.tolist()]
    found = [
        sum((w & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(row)) for row in packed.tolist()
    ]
    assert numbers == found
    assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(
        unpack_along_rows(pack_along_rows(codes.t(), bits), bits, 32 * blocks), codes.t()
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 40), st.permutations(range(8)), st.sampled_from((0, 8)))
def test_nibble_transposition(width: int, eighths: int, order: list[int], flip: int) -> None:
    packed = int32(Draw(width), 8 * eighths, width)
    codes = unpack(packed, 4).view(8 * eighths, width, 8)
    expected = torch.empty_like(codes)
    for j, column in enumerate(order):
        expected[..., column] = codes[..., j]
    ours = transpose_4bit(packed, tuple(order), flip)
    assert torch.equal(unpack(ours, 4), expected.flatten(1).t() ^ flip)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from((16, 48, 128)), st.sampled_from((32, 128))
)
def test_fp8_blocks_of_any_shape(rows: int, columns: int, block_n: int, block_k: int) -> None:
    n, k = 20 * rows, 28 * columns
    draw = Draw(n * k)
    scale = draw.scales(-(-n // block_n), -(-k // block_k))
    declared = SourceFormat("fp8", "fp8", group_n=block_n, group_k=block_k)
    case = Case("any", declared, {"weight": draw.fp8(n, k), "weight_scale_inv": scale}, (n, k))
    spread = scale.repeat_interleave(block_n, 0)[:n].repeat_interleave(block_k, 1)[:, :k]
    assert same_bits(dequantize(case.coded()), case.tensors["weight"].float() * spread)


def test_a_view_into_a_stack_decodes_alike() -> None:
    case = ALL["mxfp4-deepseek-v4"]
    odd = torch.empty(1 + case.tensors["weight"].numel(), dtype=torch.int8)
    odd[1:] = case.tensors["weight"].flatten()
    tensors = {**case.stored(), "weight": odd[1:].view(case.tensors["weight"].shape)}
    coded = decode_matrix(case.completed().format, tensors, case.shape, case.names()).coded
    assert coded is not None
    assert same_bits(coded.packed, case.coded().packed)


# --- floats and bitsandbytes -------------------------------------------------------------------------------


def test_bitsandbytes_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = importlib.import_module

    def absent(name: str, *args: Any) -> Any:
        if name.startswith("bitsandbytes"):
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr(importlib, "import_module", absent)
    tensors = {"weight": torch.zeros(4, 1, dtype=torch.uint8)}
    with pytest.raises(RequestError, match=r"pip install 'bitsandbytes>="):
        decode_matrix(SourceFormat("bnb", "bnb4"), tensors, (2, 4), {})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"quant_type": "nf4"}', "cannot be read"),
        (b'{"quant_type":"nf4","blocksize":-64,"dtype":"float32","shape":[8,64]}', "blocksize"),
        (b'{"quant_type":"fp4","blocksize":64,"dtype":"float32","shape":[8,64]}', "quant_type"),
        (b'{"quant_type":"nf4","blocksize":64,"dtype":"float32","shape":[64,8]}', "shape"),
        (
            b'{"quant_type":"nf4","blocksize":128,"dtype":"float32","shape":[8,64]}',
            "one scale for every block",
        ),
    ],
)
def test_a_bad_quantization_state(state: bytes, message: str) -> None:
    pytest.importorskip("bitsandbytes")
    tensors = {
        "weight": torch.zeros(256, 1, dtype=torch.uint8),
        "absmax": torch.ones(8),
        "quant_map": torch.linspace(-1, 1, 16),
        "quant_state": torch.tensor(list(state), dtype=torch.uint8),
    }
    fmt = SourceFormat("bnb", "bnb4", options=(("quant_type", "nf4"),))
    with pytest.raises(InputError, match=message):
        decode_matrix(fmt, tensors, (8, 64), {})


# --- both devices ------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_cuda_gives_the_same_bits(name: str) -> None:
    case = ALL[name]
    cpu, cuda = case.coded(), case.coded("cuda")
    for part in ("packed", "scale", "zero_point", "scale_2", "column_groups"):
        left, right = getattr(cpu, part), getattr(cuda, part)
        assert (left is None) == (right is None)
        assert left is None or (right.is_cuda and same_bits(left, right)), part
    assert same_bits(dequantize(cpu), dequantize(cuda))
    if cpu.column_groups is not None:  # they are sorted before
        return
    for schema in SCHEMAS:
        if not why_not_direct(case.completed().format, schema, "bfloat16") and fits(
            schema, case.shape
        ):
            ours, theirs = express(cpu, schema, "bfloat16"), express(cuda, schema, "bfloat16")
            assert all(same_bits(ours[key], theirs[key]) for key in ours)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "tensor", "value", "message"), BAD_VALUES)
def test_cuda_refuses_the_same_values(name: str, tensor: str, value: float, message: str) -> None:
    case = ALL[name].with_tensor(tensor, changed(ALL[name].tensors[tensor], 0, value))
    with pytest.raises(InputError, match=message):
        case.coded("cuda")
