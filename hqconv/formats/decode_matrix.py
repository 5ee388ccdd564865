"""One projection of one expert as its source means it: codes and scales where the format has codes, floats elsewhere.

One function a format, in `DECODERS`; each takes the completed format, the parts by canonical name, (N, K), and the
tensors' names for messages, and raises InputError about values that no such format can have. CPU or CUDA, the same
bits. Formats of `FLOAT_DECODERS` have no codes that Humming could run; they give float32 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hqconv.formats.decode_bitsandbytes import decode_bitsandbytes
from hqconv.formats.decode_floats import Names, Parts, Shape, decode_fp8, decode_mx, decode_nvfp4
from hqconv.formats.decode_humming import decode_humming
from hqconv.formats.decode_integers import (
    decode_awq,
    decode_bitnet,
    decode_gptq,
    decode_int8,
    decode_packed_int,
)
from hqconv.formats.decode_quark import decode_quark
from hqconv.formats.source_format import SourceFormat
from hqconv.quantization.coded_matrix import CodedMatrix, dequantize

DECODERS: dict[str, Callable[[SourceFormat, Parts, Shape, Names], CodedMatrix]] = {
    "fp8": decode_fp8,
    "mxfp4": decode_mx,
    "mxfp8": decode_mx,
    "nvfp4": decode_nvfp4,
    "packed_int": decode_packed_int,
    "int8": decode_int8,
    "gptq": decode_gptq,
    "awq": decode_awq,
    "bitnet": decode_bitnet,
    "quark": decode_quark,
    "humming": decode_humming,
}
FLOAT_DECODERS: dict[str, Callable[[SourceFormat, Parts, Shape, Names], torch.Tensor]] = {
    "bnb4": decode_bitsandbytes,
}


@dataclass(frozen=True, eq=False)
class SourceMatrix:
    """One projection of one expert [out, in], decoded: either `coded` or `floats` is there.

    floats: in the source's own dtype where it is not quantized, else float32. bias: [out], if there is one.
    names: canonical part → the tensor's name in the source, for messages.
    """

    names: Mapping[str, str]
    coded: CodedMatrix | None = None
    floats: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The weight's name in the source."""
        return self.names["weight"]

    def values(self) -> torch.Tensor:
        """The weights [out, in], in the source's own dtype or decoded to float32; decoded anew by every call."""
        if self.floats is not None:
            return self.floats
        assert self.coded is not None
        return dequantize(self.coded)


def decode_matrix(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> SourceMatrix:
    """One matrix [N, K] out of its parts, values checked. `names`: canonical part → tensor name.

    Raises InputError where a tensor holds what its format cannot, RequestError where a format's library is missing.
    """
    bias = parts.get("bias")
    if fmt.is_float:
        return SourceMatrix(names, floats=parts["weight"], bias=bias)
    if fmt.decoder in FLOAT_DECODERS:
        return SourceMatrix(names, floats=FLOAT_DECODERS[fmt.decoder](fmt, parts, shape, names), bias=bias)
    return SourceMatrix(names, coded=DECODERS[fmt.decoder](fmt, parts, shape, names), bias=bias)
