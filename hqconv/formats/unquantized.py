"""Experts that are not quantized: BF16, F16 or F32 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hqconv.formats.encoding import Encoding, Headers, Names, Parts, Shape, StoredTensor
from hqconv.formats.registry import register_encoding
from hqconv.formats.source_format import FLOAT, SourceFormat
from hqconv.schemas.dtypes import FLOATS

if TYPE_CHECKING:
    import torch


@register_encoding
class Unquantized(Encoding):
    """One weight [N, K] in a float dtype."""

    name = FLOAT

    def stored_tensors(self, fmt: SourceFormat, headers: Headers, n: int, k: int) -> list[StoredTensor]:
        """List the weight."""
        return [StoredTensor("weight", ("weight",), FLOATS, ((n, k),))]

    def decode(self, fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> torch.Tensor:
        """Return the weight as it is, in its own dtype."""
        return parts["weight"]
