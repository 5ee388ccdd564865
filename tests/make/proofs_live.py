"""Checkpoints that an installed package of a publisher writes or reads while the tests run. See `proofs`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from tests.make import configs
from tests.make.proofs import (
    HIDDEN,
    INNER,
    LAYER,
    Json,
    Published,
    Tensors,
    drawn,
    model_config,
    named,
    qwen3_moe,
    shape_of,
)

BOTH, READ = "wrote and read", "read"


# --- compressed-tensors ------------------------------------------------------------------------------------


def compressed(
    storage: str, bits: int, kind: str, strategy: str, **weights: Any
) -> Callable[[], Published]:
    """Its observers' formula, compressor, config and decompressor; scales in bfloat16, which decoding rounds to."""
    return lambda: _compressed(storage, bits, kind, strategy, weights)


def _compressed(storage: str, bits: int, kind: str, strategy: str, weights: Json) -> Published:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, **weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=storage)
    compressor = BaseCompressor.get_value_from_registry(storage)
    block = weights.get("block_structure")

    def tiles(weight: torch.Tensor) -> torch.Tensor:
        """The weight with the values of a scale along the last dimension."""
        n, k = weight.shape
        if strategy == "tensor":
            return weight.reshape(1, -1)
        if block:
            return (
                weight.reshape(n // block[0], block[0], k // block[1], block[1])
                .transpose(1, 2)
                .flatten(2)
            )
        return (
            weight.reshape(n, -1, args.group_size)
            if "group_size" in weights
            else weight.reshape(n, 1, k)
        )

    def quantize(_module: str, drawn_weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        weight = drawn_weight.bfloat16()
        state: Tensors = {"weight": weight}
        if strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(
                weight.min().reshape(1), weight.max().reshape(1)
            )
        low, high = tiles(weight).amin(-1), tiles(weight).amax(-1)
        scale, zero = calculate_qparams(
            low, high, args, global_scale=state.get("weight_global_scale")
        )
        state |= {"weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
        if args.symmetric:
            del state["weight_zero_point"]
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=storage,
        ignore=["lm_head"],
        quantization_status="compressed",
    ).model_dump(mode="json")
    sizes = (2 * block[0], block[1]) if block else (HIDDEN, INNER)
    return qwen3_moe(
        named("compressed-tensors"),
        BOTH,
        quantize,
        {"quantization_config": {**config, "quant_method": "compressed-tensors"}},
        hidden=sizes[0],
        inner=sizes[1],
    )


# --- transformers ------------------------------------------------------------------------------------------


def _fp8(block: tuple[int, int] | None, **more: Any) -> tuple[Any, Any, Json]:
    """transformers' two operations on fp8 weights, and its config."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = FineGrainedFP8Config(
        weight_block_size=block, modules_to_not_convert=["lm_head"], **more
    )
    quantizer = SimpleNamespace(quantization_config=config)
    return Fp8Quantize(quantizer), Fp8Dequantize(quantizer), config.to_dict()


def fp8_written(block: tuple[int, int] | None, **more: Any) -> Callable[[], Published]:
    """fp8 as transformers quantizes a model that it loads, per block or per tensor; read in float32."""

    def published() -> Published:
        writer, reader, config = _fp8(block, **more)

        def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            stored = writer.convert({f"{module}.weight": weight.bfloat16()})
            parts = {name.removeprefix(f"{module}."): tensor for name, tensor in stored.items()}
            return parts, reader._dequantize_one(
                parts["weight"], parts["weight_scale_inv"], torch.float32
            )

        return qwen3_moe(
            named("transformers"),
            BOTH,
            quantize,
            {"quantization_config": config},
            hidden=256,
            inner=128,
        )

    return published


def read(
    store: Callable[[torch.Tensor], Tensors], documents: Json, **config: Any
) -> Callable[[], Published]:
    """Codes and scales that transformers reads in float32; `store` gives both, the codes first."""

    def published() -> Published:
        _, reader, _ = _fp8((128, 128))

        def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            tensors = store(weight)
            codes, scale = tensors.values()
            is_packed = codes.size(1) < weight.size(1)
            codes = codes.view(torch.int8) if is_packed else codes
            scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
            return tensors, reader._dequantize_one(codes, scale, torch.float32)

        return qwen3_moe(named("transformers"), READ, quantize, documents, config=config)

    return published


def fp8(
    name: str,
    scale_of: Callable[[torch.Tensor], torch.Tensor],
    codes: torch.dtype = torch.float8_e4m3fn,
) -> Callable[[torch.Tensor], Tensors]:
    """fp8 codes and a scale of this name."""
    return lambda weight: {"weight": (weight * 500).to(codes), name: scale_of(weight)}


def fp4(codes: torch.dtype, name: str, scale: torch.dtype) -> Callable[[torch.Tensor], Tensors]:
    """fp4 in groups of 32: two random codes a byte, and exponents."""

    def store(weight: torch.Tensor) -> Tensors:
        n, k = weight.shape
        generator = torch.Generator().manual_seed(n)
        packed = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
        return {"weight": packed.view(codes), name: _exponents(weight).view(scale)}

    return store


def _tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max().reshape(()) / 300


def _channel(weight: torch.Tensor) -> torch.Tensor:
    return (weight.abs().amax(1, keepdim=True) / 300).float()


def _bfloat16_channel(weight: torch.Tensor) -> torch.Tensor:
    return _channel(weight).bfloat16()


def _exponents(weight: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes [N, K / 32]."""
    peak = weight.reshape(len(weight), -1, 32).abs().amax(-1)
    return (torch.frexp(peak)[1] + 118).to(torch.uint8)


def fp8_recast(
    cast: Callable[[torch.Tensor], torch.Tensor], **words: Any
) -> Callable[[], Published]:
    """Blocks under powers of two as transformers writes them, their scales stored in another dtype."""

    def published() -> Published:
        one = fp8_written((128, 128), scale_fmt="ue8m0")()
        tensors = {
            name: cast(x) if name.endswith("_scale_inv") else x for name, x in one.tensors.items()
        }
        documents = {"config.json": {**one.documents["config.json"], **configs.fp8_blocks(**words)}}
        return Published(one.package, READ, tensors, documents, one.values)

    return published


def fp8_ragged() -> Published:
    """Blocks that are cut at the edges, which compressed-tensors reads in float32."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])

    def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = (-(-size // 128) for size in weight.shape)
        scale = torch.rand(n, k, generator=torch.Generator().manual_seed(n)) * 1e-3
        stored = (weight * 500).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale_inv": scale}, dequantize(stored, scale, args=args)

    package = named("compressed-tensors")
    return qwen3_moe(package, READ, quantize, configs.fp8_blocks(), hidden=192, inner=144)


def mxfp4_gpt_oss() -> Published:
    """GPT-OSS's stacks; the module gives [in, out], gate and up in alternating rows."""
    from transformers import Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {f"{LAYER}.router.weight": torch.ones(2, HIDDEN, dtype=torch.bfloat16)}
    values: Tensors = {}
    for stack, role in (("gate_up_proj", "w1"), ("down_proj", "w2")):
        n, k = shape_of(role)
        n = 2 * n if role == "w1" else n
        blocks = torch.randint(0, 256, (2, n, k // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(110, 130, (2, n, k // 32), generator=generator).to(torch.uint8)
        tensors[f"{LAYER}.experts.{stack}_blocks"] = blocks
        tensors[f"{LAYER}.experts.{stack}_scales"] = scales
        tensors[f"{LAYER}.experts.{stack}_bias"] = torch.randn(2, n, generator=generator).bfloat16()
        weights = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        read_back = weights.transpose(1, 2)
        for expert in range(2):
            if role == "w2":
                values[f"{expert}.w2"] = read_back[expert]
            else:
                values |= {
                    f"{expert}.w1": read_back[expert, ::2],
                    f"{expert}.w3": read_back[expert, 1::2],
                }
    config = {
        **model_config(HIDDEN, INNER, "gpt_oss", 2),
        "quantization_config": Mxfp4Config().to_dict(),
    }
    return Published(named("transformers"), READ, tensors, {"config.json": config}, values)


def fused_fp8_channel() -> Published:
    """Stacks [E, out, in] with scales [E, out, 1], which transformers reads in float32."""

    def store(name: str, weights: torch.Tensor) -> Tensors:
        scale = (weights.abs().amax(2, keepdim=True) / 300).bfloat16()
        return {name: (weights / scale).to(torch.float8_e4m3fn), f"{name}_weight_scale": scale}

    return _fused(READ, store, configs.fp8(activation_scheme="static"))


def fused_fp8_block() -> Published:
    """Stacks [E, out, in] as transformers 5 saves a model that it quantized."""
    writer, _, config = _fp8((32, 32))

    def store(name: str, weights: torch.Tensor) -> Tensors:
        stored: Tensors = writer.convert({name: weights.bfloat16()})
        return stored

    return _fused(BOTH, store, {"quantization_config": config})


def _fused(
    wrote: str, store: Callable[[str, torch.Tensor], Tensors], quantization: Json
) -> Published:
    """Stacks of two experts; `store` gives a stack's codes and scales by name."""
    _, reader, _ = _fp8((32, 32))
    tensors: Tensors = {f"{LAYER}.gate.weight": torch.ones(2, HIDDEN, dtype=torch.bfloat16)}
    values: Tensors = {}
    for stack, roles in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        experts = [torch.cat([drawn(role, seed=expert) for role in roles]) for expert in range(2)]
        stored = store(f"{LAYER}.experts.{stack}", torch.stack(experts))
        tensors |= stored
        codes, scale = stored.values()
        for expert, matrix in enumerate(reader._dequantize_one(codes, scale, torch.float32)):
            for role, rows in zip(roles, matrix.chunk(len(roles)), strict=True):
                values[f"{expert}.{role}"] = rows
    config = {**model_config(HIDDEN, INNER, "qwen3_moe", 2), **quantization}
    return Published(named("transformers"), wrote, tensors, {"config.json": config}, values)


def bitnet(linear_class: str) -> Callable[[], Published]:
    """The product of the identity with the module, whose activations are not rounded for the occasion."""

    def published() -> Published:
        from transformers import BitNetQuantConfig
        from transformers.integrations import bitnet as module

        pack, unpack = (
            getattr(one, "_torchdynamo_orig_callable", one)
            for one in (module.pack_weights, module.unpack_weights)
        )

        def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            scale = 1 / weight.abs().mean() if linear_class == "bitlinear" else weight.abs().mean()
            scale = scale.bfloat16().reshape(1)
            ternary = module.WeightQuant.apply(weight).sign()
            packed = pack(ternary)
            codes = unpack(packed, torch.float32)
            if linear_class == "bitlinear":
                read = module.BitLinear.post_quant_process(None, codes, 1, scale.float())
            else:
                read = codes * scale.float()
            return {"weight": packed, "weight_scale": scale}, read

        config = BitNetQuantConfig(
            modules_to_not_convert=["lm_head"], linear_class=linear_class
        ).to_dict()
        return qwen3_moe(named("transformers"), BOTH, quantize, {"quantization_config": config})

    return published


# --- bitsandbytes ------------------------------------------------------------------------------------------


def bitsandbytes(kind: str, nested: bool) -> Callable[[], Published]:
    """Quantized and dequantized by the package, which is made to give float32."""

    def published() -> Published:
        functional = import_module("bitsandbytes.functional")
        from transformers import BitsAndBytesConfig

        def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            packed, state = functional.quantize_4bit(
                weight.bfloat16(), quant_type=kind, compress_statistics=nested
            )
            state_tensors = {
                f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()
            }
            state.dtype = torch.float32
            return {"weight": packed, **state_tensors}, functional.dequantize_4bit(packed, state)

        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
        ).to_dict()
        return qwen3_moe(named("bitsandbytes"), BOTH, quantize, {"quantization_config": config})

    return published


# --- Humming -----------------------------------------------------------------------------------------------


def humming(**words: Any) -> Callable[[], Published]:
    """Quantized and dequantized by Humming's schema, in float32; of its CUDA ops twins for the CPU."""

    def published() -> Published:
        from hqconv.humming_ops.runtime import humming as load
        from hqconv.humming_ops.runtime import resident

        import_module("tests.make.quant_weight")  # lets Humming quantize on the CPU
        schema = load().schema.HummingWeightSchema.from_config({"quant_method": "humming", **words})

        def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            with resident(weight.device):
                parts = schema.quant_tensor(weight, schema, torch.bfloat16)
                return parts, schema.dequant_tensors(parts)

        blocks = words.get("weight_scale_group_size_n", 0) > 1
        package, config = named("humming-kernels"), configs.humming(**words)
        return qwen3_moe(package, BOTH, quantize, config, hidden=256 if blocks else 128, inner=128)

    return published


# --- the rows ----------------------------------------------------------------------------------------------

_E8M0, _U8 = torch.float8_e8m0fnu, torch.uint8
_PACKED, _INT, _FLOAT = "pack-quantized", "int-quantized", "float-quantized"
_MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
_DEEPSEEK_FP4 = configs.fp8_blocks(scale_fmt="ue8m0", modules_to_not_convert=None)
_MIMO = configs.fp8_blocks(
    store_dtype="mxfp4", routed_experts_quant_method="mxfp4", modules_to_not_convert=None
)

LIVE: dict[str, Callable[[], Published]] = {
    "fp8-block": fp8_written((128, 128)),
    "fp8-block-e8m0": fp8_written((128, 128), scale_fmt="ue8m0"),
    "fp8-block-ue8m0": fp8_recast(torch.Tensor.float, scale_fmt="ue8m0"),
    "fp8-block-e8m0-bytes": fp8_recast(lambda scale: scale.view(torch.uint8)),
    "fp8-block-ragged": fp8_ragged,
    "fp8-tensor": read(fp8("weight_scale", _tensor), configs.fp8(activation_scheme="static")),
    "fp8-channel": read(fp8("weight_scale", _bfloat16_channel), configs.fp8()),
    "fp8-channel-f32": read(fp8("weight_scale", lambda w: _channel(w).flatten()), configs.fp8()),
    "fp8-e5m2": read(
        fp8("weight_scale", _bfloat16_channel, torch.float8_e5m2), configs.fp8(fmt="e5m2")
    ),
    "mxfp4-gpt-oss": mxfp4_gpt_oss,
    "mxfp4-deepseek-v4": read(fp4(torch.int8, "scale", _E8M0), _DEEPSEEK_FP4, expert_dtype="fp4"),
    "mxfp4-mimo": read(fp4(_U8, "weight_scale", _U8), _MIMO),
    "mxfp8-minimax": read(fp8("weight_scale_inv", _exponents), {"quantization_config": _MXFP8}),
    "fused-fp8-channel": fused_fp8_channel,
    "fused-fp8-block": fused_fp8_block,
    "bitnet": bitnet("bitlinear"),
    "bitnet-auto": bitnet("autobitlinear"),
    "ct-int4-g32": compressed(_PACKED, 4, "int", "group", group_size=32),
    "ct-int4-g128": compressed(_PACKED, 4, "int", "group", group_size=32),
    "ct-int4-g128-zp": compressed(_PACKED, 4, "int", "group", group_size=32, symmetric=False),
    "ct-int4-channel": compressed(_PACKED, 4, "int", "channel"),
    "ct-int8-channel": compressed(_PACKED, 8, "int", "channel"),
    "ct-int8-g128-zp": compressed(_PACKED, 8, "int", "group", group_size=32, symmetric=False),
    "ct-w8-channel": compressed(_INT, 8, "int", "channel"),
    "ct-w8-channel-zp": compressed(_INT, 8, "int", "channel", symmetric=False),
    "ct-fp8-channel": compressed(_FLOAT, 8, "float", "channel"),
    "ct-fp8-tensor": compressed(_FLOAT, 8, "float", "tensor"),
    "ct-fp8-block": compressed(_FLOAT, 8, "float", "block", block_structure=[128, 128]),
    "ct-naive-fp8": compressed("naive-quantized", 8, "float", "tensor"),
    "ct-naive-int8": compressed("naive-quantized", 8, "int", "tensor"),
    "ct-nvfp4": compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    "ct-mxfp4": compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
    "ct-mxfp8": compressed("mxfp8-quantized", 8, "float", "group", group_size=32),
    "bnb-nf4": bitsandbytes("nf4", False),
    "bnb-nf4-nested": bitsandbytes("nf4", True),
    "bnb-fp4": bitsandbytes("fp4", False),
    "humming-int4": humming(b_dtype="uint4", weight_scale_type="group", weight_scale_group_size=64),
    "humming-int4-zp": humming(b_dtype="uint4", weight_scale_group_size=64, has_zero_point=True),
    "humming-int4-fpzp": humming(
        b_dtype="uint4", weight_scale_group_size=128, has_zero_point=True, is_fp_zero_point=True
    ),
    "humming-mxfp4": humming(
        b_dtype="float4e2m1", bs_dtype="float8e8m0", weight_scale_group_size=32
    ),
    "humming-nvfp4": humming(
        b_dtype="float4e2m1",
        bs_dtype="float8e4m3",
        weight_scale_group_size=16,
        weight_scale_2_type="tensor",
    ),
    "humming-fp8-block": humming(
        b_dtype="float8e4m3", weight_scale_group_size=128, weight_scale_group_size_n=128
    ),
}

_READ_ONLY = {
    *(
        "fp8-block-ue8m0",
        "fp8-block-e8m0-bytes",
        "fp8-block-ragged",
        "fp8-tensor",
        "fp8-channel",
        "fp8-channel-f32",
    ),
    *(
        "fp8-e5m2",
        "mxfp4-gpt-oss",
        "mxfp4-deepseek-v4",
        "mxfp4-mimo",
        "mxfp8-minimax",
        "fused-fp8-channel",
    ),
}
_PACKAGES = {
    "ct-": "compressed-tensors",
    "fp8-block-ragged": "compressed-tensors",
    "bnb-": "bitsandbytes",
    "humming-": "humming-kernels",
    "": "transformers",
}


def said_of(name: str) -> tuple[str, str]:
    """Package of a live proof, and what it did, without doing it."""
    package = next(package for start, package in _PACKAGES.items() if name.startswith(start))
    return package, READ if name in _READ_ONLY else BOTH
