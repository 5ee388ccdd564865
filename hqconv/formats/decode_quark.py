"""Decoder of AMD's Quark, whose config says how codes and scales lie: see `hqconv.formats.quark`.

Legend: N output rows, K input columns, G groups along K. Parts are one matrix's tensors by canonical name.
"""

from __future__ import annotations

import torch

from hqconv.formats.decode_floats import Names, Parts, Shape, as_e8m0, grid
from hqconv.formats.source_format import SourceFormat
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, checked, refuse
from hqconv.quantization.deferred_checks import is_any
from hqconv.quantization.int4_packing import AWQ_ORDER, PLAIN_ORDER, reordered_nibbles, transpose_4bit
from hqconv.schemas.dtypes import code_bits


def decode_quark(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """Quark: integers (two's complement for intN) per tensor, channel or group; fp4, fp6, fp8; embedded mx blocks.

    Integers per group lie transposed, [K, N] with codes packed along N. Source: quark, torch/utils/pack.py.
    """
    if fmt.option("dtype") == "mx":
        return _decode_embedded(fmt, parts["weight"], shape, names)
    scale = _quark_scale(fmt, parts["scale"], shape, names)
    zero_point = None
    if fmt.b_dtype.startswith("uint"):
        packed = _quark_integers(fmt, parts["weight"])
        if fmt.has_zero_point:
            zero_point = _quark_zero_point(fmt, parts["zero_point"], shape)
    else:
        packed = bit_codec.as_words(parts["weight"].reshape(shape[0], -1))
    scale_2 = parts["scale_2"].float().reshape(-1) if "scale_2" in parts else None
    coded = CodedMatrix(
        fmt.b_dtype, packed, scale, fmt.group_n, fmt.group_k, zero_point=zero_point, scale_2=scale_2
    )
    return checked(coded, names)


def _quark_scale(fmt: SourceFormat, scale: torch.Tensor, shape: Shape, names: Names) -> torch.Tensor:
    if fmt.scale_dtype == "float8e8m0":
        scale = as_e8m0(scale, names.get("scale", ""))
    if fmt.option("is_transposed"):
        bits = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        scale = bits.t().contiguous().view(scale.dtype)
    return grid(scale, fmt, shape)


def _flip(fmt: SourceFormat, bits: int) -> int:
    """What turns stored codes into offset binary: intN is two's complement, uintN is as it is."""
    return 1 << (bits - 1) if str(fmt.option("dtype")).startswith("int") else 0


def _quark_integers(fmt: SourceFormat, weight: torch.Tensor) -> torch.Tensor:
    """int32 [N, K * bits / 32] of Quark's integers."""
    bits = code_bits(fmt.b_dtype)
    flip = _flip(fmt, bits)
    order = AWQ_ORDER if fmt.option("pack_method", "reorder") == "reorder" else PLAIN_ORDER
    transposed = fmt.option("is_transposed")
    if bits == 4 and transposed:
        return transpose_4bit(weight, order, flip)
    if bits == 4:
        codes = reordered_nibbles(weight, order)
    elif bits == 3:
        codes = bit_codec.unpack(bit_codec.as_words(weight), 3)
    else:  # one code an element: int2 in int32, int8 and uint8
        codes = (weight & (2**bits - 1)).to(torch.uint8) if bits == 2 else weight.view(torch.uint8)
    if transposed:
        codes = codes.t()
    return bit_codec.pack(codes.contiguous() ^ flip, bits)


def _quark_zero_point(fmt: SourceFormat, stored: torch.Tensor, shape: Shape) -> torch.Tensor:
    """uint8 [N, G] of Quark's zero points, packed as the weights are but for a lone one."""
    bits = code_bits(fmt.b_dtype)
    if bits == 4 and fmt.group_n != 0:
        order = AWQ_ORDER if fmt.option("pack_method", "reorder") == "reorder" else PLAIN_ORDER
        rows = stored if stored.ndim == 2 else stored.reshape(1, -1)
        codes = reordered_nibbles(rows, order)
    else:
        codes = (stored.to(torch.int32) & (2**bits - 1)).to(torch.uint8)
    codes = codes ^ _flip(fmt, bits)
    if fmt.option("is_transposed"):
        return codes[:, : shape[0]].t().contiguous()
    if fmt.group_n == 0:
        return codes.reshape(1, 1).expand(shape[0], 1).contiguous()
    return codes.reshape(-1)[: shape[0]].reshape(-1, 1).contiguous()


def _decode_embedded(fmt: SourceFormat, weight: torch.Tensor, shape: Shape, names: Names) -> CodedMatrix:
    """Quark's old mx blocks: each 32 codes follow their exponent byte, a signed power of two.

    mxfp6 keeps the upper two bits of eight codes apart from their lower four. Source: Pack_mxfp4, Pack_mxfp6.
    """
    bits = 6 if "6" in fmt.b_dtype else 4
    blocks = weight.reshape(shape[0], -1, 1 + bits * 4)
    exponent = blocks[..., 0].contiguous().view(torch.int8).to(torch.int16) + 127
    if is_any(exponent < 0):
        refuse(
            "A scale is out of range.",
            names.get("weight", ""),
            "exponents from -127",
            int(exponent.min()) - 127,
        )
    scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    payload = blocks[..., 1:].contiguous()
    if bits == 4:
        packed = bit_codec.as_words(payload.flatten(1))
    else:
        triples = payload.reshape(shape[0], -1, 3)
        shifts = torch.tensor([6, 4, 2, 0], dtype=torch.uint8, device=weight.device)
        upper = (triples[..., :1] >> shifts) & 3
        lower = torch.stack([triples[..., 1:] >> 4, triples[..., 1:] & 15], dim=-1).flatten(2)
        packed = bit_codec.pack(((upper << 4) | lower).flatten(1), 6)
    return checked(
        CodedMatrix(fmt.b_dtype, packed, scale, 1, 32), {**names, "scale": names.get("weight", "")}
    )
