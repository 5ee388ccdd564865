"""Source formats of small floats: fp8, microscaling, modelopt, and fused stacks of them."""

from __future__ import annotations

import torch

from tests.make import configs, layouts
from tests.make import packing as pack
from tests.make.layouts import Sizes
from tests.make.packing import Draw, Stored
from tests.make.spec import Table


def _gpt_oss(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """mxfp4 in blocks of 32, and a bias."""
    stored = pack.mxfp4()(draw, n, k, second)
    blocks, bias = stored.parts["weight"].reshape(n, k // 32, 16), (draw.normal(n) * 0.1).bfloat16()
    parts = {"blocks": blocks, "scales": stored.parts["weight_scale"], "bias": bias}
    return Stored(parts, stored.codes, stored.scale, bias=bias)


BF16, E8M0, E5M2 = torch.bfloat16, torch.float8_e8m0fnu, torch.float8_e5m2
_BLOCK = (128, 128)
_DEEPSEEK_MXFP4 = pack.as_dtypes(pack.mxfp4(scale="scale"), weight=torch.int8, scale=E8M0)
_CHANNELS = "float32 scales"  # of channels: Humming has them in the parameter dtype only

ROWS = Table()

# --- fp8 ----------------------------------------------------------------------------------------------------

ROWS.row(
    "fp8-block",
    pack.fp8("weight_scale_inv", _BLOCK),
    configs.fp8_blocks(),
    "`fp8` with `weight_block_size`, `weight_scale_inv` in F32",
    "fp8-block",
)
ROWS.row(
    "fp8-block-ue8m0",
    pack.fp8("weight_scale_inv", _BLOCK, are_powers=True),
    configs.fp8_blocks(scale_fmt="ue8m0"),
    "`fp8` with `scale_fmt` ue8m0, powers of two in F32",
    "fp8-block",
    layout=layouts.DEEPSEEK_V3,
)
ROWS.row(
    "fp8-block-e8m0",
    pack.fp8("weight_scale_inv", _BLOCK, E8M0),
    configs.fp8_blocks(scale_fmt="ue8m0"),
    "`fp8` with `weight_block_size`, scales in F8_E8M0",
    "fp8-block",
)
ROWS.row(
    "fp8-block-e8m0-bytes",
    pack.fp8("weight_scale_inv", _BLOCK, torch.uint8),
    configs.fp8_blocks(),
    "`fp8` with `weight_block_size`, e8m0 scales in U8",
    "fp8-block",
)
ROWS.row(
    "fp8-block-ragged",
    pack.fp8("weight_scale_inv", _BLOCK),
    configs.fp8_blocks(),
    "as fp8-block, sizes that are no multiples of 128",
    "source",
    sizes=Sizes(320, 192),
    target="int4-g32",
    tp=3,
)
ROWS.row(
    "fp8-tensor",
    pack.fp8("weight_scale", (0, 0), shape=()),
    configs.fp8(activation_scheme="static"),
    "`fp8` without `weight_block_size`, one `weight_scale`",
    "fp8-block",
)
ROWS.row(
    "fp8-tensor-apart",
    pack.fp8("weight_scale", (0, 0), shape=(1,)),
    configs.fp8(activation_scheme="static"),
    "as fp8-tensor, gate and up with different scales",
    "fp8-block",
    differs=True,
)
ROWS.row(
    "fp8-channel",
    pack.fp8("weight_scale", dtype=BF16),
    configs.fp8(),
    "`fp8` without `weight_block_size`, `weight_scale` [N, 1] in BF16",
    "fp8",
)
ROWS.row(
    "fp8-channel-f32",
    pack.fp8("weight_scale", shape=(-1,)),
    configs.fp8(),
    "as fp8-channel, `weight_scale` [N] in F32",
    refused=_CHANNELS,
    rounded="fp8",
)
ROWS.row(
    "fp8-e5m2",
    pack.fp8("weight_scale", dtype=BF16, codes=E5M2),
    configs.fp8(fmt="e5m2"),
    "`fp8` with `fmt` e5m2",
    "fp8-e5m2",
)
ROWS.row(
    "fbgemm-fp8",
    pack.fp8("weight_scale"),
    configs.fbgemm(),
    "`fbgemm_fp8`, `weight_scale` [N, 1] in F32",
    refused=_CHANNELS,
    rounded="fp8",
)

# --- microscaling and modelopt ------------------------------------------------------------------------------

ROWS.row(
    "mxfp4-deepseek-v4",
    _DEEPSEEK_MXFP4,
    configs.fp8_blocks(scale_fmt="ue8m0", modules_to_not_convert=None),
    "`fp8` with `expert_dtype` fp4 in config.json: fp8 dense layers, fp4 experts",
    "mxfp4",
    layout=layouts.DEEPSEEK_V4,
    dense=pack.fp8("scale", _BLOCK, E8M0),
)
ROWS.row(
    "mxfp4-gpt-oss",
    _gpt_oss,
    {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
    "`mxfp4`, fused `_blocks`, `_scales`, `_bias`",
    "mxfp4",
    layout=layouts.GPT_OSS,
)
ROWS.row(
    "mxfp4-mimo",
    pack.mxfp4(),
    configs.fp8_blocks(
        store_dtype="mxfp4",
        mxfp4_block_size=32,
        routed_experts_quant_method="mxfp4",
        modules_to_not_convert=None,
        ignored_layers=["model.layers.0.self_attn.o_proj", "model.decoder.self_attn.o_proj"],
    ),
    "`fp8` with `routed_experts_quant_method` or `store_dtype` mxfp4: fp8 dense layers, fp4 experts",
    "mxfp4",
    layout=layouts.MIMO_V2,
    dense=pack.fp8("weight_scale_inv", _BLOCK),
)
ROWS.row(
    "mxfp8-minimax",
    pack.renamed(pack.mxfp8, weight_scale="weight_scale_inv"),
    {
        "quantization_config": {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": ["lm_head", "language_model.model.layers.0.block_sparse_moe.gate"],
        }
    },
    "`mxfp8`, e8m0 `weight_scale_inv` in U8",
    "mxfp8",
    layout=layouts.MINIMAX_M3,
)
ROWS.row("modelopt-mxfp8", pack.mxfp8, configs.modelopt("MXFP8"), "`modelopt`, MXFP8", "mxfp8")
ROWS.row(
    "modelopt-nvfp4",
    pack.nvfp4(),
    configs.modelopt("NVFP4", group_size=16),
    "`modelopt`, NVFP4; gate and up share `weight_scale_2`",
    "nvfp4",
)
ROWS.row(
    "modelopt-nvfp4-file",
    pack.nvfp4(),
    configs.hf_quant_config("NVFP4", group_size=16),
    "hf_quant_config.json, NVFP4",
    "nvfp4",
)
ROWS.row(
    "modelopt-nvfp4-apart",
    pack.nvfp4(),
    configs.modelopt("NVFP4", group_size=16),
    "as modelopt-nvfp4, gate and up with different `weight_scale_2`",
    refused="different tensor-level scales",
    differs=True,
)
ROWS.row(
    "modelopt-fp8",
    pack.fp8("weight_scale", (0, 0), shape=()),
    configs.hf_quant_config("FP8"),
    "hf_quant_config.json, FP8",
    "fp8-block",
)
ROWS.row(
    "modelopt-fp8-blocks",
    pack.fp8("weight_scale", _BLOCK),
    configs.modelopt("FP8_PB_WO"),
    "`modelopt`, FP8_PB_WO",
    "fp8-block",
)

# --- fused stacks -------------------------------------------------------------------------------------------

_FUSED_TENSOR = configs.fp8(activation_scheme="static", modules_to_not_convert=["lm_head"])
ROWS.row(
    "fused-fp8-expert",
    pack.fp8("weight_scale", (0, 0)),
    _FUSED_TENSOR,
    "`fp8`, stacks [E, in, out] with a scale [E]",
    "fp8-block",
    layout=layouts.llama4(scales="expert"),
)
ROWS.row(
    "fused-fp8-projection",
    pack.fp8("weight_scale", (0, 0)),
    _FUSED_TENSOR,
    "`fp8`, stacks [E, in, out] with scales [E, 2] and [E, 1]",
    "fp8-block",
    layout=layouts.qwen3_vl_moe(scales="projection"),
    differs=True,
)
ROWS.row(
    "fused-fp8-channel",
    pack.fp8("weight_scale", dtype=BF16),
    _FUSED_TENSOR,
    "`fp8`, stacks [E, out, in] with scales [E, out, 1]",
    "fp8",
    layout=layouts.qwen3_5_moe(),
)
ROWS.row(
    "fused-fp8-block",
    pack.fp8("scale_inv", _BLOCK),
    configs.fp8_blocks(modules_to_not_convert=["lm_head"]),
    "`fp8`, stacks [E, out, in] with `_scale_inv` blocks, as transformers 5 saves them",
    "fp8-block",
    layout=layouts.qwen3_5_moe(),
)
ROWS.row(
    "fused-fbgemm-fp8",
    pack.fp8("scale"),
    configs.fbgemm(),
    "`fbgemm_fp8`, stacks [E, in, out] with scales [E, 1, out] and [E, out, 1]",
    refused=_CHANNELS,
    rounded="fp8",
    layout=layouts.llama4(turned_scales=("gate_up_proj",)),
)
