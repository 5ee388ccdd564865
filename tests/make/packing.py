"""One matrix in every source format, by a writer that shares no code with hqconv: plain torch and numpy.

Codes and scales are drawn, not quantized from anything, and packed as the publishers pack them. What they mean is
kept beside them: w = ((code - zero) * scale) * scale_2. Legend: N rows, K columns, G groups along K, b bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

Parts = dict[str, torch.Tensor]


@dataclass
class Stored:
    """One matrix: its tensors by part name, and its codes less zero points and scales, float64 [N, K]."""

    parts: Parts
    codes: torch.Tensor
    scale: torch.Tensor
    scale_2: float | None = None
    bias: torch.Tensor | None = field(default=None)

    def values(self) -> torch.Tensor:
        """float32 [N, K]: each product is exact in float64, and rounded once."""
        values = (self.codes * self.scale).float()
        return values if self.scale_2 is None else (values.double() * self.scale_2).float()


class Draw:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """low … high - 1, int64."""
        return torch.randint(low, high, shape, generator=self.generator)

    def scales(self, *shape: int, base: float = 1e-4) -> torch.Tensor:
        """float32 around `base` over two octaves, with random mantissas."""
        return base * 2.0 ** (2 * torch.rand(shape, generator=self.generator) - 1)

    def exponents(self, *shape: int, low: int = -12, high: int = -6) -> torch.Tensor:
        """e8m0 bytes of 2**low … 2**(high - 1)."""
        return (self.integers(low, high, *shape) + 127).to(torch.uint8)

    def fp8(self, n: int, k: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        """Normal codes that reach the dtype's limits, with some of the smallest ones and both zeros."""
        codes: torch.Tensor = (self.normal(n, k) * 100).clamp(-448, 448).to(dtype)
        codes[0, :4] = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9)]).to(dtype)
        codes[-1, :2] = torch.tensor([0.0, -0.0]).to(dtype)
        return codes

    def codes(self, n: int, k: int, bits: int) -> torch.Tensor:
        """Offset binary codes int64 in 0 … 2**bits - 1, normal about the midpoint, both ends among them."""
        middle = 2 ** (bits - 1)
        codes: torch.Tensor = (
            (self.normal(n, k) * middle / 3 + middle).round().clamp(0, 2 * middle - 1).long()
        )
        codes[0, :2] = torch.tensor([0, 2 * middle - 1])
        return codes

    def zeros(self, n: int, groups: int, bits: int) -> torch.Tensor:
        """Zero points int64 [N, G] about the midpoint, 1 … 2**bits - 1."""
        middle, spread = 2 ** (bits - 1), max(1, 2 ** (bits - 3))
        return self.integers(middle - spread, middle + spread + 1, n, groups).clamp(1, 2**bits - 1)


Encoder = Callable[[Draw, int, int, torch.Tensor], Stored]
"""(random numbers, N, K, the matrix's tensor-level scale float32 []) to a matrix."""


def spread(values: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """One value a weight, float64 [N, K], of a grid whose blocks are equal but for ragged ends, by powers of two."""
    rows, columns = values.shape
    height, width = (
        size if count == 1 else 2 ** math.ceil(math.log2(size / count))
        for size, count in ((n, rows), (k, columns))
    )
    grown = values.double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return grown[:n, :k]


def little_endian(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C * bits / 32]: each row's codes one after the other, lowest bit first."""
    flat = codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return torch.from_numpy(
        np.packbits(flat.reshape(len(codes), -1), axis=1, bitorder="little")
    ).view(torch.int32)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / 2], low nibble first."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])


