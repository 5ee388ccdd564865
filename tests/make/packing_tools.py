"""One matrix as Quark, Humming and bitsandbytes store it; the last by the package itself. As `packing`."""

from __future__ import annotations

import numpy as np
import torch

from tests.make.packing import (
    AWQ_ORDER,
    E2M1,
    Draw,
    Encoder,
    Stored,
    fp8,
    little_endian,
    nibbles,
    nvfp4,
    powers,
    small_float,
    spread,
    words_of_eight,
)

PLAIN_ORDER = tuple(range(8))

# --- Quark -------------------------------------------------------------------------------------------------


def quark_int4(
    size: int, asymmetric: bool = False, reorder: bool = True, is_signed: bool = True
) -> Encoder:
    """Groups of columns: everything transposed, eight codes of a column to a word; intN as two's complement."""
    order = AWQ_ORDER if reorder else PLAIN_ORDER

    def stored(codes: torch.Tensor) -> torch.Tensor:
        return words_of_eight(codes.t() ^ 8 if is_signed else codes.t(), order)

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale = draw.codes(n, k, 4), draw.scales(n, k // size, base=0.006).bfloat16()
        zero = draw.zeros(n, k // size, 4) if asymmetric else torch.full((n, k // size), 8)
        parts = {"weight": stored(codes), "weight_scale": scale.t().contiguous()}
        if asymmetric:
            parts["weight_zero_point"] = stored(zero)
        return Stored(parts, (codes - spread(zero, n, k)).double(), spread(scale, n, k))

    return encode


def quark_int8(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """A float32 scale a row."""
    codes, scale = draw.codes(n, k, 8) - 128, draw.scales(n, base=4e-4)
    parts = {"weight": codes.to(torch.int8), "weight_scale": scale}
    return Stored(parts, codes.double(), spread(scale.reshape(n, 1), n, k))


def quark_int4_fp8(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """int4 per row inside of fp8 per tensor: the first scale is `weight_scale_2`, the second `weight_scale`."""
    codes, scale = draw.codes(n, k, 4), draw.scales(n, base=20.0)
    parts = {
        "weight": words_of_eight(codes ^ 8, AWQ_ORDER),
        "weight_scale_2": scale,
        "weight_scale": second.clone(),
    }
    return Stored(parts, (codes - 8).double(), spread(scale.reshape(n, 1), n, k), float(second))


def quark_fp4(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """mxfp4."""
    codes, exponents = draw.integers(0, 16, n, k), draw.exponents(n, k // 32)
    return Stored(
        {"weight": nibbles(codes), "weight_scale": exponents},
        E2M1[codes],
        spread(powers(exponents), n, k),
    )


def quark_gpt_oss(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """mxfp4 with a bias and a scale of the activations."""
    stored = quark_fp4(draw, n, k, second)
    stored.bias = (draw.normal(n) * 0.1).bfloat16()
    stored.parts |= {"bias": stored.bias, "input_scale": torch.tensor(0.5)}
    return stored


def quark_fp4_fp8(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """fp4 in groups of 16 whose scales are fp8 under a scale of the matrix."""
    stored = nvfp4()(draw, n, k, second)
    del stored.parts["input_scale"]
    return stored


def quark_fp6(exponent_bits: int) -> Encoder:
    """mxfp6: four codes in three bytes."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, exponents = draw.integers(0, 64, n, k), draw.exponents(n, k // 32)
        parts = {"weight": little_endian(codes, 6).view(torch.uint8), "weight_scale": exponents}
        values = small_float(codes, exponent_bits, 5 - exponent_bits)
        return Stored(parts, values, spread(powers(exponents), n, k))

    return encode


def quark_embedded_fp4(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """Quark's old mx blocks: a signed exponent before the 16 bytes of each 32 codes."""
    codes, exponents = draw.integers(0, 16, n, k), draw.exponents(n, k // 32)
    lead = (exponents.to(torch.int16) - 127).to(torch.int8).view(torch.uint8)
    layers = torch.cat([lead.unsqueeze(-1), nibbles(codes).reshape(n, k // 32, 16)], -1)
    return Stored({"weight": layers.reshape(n, -1)}, E2M1[codes], spread(powers(exponents), n, k))


# --- Humming -----------------------------------------------------------------------------------------------


def humming_int4(size: int, zero_kind: str = "none") -> Encoder:
    """Words along K, bfloat16 scales; zero points packed along N, or floats."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale = draw.codes(n, k, 4), draw.scales(n, k // size, base=0.006).bfloat16()
        zero = draw.zeros(n, k // size, 4).double()
        parts = {"weight": little_endian(codes, 4), "weight_scale": scale}
        if zero_kind == "none":
            zero[:] = 8
        elif zero_kind == "integer":
            parts["zero_point"] = little_endian(zero.long().t(), 4).t().contiguous()
        else:
            parts["zero_point"] = (zero + draw.normal(*zero.shape)).bfloat16()
            zero = parts["zero_point"].double()
        return Stored(parts, codes - spread(zero, n, k), spread(scale, n, k))

    return encode


def humming_nvfp4(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """fp4, e4m3 scales and one of the matrix."""
    stored = quark_fp4_fp8(draw, n, k, second)
    weight = stored.parts["weight"].view(torch.int32)
    stored.parts |= {"weight": weight, "weight_scale_2": second.reshape(1)}
    return stored


def humming_mxfp4(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """fp4, e8m0 scales."""
    stored = quark_fp4(draw, n, k, second)
    exponents = stored.parts["weight_scale"].view(torch.float8_e8m0fnu)
    stored.parts |= {"weight": stored.parts["weight"].view(torch.int32), "weight_scale": exponents}
    return stored


def humming_fp8_block(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """fp8 four to a word, float32 scales of 128 × 128."""
    stored = fp8(block=(128, 128))(draw, n, k, second)
    stored.parts["weight"] = stored.parts["weight"].view(torch.int32)
    return stored


# --- bitsandbytes ------------------------------------------------------------------------------------------


def bitsandbytes_4bit(kind: str, nested: bool) -> Encoder:
    """What the package makes of a bfloat16 matrix, named as transformers saves it; scales of 64 values in a row.

    `nested`: the scales are coded in 8 bits themselves, in blocks of 256 about their mean.
    """

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        import bitsandbytes.functional as functional

        weight = (draw.normal(n, k) * 0.03).bfloat16()
        packed, state = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested
        )
        if (
            kind == "fp4"
        ):  # two of its codes are zero: the processor would decide about the tie, numpy takes the first
            scaled = weight.float().reshape(-1, 64) / state.absmax.reshape(-1, 1)
            nearest = (
                np.abs(scaled.numpy()[..., None] - state.code.numpy())
                .argmin(-1)
                .astype(np.uint8)
                .reshape(-1, 2)
            )
            packed = torch.from_numpy(nearest[:, 0] << 4 | nearest[:, 1]).reshape(packed.shape)
        named = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        scale = named["weight.absmax"]
        if nested:
            table, outer = named["weight.nested_quant_map"], named["weight.nested_absmax"]
            factor = outer.double().repeat_interleave(256)[: scale.numel()]
            scale = (table[scale.long()].double() * factor).float() + state.offset.float()
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).flatten().long()
        values = named["weight.quant_map"].double()[codes].reshape(n, k)
        spread_out = scale.double().repeat_interleave(64).reshape(n, k)
        return Stored({"weight": packed, **named}, values, spread_out)

    return encode
