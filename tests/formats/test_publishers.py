"""Decoders against the packages that publish the formats, bit for bit.

Where a package cannot be a dependency of ours, its published formula stands here in its own order of operations.
Integers and e2m1 codes times one scale are exact in float64, so "rounded once" is a float64 product cast down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hqconv.formats.source_format import SourceFormat
from hqconv.quantization.coded_matrix import dequantize
from tests.make.coded import QUARK, Case, Draw, K, N, cases

ALL = {one.name: one for one in cases()}


def names(prefix: str) -> list[str]:
    return [name for name in ALL if name.startswith(prefix)]


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert theirs.dtype == torch.float32
    differs = ours.view(torch.int32) != theirs.contiguous().view(torch.int32)
    assert not differs.any(), f"first at {differs.nonzero()[0].tolist()}"


def assert_same_values(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal numbers; the sign of a zero may differ."""
    assert_same_bits(ours + 0.0, theirs + 0.0)


# --- transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-e8m0", "fp8-e5m2", "mxfp8", "mxfp4"])
def test_transformers_fp8_dequantize(name: str) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    one = ALL[name]
    parts = one.parts()
    theirs = module.Fp8Dequantize(None)._dequantize_one(
        parts["weight"], scale_float(parts["scale"]), output_dtype=torch.float32
    )
    assert_same_bits(dequantize(one.coded()), theirs)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block-ragged", "quark-fp8-block", "ct-w8-tensor"])