def small_float(codes: torch.Tensor, exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """float64 values of sign-magnitude codes."""
    sign = 1.0 - 2.0 * (codes >> (exponent_bits + mantissa_bits)).double()
    exponent = (codes >> mantissa_bits & (2**exponent_bits - 1)).double()
    fraction = (codes & (2**mantissa_bits - 1)).double() / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return sign * torch.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """float64 values of e8m0 bytes."""
    return 2.0 ** (exponents.double() - 127)


# --- small floats ------------------------------------------------------------------------------------------


def fp8(
    part: str = "weight_scale",
    block: tuple[int, int] = (1, 0),
    dtype: torch.dtype = torch.float32,
    codes: torch.dtype = torch.float8_e4m3fn,
    shape: tuple[int, ...] | None = None,
    are_powers: bool = False,
) -> Encoder:
    """fp8 with a scale per block of rows × columns (0: all); `shape` (with -1) is how it is stored.

    A dtype of uint8 or float8_e8m0fnu stores exponents; `are_powers` draws powers of two in another dtype.
    """

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        weight = draw.fp8(n, k, codes)
        rows, columns = (
            -(-size // one) if one else 1 for size, one in zip((n, k), block, strict=True)
        )
        if dtype.itemsize == 1 or are_powers:
            exponents = draw.exponents(rows, columns, low=-16, high=-11)
            scale = exponents.view(dtype) if dtype.itemsize == 1 else powers(exponents).to(dtype)
            values = powers(exponents)
        else:
            drawn = second.reshape(1, 1) if block == (0, 0) else draw.scales(rows, columns)
            scale = drawn.to(dtype)
            values = scale.double()
        stored = scale if shape is None else scale.reshape(shape)
        return Stored({"weight": weight, part: stored}, weight.double(), spread(values, n, k))

    return encode


def mxfp4(weight: str = "weight", scale: str = "weight_scale") -> Encoder:
    """fp4 with a power of two per 32 columns, as bytes."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, exponents = draw.integers(0, 16, n, k), draw.exponents(n, k // 32)
        exponents[0, 0], exponents[-1, -1] = 127 - 12, 127 - 7
        parts = {weight: nibbles(codes), scale: exponents}
        return Stored(parts, E2M1[codes], spread(powers(exponents), n, k))

    return encode


def as_dtypes(encode: Encoder, **dtypes: torch.dtype) -> Encoder:
    """The same bytes under other dtypes."""

    def encoded(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        stored = encode(draw, n, k, second)
        stored.parts |= {part: stored.parts[part].view(dtype) for part, dtype in dtypes.items()}
        return stored

    return encoded


def renamed(encode: Encoder, **names: str) -> Encoder:
    """The same tensors, some under other names."""

    def encoded(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        stored = encode(draw, n, k, second)
        stored.parts = {names.get(part, part): tensor for part, tensor in stored.parts.items()}
        return stored

    return encoded


def mxfp8(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """fp8 with a power of two per 32 columns."""
    weight, exponents = draw.fp8(n, k), draw.exponents(n, k // 32, low=-16, high=-11)
    parts = {"weight": weight, "weight_scale": exponents}
    return Stored(parts, weight.double(), spread(powers(exponents), n, k))


def nvfp4(weight: str = "weight", divides: bool = False) -> Encoder:
    """fp4 with an e4m3 scale per 16 columns and a scale of the matrix, which multiplies or divides."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes = draw.integers(0, 16, n, k)
        scale = draw.scales(n, k // 16, base=150).clamp(max=448).to(torch.float8_e4m3fn)
        if divides:
            name, kept = "weight_global_scale", (1 / second.double()).float().reshape(1)
            factor = float((1 / kept.double()).float())
            unused = {"input_global_scale": torch.full((1,), 0.5)}
        else:
            name, kept, factor = "weight_scale_2", second.clone(), float(second)
            unused = {"input_scale": torch.tensor(0.5)}
        parts = {weight: nibbles(codes), "weight_scale": scale, name: kept, **unused}
        return Stored(parts, E2M1[codes], spread(scale, n, k), factor)

    return encode


# --- integers ----------------------------------------------------------------------------------------------


def _integers(
    draw: Draw, n: int, k: int, bits: int, size: int, dtype: torch.dtype, asymmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales [N, G] in `dtype` and zero points [N, G]."""
    groups = k // size if size else 1
    scale = draw.scales(n, groups, base=0.1 / 2**bits).to(dtype)
    zero = draw.zeros(n, groups, bits) if asymmetric else torch.full((n, groups), 2 ** (bits - 1))
    return draw.codes(n, k, bits), scale, zero


def pack_quantized(
    bits: int,
    size: int,
    asymmetric: bool = False,
    is_ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Encoder:
    """compressed-tensors: words along K, zero points along N, scales [N, G] of a dtype; g_idx if `is_ordered`."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale, zero = _integers(draw, n, k, bits, size, dtype, asymmetric)
        parts = {
            "weight_packed": little_endian(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if asymmetric:
            parts["weight_zero_point"] = little_endian(zero.t(), bits).t().contiguous()
        index = torch.arange(k) // (size or k)
        if is_ordered:
            index = index[torch.randperm(k, generator=draw.generator)]
            parts["weight_g_idx"] = index.to(torch.int32)
        return Stored(parts, (codes - zero[:, index]).double(), scale.double()[:, index])

    return encode


def int8(
    asymmetric: bool = False, per_tensor: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Encoder:
    """Plain int8 with a scale of a dtype per row, or a float32 one for all."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale, zero = _integers(draw, n, k, 8, 0, dtype, asymmetric)
        scale = second.reshape(1, 1) if per_tensor else scale
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        if asymmetric:
            parts["weight_zero_point"] = (zero - 128).to(torch.int8)
        return Stored(parts, (codes - spread(zero, n, k)).double(), spread(scale, n, k))

    return encode


def ascend_int8(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """msmodelslim's int8: float32 scales and offsets [N, 1], all offsets zero."""
    stored = int8(dtype=torch.float32)(draw, n, k, second)
    stored.parts["weight_offset"] = torch.zeros(n, 1)
    return stored


def gptq(
    bits: int, size: int, asymmetric: bool = False, offset: int = 1, ordered: bool = False
) -> Encoder:
    """GPTQ: qweight packed along K, qzeros along N with zero points less `offset`, float16 scales [G, N]."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale, zero = _integers(draw, n, k, bits, size, torch.float16, asymmetric)
        index = torch.arange(k) // (size or k)
        if ordered:
            index = index[torch.randperm(k, generator=draw.generator)]
        parts = {
            "qweight": little_endian(codes.t().contiguous().t(), bits).t().contiguous(),
            "qzeros": little_endian((zero.t() - offset) % 2**bits, bits),
            "scales": scale.t().contiguous(),
            "g_idx": index.to(torch.int32),
        }
        return Stored(parts, (codes - zero[:, index]).double(), scale.double()[:, index])

    return encode


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of_eight(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [R, C / 8]: nibble j of a word is its code order[j]."""
    eights = codes.reshape(len(codes), -1, 8)[..., list(order)].numpy().astype(np.uint32)
    packed = (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return torch.from_numpy(packed.view(np.int32))


def awq(size: int, asymmetric: bool = True) -> Encoder:
    """AWQ's gemm layout: qweight [K, N / 8], qzeros [G, N / 8], float16 scales [G, N]."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale, zero = _integers(draw, n, k, 4, size, torch.float16, asymmetric)
        parts = {
            "qweight": words_of_eight(codes.t(), AWQ_ORDER),
            "qzeros": words_of_eight(zero.t(), AWQ_ORDER),
            "scales": scale.t().contiguous(),
        }
        return Stored(parts, (codes - spread(zero, n, k)).double(), spread(scale, n, k))

    return encode


def bitnet(inverted: bool = True) -> Encoder:
    """BitNet: -1, 0, 1 as 0, 1, 2, a byte for the rows i * N / 4 + r; the stored scale divides or multiplies."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes = draw.integers(0, 3, n, k)
        quarters = codes.reshape(4, n // 4, k)
        packed = sum(quarters[i] << 2 * i for i in range(4))
        assert isinstance(packed, torch.Tensor)
        scale = (1 / (second * 300) if inverted else second * 300).bfloat16().reshape(1)
        factor = (1 / scale.double()).float() if inverted else scale.float()
        parts = {"weight": packed.to(torch.uint8), "weight_scale": scale}
        return Stored(parts, (codes - 1).double(), factor.double().expand(n, k))

    return encode
