"""Decoders against the packages that publish the formats, bit for bit.

Where a package cannot be a dependency of ours, its published formula stands here in its own order of operations.
Integers and e2m1 codes times one scale are exact in float64, so "rounded once" is a float64 product cast down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hqconv.quantization.coded_matrix import dequantize
from tests.make.coded import QUARK, Case, K, N, cases

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


# --- GPTQ and AWQ ------------------------------------------------------------------------------------------


# --- modelopt ----------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


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
