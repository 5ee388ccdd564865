"""NVIDIA's fp4, which the methods `modelopt`, `compressed-tensors` and `fp8` declare: the encoding nvfp4.

Legend: N output rows, K input columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hqconv.formats.encoding import (
    ONE,
    Encoding,
    Headers,
    Names,
    Parts,
    Shape,
    StoredTensor,
    coded_matrix,
    register_encoding,
    require_multiples,
    scale_grid,
)
from hqconv.formats.source_format import SourceFormat
from hqconv.schemas.tensors import TensorSpec

if TYPE_CHECKING:
    from hqconv.quantization.coded_matrix import CodedMatrix


def nvfp4_format(name: str, group_size: int) -> SourceFormat:
    """Return NVIDIA's fp4 under a name: an e4m3 scale per group and one scale for the matrix."""
    return SourceFormat(name, "nvfp4", "float4e2m1", "float8e4m3", 1, group_size, scale_2="tensor")


@register_encoding
class Nvfp4(Encoding):
    """fp4 codes [N, K / 2] with e4m3 scales [N, G] of 16 columns (ModelOpt's W4A8: 32) and one float32 second scale.

    Option scale_2: "multiplies" (modelopt, weight_scale_2) or "divides" (compressed-tensors, weight_global_scale:
    scale_2 is its float32 reciprocal).
    """

    name = "nvfp4"
    weight_names = ("weight", "weight_packed")
    part_names = ("weight_scale", "weight_scale_2", "weight_global_scale")
    b_dtype = "float4e2m1"
    byte_scale_dtype = "float8e4m3"  # some writers store them as bytes

    def stored_tensors(self, fmt: SourceFormat, headers: Headers, n: int, k: int) -> list[StoredTensor]:
        """List the codes and both scales."""
        require_multiples(headers, [("columns", k, fmt.group_k)])
        return [
            StoredTensor("weight", self.weight_names, ("U8",), ((n, k // 2),)),
            StoredTensor("scale", ("weight_scale",), ("F8_E4M3", "U8"), ((n, k // fmt.group_k),)),
            StoredTensor("scale_2", ("weight_scale_2", "weight_global_scale"), ("F32",), ONE),
        ]

    def complete(self, fmt: SourceFormat, found: Headers, used: Mapping[str, str], k: int) -> SourceFormat:
        """Set by its name if the second scale multiplies or divides."""
        scale_2 = "divides" if used["scale_2"] == "weight_global_scale" else "multiplies"
        options = {**dict(fmt.options), "scale_2": scale_2}
        fmt = replace(fmt, scale_2="tensor", options=tuple(options.items()))
        return super().complete(fmt, found, used, k)

    def logical_shape(self, fmt: SourceFormat, headers: Headers, weight: TensorSpec) -> Shape | None:
        """Return (N, K): two codes a byte."""
        return weight.shape[0], weight.shape[1] * 2

    def decode(self, fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
        """Keep the codes and scales; invert a second scale that divides."""
        import torch

        from hqconv.quantization import bit_codec
        from hqconv.quantization.coded_matrix import refuse
        from hqconv.quantization.deferred_checks import is_any

        scale = parts["scale"].contiguous().view(torch.float8_e4m3fn)
        second = parts["scale_2"].reshape(1).float()
        if is_any(~(second.isfinite() & (second > 0))):
            name = names.get("scale_2", "")
            refuse("A global scale is not usable.", name, "a positive number", second.item())
        if fmt.option("scale_2") == "divides":
            second = second.reciprocal()
        packed = bit_codec.as_words(parts["weight"].reshape(shape[0], -1))
        return coded_matrix(fmt, packed, scale_grid(scale, fmt, shape), names, scale_2=second)
