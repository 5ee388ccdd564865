"""Decoders of small-float formats: fp8, mxfp4, mxfp8, nvfp4. Codes are kept; scales get their real dtype.

Legend: N output rows, K input columns. Parts are one matrix's tensors by canonical name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hqconv.formats.source_format import SourceFormat
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, checked, refuse
from hqconv.quantization.deferred_checks import is_any

Parts = Mapping[str, torch.Tensor]
Names = Mapping[str, str]
Shape = tuple[int, int]


def grid(scale: torch.Tensor, fmt: SourceFormat, shape: Shape) -> torch.Tensor:
    """A stored scale as [ceil(N / group_n), ceil(K / group_k)]."""
    rows, columns = (
        -(-size // group) if group else 1 for size, group in zip(shape, _groups(fmt), strict=True)
    )
    return scale.reshape(rows, columns)


def _groups(fmt: SourceFormat) -> tuple[int, int]:
    return fmt.group_n, fmt.group_k


def as_e8m0(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Exponent bytes as float8_e8m0fnu; 255 is NaN and refused."""
    exponents = scale.contiguous().view(torch.uint8)
    if is_any(exponents == 255):
        refuse("A scale is NaN.", name, "e8m0 exponents from 0 to 254", "255")
    return exponents.view(torch.float8_e8m0fnu)


def _matrix(fmt: SourceFormat, weight: torch.Tensor, scale: torch.Tensor, shape: Shape) -> CodedMatrix:
    packed = bit_codec.as_words(weight.reshape(shape[0], -1))
    return CodedMatrix(fmt.b_dtype, packed, grid(scale, fmt, shape), fmt.group_n, fmt.group_k)


def decode_fp8(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """fp8 weights [N, K] with a scale per tensor, channel, group or block; `weight_scale_inv` multiplies too.

    A scale in uint8 is an e8m0 exponent. With scale_fmt ue8m0 (DeepSeek-V3.1) a float scale must be a power of two.
    Source: transformers, integrations/finegrained_fp8.py, Fp8Dequantize.
    """
    scale = parts["scale"]
    if scale.dtype == torch.uint8 or scale.dtype == torch.float8_e8m0fnu:
        scale = as_e8m0(scale, names.get("scale", ""))
    elif fmt.option("scale_fmt") == "ue8m0":
        mantissa, _ = torch.frexp(scale.float())
        if is_any(mantissa != 0.5):
            found = scale[mantissa.reshape(scale.shape) != 0.5].flatten()[0].item()
            refuse(
                "A scale is no power of two.", names.get("scale", ""), "ue8m0 scales: powers of two", found
            )
    return checked(_matrix(fmt, parts["weight"], scale, shape), names)


def decode_mx(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """mxfp4 [N, K / 2] (low nibble first), mxfp6 or mxfp8 with e8m0 scales [N, K / 32].

    Source: OCP Microscaling Formats 1.0; transformers, integrations/mxfp4.py, convert_moe_packed_tensors.
    """
    return checked(
        _matrix(fmt, parts["weight"], as_e8m0(parts["scale"], names.get("scale", "")), shape), names
    )


def decode_nvfp4(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """nvfp4 [N, K / 2] with e4m3 scales [N, K / 16] and one float32 second scale.

    Option scale_2: "multiplies" (modelopt, weight_scale_2) or "divides" (compressed-tensors, weight_global_scale:
    scale_2 is its float32 reciprocal).
    """
    scale = parts["scale"].contiguous().view(torch.float8_e4m3fn)
    second = parts["scale_2"].reshape(1).float()
    name = names.get("scale_2", "")
    if is_any(~(second.isfinite() & (second > 0))):
        refuse("A global scale is not usable.", name, "a positive number", second.item())
    if fmt.option("scale_2") == "divides":
        second = second.reciprocal()
    coded = _matrix(fmt, parts["weight"], scale, shape)
    return checked(
        CodedMatrix(coded.b_dtype, coded.packed, coded.scale, coded.group_n, coded.group_k, scale_2=second),
        names,
    )
