"""One projection of one expert, decoded: codes and scales where the format has codes, floats elsewhere.

The decoding of each format is in its own module, and gives the same bits on the CPU and on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hqconv.formats import registry
from hqconv.formats.encoding import Names, Parts, Shape
from hqconv.formats.source_format import SourceFormat

if TYPE_CHECKING:
    import torch

    from hqconv.quantization.coded_matrix import CodedMatrix


@dataclass(frozen=True, eq=False)
class SourceMatrix:
    """One decoded projection of one expert [out, in]: either `coded` or `floats` is set.

    floats: in the source's own dtype where it is not quantized, else float32. bias: [out], if there is one.
    names: canonical part → the tensor's name in the source, for messages. size: [out, in] without the zeros that fill
    the last scale group of `coded`, if there are any. stored: the size to fill with zeros for a target, see `filled`.
    order: int64 [in], the source's column at each position, where columns were sorted by group.
    """

    names: Mapping[str, str]
    coded: CodedMatrix | None = None
    floats: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    size: Shape | None = None
    stored: Shape | None = None
    order: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The weight's name in the source."""
        return self.names["weight"]

    def values(self) -> torch.Tensor:
        """Return the weights [out, in], in the source's own dtype or decoded to float32; decoded anew by every call."""
        if self.floats is not None:
            values = self.floats
        else:
            assert self.coded is not None
            from hqconv.quantization.coded_matrix import dequantize

            values = dequantize(self.coded)
        if self.size is not None:
            values = values[: self.size[0], : self.size[1]]
        return values if self.stored is None else resized(values, self.stored)

    def filled(self, stored: Shape) -> SourceMatrix:
        """Return the matrix with zeros that fill the last scale groups of a target: `values` and bias of that size."""
        have = self.coded.shape if self.coded is not None else tuple(self.floats.shape)  # type: ignore[union-attr]
        if have == stored and self.size in (None, stored):
            return self
        bias = None if self.bias is None else resized(self.bias, stored[:1])
        return replace(self, stored=stored, bias=bias)


def resized(values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return values whose last dimensions have the given sizes: zeros are appended, or values are cut off."""
    from torch.nn.functional import pad

    have = values.shape[-len(sizes) :]
    ends = [end for old, new in zip(reversed(have), reversed(sizes), strict=True) for end in (0, new - old)]
    return pad(values, ends).contiguous() if any(ends) else values


def decode_matrix(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> SourceMatrix:
    """Decode one matrix [N, K] of its parts, values checked. `names`: canonical part → tensor name.

    Raises InputError where a tensor holds what its format cannot, RequestError where a format's library is missing.
    """
    from hqconv.quantization.coded_matrix import CodedMatrix

    decoded, bias = registry.encoding(fmt.encoding).decode(fmt, parts, shape, names), parts.get("bias")
    if isinstance(decoded, CodedMatrix):
        return SourceMatrix(names, coded=decoded, bias=bias)
    return SourceMatrix(names, floats=decoded, bias=bias)
