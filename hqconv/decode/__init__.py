"""Source formats: one matrix's tensors to codes and scales (`Coded`), to float32, or straight to a target schema.

One function a format, in `DECODERS`; each takes the completed format, the parts by canonical name, (N, K), and the
tensors' names for messages, and raises InputError about values that no such format can have. CPU or CUDA, the same
bits. Formats of `FLOAT_DECODERS` have no codes that Humming could run; they give float32 only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hqconv.decode.bitsandbytes import decode_bitsandbytes
from hqconv.decode.coded import Coded, dequantize
from hqconv.decode.express import express, share_scale
from hqconv.decode.floating import Names, Parts, Shape, decode_fp8, decode_mx, decode_nvfp4
from hqconv.decode.integer import decode_awq, decode_bitnet, decode_gptq, decode_int8, decode_packed_int
from hqconv.decode.schemas import decode_humming, decode_quark
from hqconv.formats.format import SourceFormat

__all__ = [
    "DECODERS",
    "FLOAT_DECODERS",
    "Coded",
    "decode",
    "decode_floats",
    "dequantize",
    "express",
    "share_scale",
]

DECODERS: dict[str, Callable[[SourceFormat, Parts, Shape, Names], Coded]] = {
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


def _widen(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> torch.Tensor:
    return parts["weight"].float().reshape(shape)


FLOAT_DECODERS: dict[str, Callable[[SourceFormat, Parts, Shape, Names], torch.Tensor]] = {
    "float": _widen,
    "bnb4": decode_bitsandbytes,
}


def decode(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> Coded:
    """The codes and scales of one matrix [N, K], values checked. `names`: canonical part -> tensor name.

    Raises InputError where a tensor holds what its format cannot.
    """
    return DECODERS[fmt.decoder](fmt, parts, shape, names)


def decode_floats(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> torch.Tensor:
    """The float32 values [N, K] of one matrix, in any format. Raises InputError as `decode` does.

    Raises RequestError where a format's library is not installed.
    """
    if fmt.decoder in FLOAT_DECODERS:
        return FLOAT_DECODERS[fmt.decoder](fmt, parts, shape, names)
    return dequantize(decode(fmt, parts, shape, names))