def test_one_multiplication_by_the_scale_of_its_block(name: str) -> None:
    """vLLM's reading: row n and column k have scale [n // bn, k // bk]."""
    one = ALL[name]
    fmt, parts = one.completed().format, one.parts()
    rows, columns = (torch.arange(size) // (group or size) for size, group in zip(one.shape, groups(fmt), strict=True))
    scale = parts["scale"].float().reshape(int(rows.max()) + 1, int(columns.max()) + 1)
    assert_same_values(dequantize(one.coded()), parts["weight"].float() * scale[rows][:, columns])


def groups(fmt: SourceFormat) -> tuple[int, int]:
    return fmt.group_n, fmt.group_k


def scale_float(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 as powers of two computed in float64, everything else widened."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return (2.0 ** (scale.view(torch.uint8).double() - 127)).float()
    return scale.float()


def test_transformers_mxfp4_blocks() -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    one = ALL["gpt-oss"]
    blocks, scales = one.tensors["blocks"].unsqueeze(0), one.tensors["scales"].unsqueeze(0)
    theirs = module.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert_same_bits(dequantize(one.coded()), theirs[0].t().contiguous())


@pytest.mark.parametrize("name", ["bitnet", "bitnet-auto"])
def test_transformers_bitnet(name: str) -> None:
    module = pytest.importorskip("transformers.integrations.bitnet")
    one = ALL[name]
    unpack = module.unpack_weights
    codes = getattr(unpack, "_torchdynamo_orig_callable", unpack)(one.tensors["weight"], torch.float32)
    scale = one.tensors["weight_scale"].float()
    theirs = codes * (1 / scale) if name == "bitnet" else codes * scale
    assert_same_values(dequantize(one.coded()), theirs)


# --- compressed-tensors ------------------------------------------------------------------------------------


def compressed(one: Case) -> torch.Tensor:
    """What compressed-tensors' own decompressor gives, with scales in float32 so that it computes in float32."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = one.humming or {}
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric")
    weights = QuantizationArgs(**{key: config[key] for key in keys if config.get(key) is not None})
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = dict(one.tensors)
    if tensors["weight_scale"].dtype == torch.bfloat16:
        tensors["weight_scale"] = tensors["weight_scale"].float()
    values: torch.Tensor = BaseCompressor.get_value_from_registry(config["format"]).decompress(tensors, scheme)[
        "weight"
    ]
    return values


@pytest.mark.parametrize("name", [n for n in names("ct-int") if n != "ct-int3-padded"])
def test_compressed_tensors_packed(name: str) -> None:
    assert_same_values(dequantize(ALL[name].coded()), compressed(ALL[name]))


def test_compressed_tensors_int8() -> None:
    assert_same_values(dequantize(ALL["ct-w8-channel"].coded()), compressed(ALL["ct-w8-channel"]))


def test_compressed_tensors_int8_with_zero_points() -> None:
    one = ALL["ct-w8-zp"]
    weight, zero = (one.tensors[key].float() for key in ("weight", "weight_zero_point"))
    assert_same_values(dequantize(one.coded()), (weight - zero) * one.tensors["weight_scale"])


def test_ascend_int8() -> None:
    """npu_quant_matmul: each row's integers by its scale; vllm-ascend's w8a8_dynamic.py passes no offset to it."""
    one = ALL["ascend"]
    assert_same_values(dequantize(one.coded()), one.tensors["weight"].float() * one.tensors["weight_scale"])


def test_compressed_tensors_mxfp4() -> None:
    """Their decoder is in bfloat16, which holds fp4 times a power of two, but for results below its subnormals."""
    one = ALL["ct-mxfp4"]
    theirs = compressed(one).float()
    is_exact = one.tensors["weight_scale"].repeat_interleave(32, 1) > 0
    assert_same_values(dequantize(one.coded())[is_exact], theirs[is_exact])


def test_compressed_tensors_nvfp4() -> None:
    """Their second scale divides: our reciprocal is rounded once, so results agree within two roundings."""
    one = ALL["ct-nvfp4"]
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    codes = helpers.unpack_fp4_from_uint8(one.tensors["weight_packed"], N, K).double()
    exact = codes * one.tensors["weight_scale"].double().repeat_interleave(16, 1)
    divisor = one.tensors["weight_global_scale"]
    ours = dequantize(one.coded())
    assert_same_bits(ours, (exact * (1 / divisor).double()).float())
    assert torch.allclose(ours.double(), exact / divisor.double(), rtol=2.0**-23, atol=0)


def test_compressed_tensors_padded_words() -> None:
    """Words of 32 // bits codes, their upper bits unused; the installed version only packs densely."""
    one, bits = ALL["ct-int3-padded"], 3

    def unpack(value: torch.Tensor, size: int, dim: int) -> torch.Tensor:
        value = value if dim == 1 else value.t()
        codes = torch.zeros(value.shape[0], value.shape[1] * 10, dtype=torch.int32)
        for i in range(10):
            codes[:, i::10] = (value >> (bits * i)) & 7
        codes = codes[:, :size] - 4
        return codes if dim == 1 else codes.t()

    codes = unpack(one.tensors["weight_packed"], K, 1)
    zeros = unpack(one.tensors["weight_zero_point"], N, 0)
    scale = one.tensors["weight_scale"].repeat_interleave(64, 1)
    theirs = (codes - zeros.repeat_interleave(64, 1)).float() * scale
    assert_same_values(dequantize(one.coded()), theirs)


def test_compressed_tensors_activation_order() -> None:
    one = ALL["ct-actorder"]
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = helpers.unpack_from_int32(one.tensors["weight_packed"], 4, torch.Size([N, K])).float()
    scale = one.tensors["weight_scale"].float()[:, one.tensors["weight_g_idx"].long()]
    assert_same_values(dequantize(one.coded()), codes * scale)


# --- GPTQ and AWQ ------------------------------------------------------------------------------------------


def little_endian(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 codes of int32 words along the last dimension, one Python integer a row."""
    rows = []
    for row in values.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([(number >> (bits * i)) & (2**bits - 1) for i in range(len(row) * 32 // bits)])
    return torch.tensor(rows)


@pytest.mark.parametrize("name", names("gptq"))
def test_gptqmodel(name: str) -> None:
    """gptqmodel, nn_modules/qlinear/__init__.py: scales[g_idx] * (weight - zeros[g_idx]).

    Version 1: utils/model.py, convert_gptq_v1_to_v2_format_module, adds one to each code of the packed words at once.
    """
    one = ALL[name]
    bits = int(name[4])
    weight = little_endian(one.tensors["qweight"].t(), bits).t()
    is_first = "v2" not in name and "desc" not in name
    ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}.get(bits, 0) if is_first else 0
    zeros = little_endian(one.tensors["qzeros"] + ones, bits)
    if is_first and not ones:
        zeros = (zeros + 1) % 2**bits
    index = one.tensors["g_idx"].long()
    theirs = one.tensors["scales"].float()[index] * (weight - zeros[index]).float()
    assert_same_values(dequantize(one.coded()), theirs.t())


def test_gptqmodel_three_bits() -> None:
    """Its own unpacking of 3-bit rows: words of 10, 11 and 11 codes and two that straddle."""
    packed = ALL["gptq3-v2-zp"].tensors["qweight"]
    shifts = torch.tensor(
        [
            [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 0],
            [0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31],
            [0, 2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 0],
        ]
    ).reshape(1, 3, 12, 1)
    weight = packed.reshape(-1, 3, 1, N).expand(-1, -1, 12, -1) >> shifts
    weight = weight & 0x7
    weight[:, 0, 10] = (weight[:, 0, 10] & 0x3) | ((weight[:, 1, 0] << 2) & 0x4)
    weight[:, 1, 11] = (weight[:, 1, 11] & 0x1) | ((weight[:, 2, 0] << 1) & 0x6)
    weight = torch.cat([weight[:, 0, :11], weight[:, 1, 1:12], weight[:, 2, 1:11]], dim=1).reshape(K, N)
    assert torch.equal(weight.long(), little_endian(packed.t(), 3).t())


def test_autoawq() -> None:
    """autoawq, utils/packing_utils.py, dequantize_gemm."""
    one = ALL["awq"]
    shifts = torch.arange(0, 32, 4)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        codes = (packed[:, :, None] >> shifts).to(torch.int8).view(packed.shape[0], -1)
        places = torch.arange(codes.shape[1]).view(-1, 8)[:, order].view(-1)
        return codes[:, places] & 15

    scales = one.tensors["scales"].float().repeat_interleave(64, dim=0)
    zeros = unpack(one.tensors["qzeros"]).repeat_interleave(64, dim=0)
    theirs = (unpack(one.tensors["qweight"]) - zeros) * scales
    assert_same_values(dequantize(one.coded()), theirs.t())


# --- modelopt ----------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def test_modelopt_nvfp4() -> None:
    """modelopt, torch/quantization/qtensor/nvfp4_tensor.py, in float64: the product of all three, rounded once."""
    one = ALL["nvfp4"]
    scale = one.tensors["weight_scale"].double() * one.tensors["weight_scale_2"].double()
    theirs = (e2m1(one.tensors["weight"]) * scale.repeat_interleave(16, 1)).float()
    assert_same_bits(dequantize(one.coded()), theirs)


# --- quark -------------------------------------------------------------------------------------------------


def quark_codes(spec: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """quark, torch/utils/pack.py: `unpack` of the integer packers, before they transpose."""
    dtype, bits = spec["dtype"], int(spec["dtype"][-1])
    if bits == 4:
        codes = (tensor.unsqueeze(-1) >> torch.arange(0, 32, 4)).flatten(-2) & 15
        if spec.get("pack_method", "reorder") == "reorder":
            codes = codes.unflatten(-1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(-2)
    elif bits == 3:
        byte = tensor.unflatten(-1, (-1, 3)).int()
        word = byte[..., 0] | byte[..., 1] << 8 | byte[..., 2] << 16
        codes = torch.stack([(word >> (3 * i)) & 7 for i in range(8)], -1).flatten(-2)
    else:
        return tensor.int()
    return torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if dtype.startswith("int") else codes


def small_float(codes: torch.Tensor, exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """Values of sign-magnitude codes, from the definition."""
    sign = 1 - 2.0 * (codes >> (exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (codes & (2**mantissa_bits - 1)) / 2.0**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    normal = (1 + fraction) * 2.0 ** (exponent - bias).double()
    return sign * torch.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def quark_values(spec: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """quark's fp4, fp6 (three bytes, four codes) and fp8 values in float64."""
    dtype = spec["dtype"]
    if dtype == "fp4":
        return e2m1(tensor)
    if dtype.startswith("fp8"):
        return tensor.double()
    low, middle, high = tensor.unflatten(-1, (-1, 3)).int().unbind(-1)
    values = (low & 63, ((middle & 15) << 2) + (low >> 6), ((high & 3) << 4) + (middle >> 4), high >> 2)
    return small_float(torch.stack(values, -1).flatten(-2), int(dtype[-3]), int(dtype[-1]))


def quark_embedded(spec: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """quark's Pack_mxfp4 and Pack_mxfp6: a signed exponent before every 32 codes."""
    is_fp4 = spec["mx_element_dtype"] == "fp4"
    blocks = tensor.reshape(N, K // 32, 17 if is_fp4 else 25)
    scale = 2.0 ** blocks[..., :1].contiguous().view(torch.int8).double()
    payload = blocks[..., 1:]
    if is_fp4:
        return (e2m1(payload) * scale).reshape(N, K)
    triples = payload.reshape(N, K // 32, 8, 3)
    upper = torch.stack([(triples[..., 0] >> s) & 3 for s in (6, 4, 2, 0)], -1).reshape(N, K // 32, 32)
    lower = torch.stack([(triples[..., 1:] >> s) & 15 for s in (4, 0)], -1).reshape(N, K // 32, 32)
    values = small_float((upper << 4 | lower).int(), 2, 3)
    return (values * scale).reshape(N, K)


def quark_scale(spec: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
    if spec.get("scale_format") == "e8m0":
        return 2.0 ** (scale.double() - 127)
    if spec.get("scale_format") == "e5m3":
        return small_float(scale.int() & 255, 5, 3).abs()
    return scale.double()


@pytest.mark.parametrize("name", QUARK)
def test_quark(name: str) -> None:
    spec, one = QUARK[name], ALL[f"quark-{name}"]
    ours = dequantize(one.coded())
    if spec["dtype"] == "mx":
        assert_same_bits(ours, quark_embedded(spec, one.tensors["weight"]).float())
        return
    is_integer = "int" in spec["dtype"]
    weight = quark_codes(spec, one.tensors["weight"]) if is_integer else quark_values(spec, one.tensors["weight"])
    if is_integer and spec["qscheme"] == "per_group":
        weight = weight.t()

    def spread(values: torch.Tensor) -> torch.Tensor:
        """A value per weight."""
        if spec["qscheme"] == "per_group":
            values = values.t() if is_integer and spec["dtype"] != "int3" else values
            return values.repeat_interleave(spec["group_size"], 1)
        if spec["qscheme"] == "per_block":
            rows, columns = spec["block_size"]
            return values.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return values.reshape(-1, 1)

    if spec["dtype"] == "int3" and spec["qscheme"] == "per_group":
        weight = weight.t()  # the only integers that are not transposed
    first, second = "weight_scale", "weight_scale_2"
    if spec.get("scale_stage") == 0:
        first, second = second, first
    if "weight_zero_point" in one.tensors:
        stored = one.tensors["weight_zero_point"]
        zero = quark_codes({**spec, "pack_method": "order"}, stored)[:1] if spec["qscheme"] == "per_tensor" else None
        zero = quark_codes(spec, stored) if zero is None else zero
        weight = weight - spread(zero)
    theirs = (weight.double() * spread(quark_scale(spec, one.tensors[first]))).float()
    if second in one.tensors:
        theirs = theirs * one.tensors[second]
    assert_same_values(ours, theirs)


# --- bitsandbytes ------------------------------------------------------------------------------------------


def bitsandbytes_case(kind: str, nested: bool, dtype: torch.dtype) -> tuple[Case, Any, torch.Tensor]:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(N, K, generator=Draw(0).generator).to(dtype)
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    options = (("quant_type", kind),)
    return (Case(f"bnb-{kind}", SourceFormat(f"bitsandbytes {kind}", "bnb4", options=options), tensors), state, packed)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitsandbytes(kind: str, nested: bool, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    one, state, packed = bitsandbytes_case(kind, nested, dtype)
    ours = one.matrix().values()
    state.dtype = torch.float32
    assert_same_bits(ours, functional.dequantize_4bit(packed, state))
    absmax = state.absmax
    if nested:
        absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).flatten().long()
    theirs = (state.code[codes].view(-1, state.blocksize) * absmax.float().view(-1, 1)).view(N, K)
    assert_same_values(ours, theirs)
