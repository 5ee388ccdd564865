"""Formats that another method stores too: microscaling of AutoRound and ModelOpt, W4AFP8, GPTQModel's fp8."""

from __future__ import annotations

import torch

from tests.make import configs
from tests.make import packing as pack
from tests.make.packing import Draw, Encoder, Stored
from tests.make.packing_tools import quark_fp6
from tests.make.spec import Table

ROWS = Table()
_CHANNELS = "float32 scales"
_BLOCK = (128, 128)


def divided(encode: Encoder, part: str) -> Encoder:
    """The same codes with a stored scale that divides."""

    def encoded(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        stored = encode(draw, n, k, second)
        stored.parts[part] = (1 / stored.parts[part].double()).float()
        factor = (1 / stored.parts[part].double()).float()
        stored.scale = pack.spread(factor.reshape(factor.shape[0], -1), n, k)
        return stored

    return encoded


def int4_pairs(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """W4AFP8: two's complement in pairs, the first in the low bits, bfloat16 scales of 128 columns, an input scale."""
    codes, scale = draw.codes(n, k, 4) - 8, draw.scales(n, k // 128, base=0.1 / 16).bfloat16()
    pairs = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    parts = {"weight": pairs, "weight_scale_inv": scale, "input_scale": torch.tensor(0.5)}
    return Stored(parts, codes.double(), pack.spread(scale, n, k))


def nvfp4_of_32(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """ModelOpt's W4A8_NVFP4_FP8: an e4m3 scale for 32 columns."""
    codes = draw.integers(0, 16, n, k)
    scale = draw.scales(n, k // 32, base=40).clamp(max=448 / 6).to(torch.float8_e4m3fn)
    parts = {"weight": pack.nibbles(codes), "weight_scale": scale, "weight_scale_2": second.clone()}
    return Stored(parts, pack.E2M1[codes], pack.spread(scale, n, k), float(second))


ROWS.row(
    "fp8-gptqmodel",
    divided(pack.fp8("weight_scale_inv", _BLOCK), "weight_scale_inv"),
    configs.gptqmodel_fp8(weight_scale_method="block", weight_block_size=[128, 128]),
    "`fp8` with `weight_scale_semantics` inverse: the stored scale divides",
    "fp8-block",
)
ROWS.row(
    "w4afp8",
    int4_pairs,
    configs.w4afp8(),
    "`w4afp8`: fp8 dense layers, int4 experts, two codes to a byte",
    "int4",
    dense=pack.fp8("weight_scale_inv", _BLOCK),
)
ROWS.row(
    "modelopt-mxfp4",
    pack.mxfp4(),
    configs.modelopt("W4A8_MXFP4_FP8"),
    "`modelopt`, W4A8_MXFP4_FP8",
    "mxfp4",
)
ROWS.row(
    "modelopt-nvfp4-fp8",
    nvfp4_of_32,
    configs.modelopt("W4A8_NVFP4_FP8", group_size=32),
    "`modelopt`, W4A8_NVFP4_FP8: scales of 32 columns",
    "fp4-g32-e4m3",
)
ROWS.row(
    "modelopt-int8",
    pack.int8(dtype=torch.float32),
    configs.modelopt("W8A16"),
    "`modelopt`, W8A16, F32 scales",
    refused=_CHANNELS,
    rounded="int8",
)
ROWS.row(
    "auto-round-mxfp4",
    pack.mxfp4("weight_packed"),
    configs.auto_round(
        "auto_round:mx_fp", data_type="mx_fp", group_size=32, act_bits=4, act_data_type="mx_fp"
    ),
    "`auto-round`, `data_type` mx_fp, 4 bits",
    "mxfp4",
)
ROWS.row(
    "auto-round-mxfp8",
    pack.mxfp8,
    configs.auto_round("auto_round:mx_fp", data_type="mx_fp", bits=8, group_size=32),
    "`auto-round`, `data_type` mx_fp, 8 bits",
    "mxfp8",
)
ROWS.row(
    "auto-round-nvfp4",
    pack.nvfp4("weight_packed", divides=True),
    configs.auto_round("auto_round:nv_fp", data_type="nv_fp", group_size=16, act_bits=4),
    "`auto-round`, `data_type` nv_fp",
    "nvfp4",
)
ROWS.row(
    "ct-mxfp6",
    pack.renamed(quark_fp6(2), weight="weight_packed"),
    configs.compressed("mxfp6-pack-quantized", 6, "float", "group", group_size=32),
    "`compressed-tensors`, mxfp6-pack-quantized, float6 group g32",
    "source",
)
