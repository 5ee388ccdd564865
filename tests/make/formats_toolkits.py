"""Source formats of toolkits: compressed-tensors, GPTQ, AWQ, AutoRound, BitNet, Quark, Humming, bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch

from tests.make import configs
from tests.make import packing as pack
from tests.make import packing_tools as tools
from tests.make.configs import Json
from tests.make.layouts import GPT_OSS_QUARK, plain
from tests.make.spec import Table

BF16 = torch.bfloat16
F16 = "float16"
_BLOCK = (128, 128)
_CHANNELS = "float32 scales"  # of channels: Humming has them in the parameter dtype only
_ORDERED = "grouped by g_idx"

ROWS = Table()

# --- compressed-tensors -------------------------------------------------------------------------------------

_PACKED, _INT, _FLOAT = "pack-quantized", "int-quantized", "float-quantized"


def _compressed(
    storage: str, bits: int, kind: str, strategy: str, **weights: object
) -> tuple[Json, str]:
    """The config, and what tells the format."""
    size = f" g{weights['group_size']}" if "group_size" in weights else ""
    more = "" if weights.get("symmetric", True) else ", asymmetric"
    more += ", `actorder` group: columns in the order of g_idx" if "actorder" in weights else ""
    words = configs.compressed(storage, bits, kind, strategy, **weights)
    return words, f"`compressed-tensors`, {storage}, {kind}{bits} {strategy}{size}{more}"


ROWS.row(
    "ct-int4-g32",
    pack.pack_quantized(4, 32),
    *_compressed(_PACKED, 4, "int", "group", group_size=32),
    "int4-g32",
)
ROWS.row(
    "ct-int4-g128",
    pack.pack_quantized(4, 128),
    *_compressed(_PACKED, 4, "int", "group", group_size=128),
    "int4",
)
ROWS.row(
    "ct-int4-g128-zp",
    pack.pack_quantized(4, 128, True),
    *_compressed(_PACKED, 4, "int", "group", group_size=128, symmetric=False),
    "int4-g128-zp",
)
ROWS.row(
    "ct-int4-channel",
    pack.pack_quantized(4, 0),
    *_compressed(_PACKED, 4, "int", "channel"),
    "int4-c",
)
ROWS.row(
    "ct-int4-actorder",
    pack.pack_quantized(4, 128, is_ordered=True),
    *_compressed(_PACKED, 4, "int", "group", group_size=128, actorder="group"),
    refused=_ORDERED,
)
ROWS.row(
    "ct-int8-channel", pack.pack_quantized(8, 0), *_compressed(_PACKED, 8, "int", "channel"), "int8"
)
ROWS.row(
    "ct-int8-g128-zp",
    pack.pack_quantized(8, 128, True),
    *_compressed(_PACKED, 8, "int", "group", group_size=128, symmetric=False),
    "int8-g128-zp",
)
ROWS.row("ct-w8-channel", pack.int8(), *_compressed(_INT, 8, "int", "channel"), "int8")
ROWS.row(
    "ct-w8-channel-zp",
    pack.int8(asymmetric=True),
    *_compressed(_INT, 8, "int", "channel", symmetric=False),
    "int8-c-zp",
)
ROWS.row(
    "ct-fp8-channel",
    pack.fp8("weight_scale", dtype=BF16),
    *_compressed(_FLOAT, 8, "float", "channel"),
    "fp8",
)
ROWS.row(
    "ct-fp8-tensor",
    pack.fp8("weight_scale", (0, 0), shape=(1,)),
    *_compressed(_FLOAT, 8, "float", "tensor"),
    "fp8-block",
)
ROWS.row(
    "ct-fp8-block",
    pack.fp8("weight_scale", _BLOCK, BF16),
    *_compressed(_FLOAT, 8, "float", "block", block_structure=[128, 128]),
    "fp8-block",
)
ROWS.row(
    "ct-naive-fp8",
    pack.fp8("weight_scale", (0, 0), shape=(1,)),
    *_compressed("naive-quantized", 8, "float", "tensor"),
    "fp8-block",
)
ROWS.row(
    "ct-naive-int8",
    pack.int8(per_tensor=True),
    *_compressed("naive-quantized", 8, "int", "tensor"),
    refused="int8",
    rounded="int8",
)
ROWS.row(
    "ct-nvfp4",
    pack.nvfp4("weight_packed", divides=True),
    *_compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    "nvfp4",
)
ROWS.row(
    "ct-mxfp4",
    pack.mxfp4("weight_packed"),
    *_compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
    "mxfp4",
)
ROWS.row(
    "ct-mxfp8",
    pack.mxfp8,
    *_compressed("mxfp8-quantized", 8, "float", "group", group_size=32),
    "mxfp8",
)

# --- Ascend -------------------------------------------------------------------------------------------------

ROWS.row(
    "ascend-w8a8",
    pack.ascend_int8,
    configs.ASCEND,
    "`quantize` w8a8_dynamic in config.json, F32 scales",
    refused=_CHANNELS,
)
ROWS.row(
    "ascend-w8a8-file",
    pack.ascend_int8,
    configs.ASCEND_FILE,
    "quant_model_description.json, W8A8_DYNAMIC",
    refused=_CHANNELS,
    layers=(pack.ascend_int8,),
)

# --- GPTQ, AWQ, AutoRound, BitNet ---------------------------------------------------------------------------

_V2 = "gptq_v2"
ROWS.row("gptq-int4", pack.gptq(4, 128), configs.gptq(), "`gptq`, `sym`", "int4", dtype=F16)
ROWS.row(
    "gptq-int4-zp",
    pack.gptq(4, 128, True),
    configs.gptq(sym=False),
    "`gptq`, not `sym`: zero points less one",
    "int4-g128-zp",
    dtype=F16,
)
ROWS.row(
    "gptq-v2-int4-zp",
    pack.gptq(4, 128, True, 0),
    configs.gptq(sym=False, checkpoint_format=_V2),
    "`gptq` with `checkpoint_format` gptq_v2: zero points as they are",
    "int4-g128-zp",
    dtype=F16,
)
ROWS.row(
    "gptq-int2", pack.gptq(2, 64), configs.gptq(2, 64), "`gptq`, 2 bits", "int2-g64", dtype=F16
)
ROWS.row("gptq-int3", pack.gptq(3, 128), configs.gptq(3), "`gptq`, 3 bits", "int3-g128", dtype=F16)
ROWS.row(
    "gptq-int8-zp",
    pack.gptq(8, 128, True),
    configs.gptq(8, sym=False),
    "`gptq`, 8 bits, not `sym`",
    "int8-g128-zp",
    dtype=F16,
)
ROWS.row(
    "gptq-channel",
    pack.gptq(4, 0),
    configs.gptq(4, -1),
    "`gptq`, `group_size` -1",
    "int4-c",
    dtype=F16,
)
ROWS.row(
    "gptq-desc-act",
    pack.gptq(4, 128, ordered=True),
    configs.gptq(desc_act=True),
    "`gptq` with `desc_act`: columns in the order of g_idx",
    refused=_ORDERED,
    dtype=F16,
)
ROWS.row("awq", pack.awq(128), configs.awq(), "`awq`, version gemm", "int4-g128-zp", dtype=F16)
ROWS.row(
    "awq-sym",
    pack.awq(128, False),
    configs.awq(zero_point=False),
    "`awq` without zero points",
    "int4",
    dtype=F16,
)
ROWS.row(
    "awq-router-gate",
    pack.awq(128),
    configs.awq(modules_to_not_convert=["gate"]),
    "`awq` whose `modules_to_not_convert` has `gate`, the router: `gate_proj` is quantized",
    "int4-g128-zp",
    dtype=F16,
)
ROWS.row(
    "auto-round",
    pack.gptq(4, 128, offset=0),
    configs.auto_round("auto_round"),
    "`auto-round`, its own packing: zero points as they are",
    "int4",
    dtype=F16,
)
ROWS.row(
    "auto-round-gptq",
    pack.gptq(4, 128, True),
    configs.auto_round("auto_round:auto_gptq", sym=False),
    "`auto-round`, `packing_format` auto_round:auto_gptq",
    "int4-g128-zp",
    dtype=F16,
)
ROWS.row(
    "auto-round-awq",
    pack.awq(128),
    configs.auto_round("auto_round:auto_awq", sym=False),
    "`auto-round`, `packing_format` auto_round:auto_awq",
    "int4-g128-zp",
    dtype=F16,
)
ROWS.row("bitnet", pack.bitnet(), configs.bitnet(), "`bitnet`: the stored scale divides", "source")
ROWS.row(
    "bitnet-auto",
    pack.bitnet(False),
    configs.bitnet(linear_class="autobitlinear"),
    "`bitnet`, autobitlinear: the stored scale multiplies",
    "source",
)

# --- Quark, Humming, bitsandbytes ---------------------------------------------------------------------------

_G32: dict[str, Any] = {"group_size": 32}
ROWS.row(
    "quark-int4",
    tools.quark_int4(32),
    configs.quark("int4", "per_group", **_G32),
    "`quark`, int4 per group, `pack_method` reorder",
    "int4-g32",
)
ROWS.row(
    "quark-int4-order",
    tools.quark_int4(32, reorder=False),
    configs.quark("int4", "per_group", "order", **_G32),
    "`quark`, int4 per group, `pack_method` order",
    "int4-g32",
)
ROWS.row(
    "quark-int4-zp",
    tools.quark_int4(32, True),
    configs.quark("int4", "per_group", symmetric=False, **_G32),
    "`quark`, int4 per group, not symmetric",
    "int4-g32-zp",
)
ROWS.row(
    "quark-uint4",
    tools.quark_int4(32, True, is_signed=False),
    configs.quark("uint4", "per_group", symmetric=False, **_G32),
    "`quark`, uint4 per group",
    "int4-g32-zp",
)
ROWS.row(
    "quark-int8",
    tools.quark_int8,
    configs.quark("int8", "per_channel"),
    "`quark`, int8 per channel, F32 scales",
    refused=_CHANNELS,
    rounded="int8",
)
ROWS.row(
    "quark-fp8-tensor",
    pack.fp8("weight_scale", (0, 0), shape=()),
    configs.quark("fp8_e4m3", "per_tensor"),
    "`quark`, fp8 per tensor",
    "fp8-block",
)
ROWS.row(
    "quark-fp8-channel",
    pack.fp8("weight_scale", shape=(-1,)),
    configs.quark("fp8_e4m3", "per_channel"),
    "`quark`, fp8 per channel, F32 scales",
    refused=_CHANNELS,
    rounded="fp8",
)
ROWS.row(
    "quark-mxfp4",
    tools.quark_fp4,
    configs.quark("fp4", "per_group", scale_format="e8m0", **_G32),
    "`quark`, fp4 with `scale_format` e8m0",
    "mxfp4",
)
ROWS.row(
    "quark-mxfp4-gpt-oss",
    tools.quark_gpt_oss,
    configs.quark("fp4", "per_group", scale_format="e8m0", **_G32),
    "as quark-mxfp4, `gate_up_proj` per expert, rows interleaved, biases",
    "mxfp4",
    layout=GPT_OSS_QUARK,
)
ROWS.row(
    "quark-mxfp4-embedded",
    tools.quark_embedded_fp4,
    configs.quark("mx", "per_group", mx_element_dtype="fp4", **_G32),
    "`quark`, mx of fp4: scales among the codes",
    "mxfp4",
)
ROWS.row(
    "quark-mxfp6-e2m3",
    tools.quark_fp6(2),
    configs.quark("fp6_e2m3", "per_group", scale_format="e8m0", **_G32),
    "`quark`, fp6_e2m3 with `scale_format` e8m0",
    "source",
)
ROWS.row(
    "quark-mxfp6-e3m2",
    tools.quark_fp6(3),
    configs.quark("fp6_e3m2", "per_group", scale_format="e8m0", **_G32),
    "`quark`, fp6_e3m2 with `scale_format` e8m0",
    "source",
)
ROWS.row(
    "quark-fp4-fp8",
    tools.quark_fp4_fp8,
    configs.quark_stages(configs.QUARK_TWO_STAGES),
    "`quark`, two stages: fp4 with fp8 scales",
    "nvfp4",
)
ROWS.row(
    "quark-int4-fp8",
    tools.quark_int4_fp8,
    configs.quark_stages(configs.QUARK_INT4_FP8),
    "`quark`, two stages: int4 in fp8",
    refused="No schema",
)
ROWS.row(
    "humming-int4",
    tools.humming_int4(64),
    configs.humming(b_dtype="uint4", weight_scale_type="group", weight_scale_group_size=64),
    "`humming`, uint4 g64",
    "int4-g64",
    dense=plain,
)
ROWS.row(
    "humming-int4-zp",
    tools.humming_int4(64, "integer"),
    configs.humming(b_dtype="uint4", weight_scale_group_size=64, has_zero_point=True),
    "`humming`, uint4 g64 with zero points",
    "int4-g64-zp",
    dense=plain,
)
ROWS.row(
    "humming-int4-fpzp",
    tools.humming_int4(128, "float"),
    configs.humming(
        b_dtype="uint4", weight_scale_group_size=128, has_zero_point=True, is_fp_zero_point=True
    ),
    "`humming`, uint4 g128 with float zero points",
    "int4-g128-fpzp",
    dense=plain,
)
ROWS.row(
    "humming-mxfp4",
    tools.humming_mxfp4,
    configs.humming(b_dtype="float4e2m1", bs_dtype="float8e8m0", weight_scale_group_size=32),
    "`humming`, float4e2m1 with float8e8m0 scales",
    "mxfp4",
    dense=plain,
)
ROWS.row(
    "humming-nvfp4",
    tools.humming_nvfp4,
    configs.humming(
        b_dtype="float4e2m1",
        bs_dtype="float8e4m3",
        weight_scale_group_size=16,
        weight_scale_2_type="tensor",
    ),
    "`humming`, float4e2m1 with float8e4m3 scales under one of the tensor",
    "nvfp4",
    dense=plain,
)
ROWS.row(
    "humming-fp8-block",
    tools.humming_fp8_block,
    configs.humming(
        b_dtype="float8e4m3", weight_scale_group_size=128, weight_scale_group_size_n=128
    ),
    "`humming`, float8e4m3 in blocks",
    "fp8-block",
    dense=plain,
)
for _kind, _nested in (("nf4", False), ("nf4", True), ("fp4", False)):
    ROWS.row(
        f"bnb-{_kind}{'-nested' if _nested else ''}",
        tools.bitsandbytes_4bit(_kind, _nested),
        configs.bitsandbytes(_kind, _nested),
        f"`bitsandbytes`, {_kind}{', double quantization' if _nested else ''}",
        refused="No schema",
        needs="bitsandbytes",
    )

# --- mixed checkpoints --------------------------------------------------------------------------------------

ROWS.row(
    "mixed-ct-ignore",
    pack.pack_quantized(4, 128),
    configs.compressed(
        _PACKED,
        4,
        "int",
        "group",
        group_size=128,
        ignore=["re:.*layers\\.1\\.(mlp\\.experts|self_attn).*"],
    ),
    "`compressed-tensors` that ignores a layer: its experts are plain, and left so",
    "int4",
    layers=(plain,),
)
ROWS.row(
    "mixed-gptq-dynamic",
    pack.gptq(4, 128),
    configs.gptq(dynamic={r"+:.*layers\.1\..*": {"bits": 8}}),
    "`gptq` with `dynamic`: layer 1 in 8 bits",
    "int4",
    layers=(pack.gptq(8, 128),),
    dtype=F16,
)
