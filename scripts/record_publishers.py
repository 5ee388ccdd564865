"""Record small checkpoints that publishers' packages write and read, for `tests/formats/test_proofs.py`.

    python scripts/record_publishers.py [name …]

Runs in an environment of its own, without hqconv: torch, transformers, amd-quark, auto-round, autoawq, gptqmodel,
msmodelslim, nvidia-modelopt, and for g_idx compressed-tensors 0.10 (later versions have none). None of them needs a GPU
here. A model is a tiny Llama whose only layer has the sizes of one expert; its MLP's tensors get an expert's names in
Qwen3-MoE. The files keep the package's version, its own config, and the weights as it dequantizes them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.make import configs
from tests.make.proofs import (
    HIDDEN,
    INNER,
    LAYER,
    ROLES,
    Json,
    Published,
    Tensors,
    drawn,
    model_config,
    named,
    qwen3_moe,
)

BOTH = "wrote and read"
MLP = "model.layers.0.mlp"


def tiny_llama(dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER) -> Any:
    """A Llama of one layer whose MLP has the drawn weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).to(dtype)
    for role, word in ROLES.items():
        getattr(model.model.layers[0].mlp, word).weight.data.copy_(drawn(role, hidden, inner))
    return model.eval()


def as_expert(name: str) -> str:
    """A name of the MLP in a tiny Llama, as an expert's."""
    return name.replace(f"{MLP}.", f"{LAYER}.experts.0.")


def exported(
    package: str, folder: Path, values: Tensors, dtype: str, documents: Json | None = None
) -> Published:
    """What a package exported: the MLP's tensors of a tiny Llama, and its quantization config."""
    words = json.loads((folder / "config.json").read_text())
    hidden, inner = words["hidden_size"], words["intermediate_size"]
    tensors: Tensors = {f"{LAYER}.gate.weight": torch.ones(1, hidden, dtype=torch.bfloat16)}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {
                as_expert(key): file.get_tensor(key)
                for key in list(file.keys())
                if f"{MLP}." in key
            }
    config = {**model_config(hidden, inner), "torch_dtype": dtype}
    if documents is None:
        config["quantization_config"] = words["quantization_config"]
    return Published(
        named(package), BOTH, tensors, {"config.json": config, **(documents or {})}, values
    )


def of_module(tensors: Tensors, module: str) -> Tensors:
    """The tensors of a module, by the names of its parts."""
    prefix = f"{module}."
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }


# --- Quark -------------------------------------------------------------------------------------------------


def quark(spec: str, pack_method: str = "reorder", **words: Any) -> Callable[[], Published]:
    """Quark: quantized, exported, imported again; its imported modules give the weights in bfloat16."""

    def published() -> Published:
        from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
        from quark.torch.quantization.config import config

        made = {
            key: getattr(config, one[0])(**one[1]) if isinstance(one, tuple) else one
            for key, one in words.items()
        }
        weight = getattr(config, spec)(**made).to_quantization_spec()
        layer = config.QLayerConfig(weight=weight)
        quantizer = ModelQuantizer(
            config.QConfig(global_quant_config=layer, exclude=["lm_head", "*self_attn*"])
        )
        model = quantizer.freeze(quantizer.quantize_model(tiny_llama(torch.bfloat16)))
        with tempfile.TemporaryDirectory() as work, torch.no_grad():
            export_safetensors(model, work, pack_method=pack_method)
            read = import_model_from_safetensors(tiny_llama(torch.bfloat16), work)
            values = {}
            for role, word in ROLES.items():
                module = getattr(read.model.layers[0].mlp, word)
                values[f"0.{role}"] = module._get_qweight(module.weight).clone()
            return exported("amd-quark", Path(work), values, "bfloat16")

    return published


def quark_embedded() -> Published:
    """Quark's packer of its old mx blocks, whose exporter is gone: exponents and elements, which it gives back."""
    from quark.torch.utils.pack import Pack_mxfp4

    packer = Pack_mxfp4("per_group", "mx")

    def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        blocks = weight.reshape(n, k // 32, 32)
        scale = 2.0 ** (torch.frexp(blocks.abs().amax(-1, keepdim=True))[1] - 3).float()
        nearest = (blocks.abs() / scale).unsqueeze(-1).sub(grid).abs().argmin(-1)
        elements = grid[nearest] * blocks.sign()
        stored = packer.pack(torch.cat([scale, elements], -1).reshape(n, -1), False)
        read = packer.unpack(stored, False).reshape(n, k // 32, 33)
        return {"weight": stored}, (read[..., :1] * read[..., 1:]).reshape(n, k)

    words = configs.quark("mx", "per_group", mx_element_dtype="fp4", group_size=32)
    return qwen3_moe(named("amd-quark"), BOTH, quantize, words)


# --- ModelOpt ----------------------------------------------------------------------------------------------


def modelopt(
    config: str, *, own_file: bool = False, hidden: int = HIDDEN, inner: int = INNER
) -> Callable[[], Published]:
    """ModelOpt: quantized, exported, and each matrix read by its class of quantized tensors, in float32."""

    def published() -> Published:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        def calibrate(model: Any) -> None:
            model(torch.arange(64).reshape(2, 32))

        model = mtq.quantize(
            tiny_llama(torch.bfloat16, hidden, inner), getattr(mtq, config), calibrate
        )
        with tempfile.TemporaryDirectory() as work, torch.no_grad():
            folder = Path(work)
            export_hf_checkpoint(model, export_dir=work)
            name = "hf_quant_config.json"
            documents = {name: json.loads((folder / name).read_text())} if own_file else None
            one = exported("nvidia-modelopt", folder, {}, "bfloat16", documents)
        for role, word in (
            ROLES.items() if hidden == HIDDEN else (("w1", ROLES["w1"]),)
        ):  # a small file
            module = f"{LAYER}.experts.0.{word}"
            parts = of_module(one.tensors, module)
            one.values[f"0.{role}"] = _modelopt_values(
                config, parts, drawn(role, hidden, inner).shape
            )
        # Its product of both scales is rounded before the one with the code.
        return replace(one, roundings=2) if config.startswith("NVFP4") else one

    return published


def _modelopt_values(config: str, parts: Tensors, shape: torch.Size) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    weight, scale = parts["weight"], parts["weight_scale"]
    kind = MXFP8QTensor if config.startswith("MXFP8") else FP8QTensor
    more: Json = {}
    if config.startswith("NVFP4"):
        kind, more = (
            NVFP4QTensor,
            {"double_scale": parts["weight_scale_2"], "block_sizes": {-1: 16}},
        )
    elif kind is FP8QTensor and scale.ndim:  # it stores [N / 128, 1, K / 128, 1]
        scale, more = scale.reshape(scale.shape[0], -1), {"block_sizes": {-2: 128, -1: 128}}
    values: torch.Tensor = kind(shape, torch.float32, weight).dequantize(
        torch.float32, scale=scale, **more
    )
    return values


# --- GPTQModel and AutoAWQ ---------------------------------------------------------------------------------


def affine(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, *, sym: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float16 scales and integer zero points [G, N] by round to nearest. groups: of each column."""
    columns = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
    low = torch.stack([one.amin(1).clamp(max=0) for one in columns])
    high = torch.stack([one.amax(1).clamp(min=0) for one in columns])
    if sym:
        scale = (2 * torch.maximum(-low, high) / (2**bits - 1)).half()
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    scale = ((high - low) / (2**bits - 1)).half()
    return scale, (-low / scale.float()).round().clamp(0, 2**bits - 1).half()


def gptq(
    of_config: int,
    size: int,
    *,
    sym: bool = True,
    desc_act: bool = False,
    v2: bool = False,
    dynamic: Json | None = None,
) -> Callable[[], Published]:
    """GPTQModel: packed by its kernel's module, its own conversion to version 1, dequantized in float16."""

    def published() -> Published:
        from gptqmodel import QuantizeConfig
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

        config = QuantizeConfig(
            bits=of_config,
            group_size=size,
            sym=sym,
            desc_act=desc_act,
            format="gptq_v2" if v2 else "gptq",
            dynamic=dynamic,
        )

        def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            n, k = weight.shape
            bits = int(config.dynamic_get(module, "bits", of_config))
            groups = torch.arange(k) // (size if size > 0 else k)
            if desc_act:
                groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(0))]
            scales, zeros = affine(weight, bits, groups, sym=sym)
            linear = torch.nn.Linear(k, n, bias=False)
            linear.weight.data.copy_(weight)
            packed = TorchLinear(bits, size, sym, desc_act, k, n)
            packed.pack_block(linear, scales.t(), zeros.t(), groups.to(torch.int32))
            packed.eval()
            packed._init_wf_unsqueeze_buffers()
            with torch.inference_mode():
                read = packed.dequantize_weight().t().clone()
            if not v2:
                convert_gptq_v2_to_v1_format_module(packed, config)
            return {
                name: packed.state_dict()[name] for name in ("qweight", "qzeros", "scales", "g_idx")
            }, read

        words = json.loads(json.dumps(config.to_dict(), default=str))
        return qwen3_moe(
            named("gptqmodel"), BOTH, quantize, {"quantization_config": words}, dtype="float16"
        )

    return published


def autoawq() -> Published:
    """AutoAWQ: packed by its module, dequantized by its function, in float16."""
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    config = AwqConfig(
        q_group_size=32, version="GEMM", modules_to_not_convert=["gate."]
    ).to_transformers_dict()

    def quantize(_module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        scales, zeros = affine(weight, 4, torch.arange(k) // 32, sym=False)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data.copy_(weight)
        packed = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales, zeros=zeros)
        read = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32)
        return dict(packed.state_dict()), read.t()

    return qwen3_moe(
        named("autoawq"), BOTH, quantize, {"quantization_config": config}, dtype="float16"
    )


# --- AutoRound ---------------------------------------------------------------------------------------------


def auto_round(form: str, *, sym: bool, bits: int = 4) -> Callable[[], Published]:
    """AutoRound: quantized by rounding and saved; read as `_auto_round_values` says."""

    def published() -> Published:
        from auto_round import AutoRound
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
        rounding = AutoRound(
            tiny_llama(torch.float16),
            tokenizer,
            bits=bits,
            group_size=32,
            sym=sym,
            iters=0,
            nsamples=1,
            seqlen=16,
            disable_opt_rtn=True,
            device_map="cpu",
        )
        with tempfile.TemporaryDirectory() as work, torch.no_grad():
            rounding.quantize_and_save(work, format=form)
            folder = next(Path(work).rglob("config.json")).parent
            one = exported("auto-round", folder, {}, "float16")
            for role, word in ROLES.items():
                parts = of_module(one.tensors, f"{LAYER}.experts.0.{word}")
                one.values[f"0.{role}"] = _auto_round_values(
                    parts, bits, is_awq="awq" in form, keeps_zeros=form.endswith("gptqmodel")
                )
            return one

    return published


def _auto_round_values(
    parts: Tensors, bits: int, *, is_awq: bool, keeps_zeros: bool
) -> torch.Tensor:
    """The identity through the module that reads this packing on a CPU, or AutoAWQ's function for its packing."""
    if is_awq:
        from awq.utils.packing_utils import dequantize_gemm

        read: torch.Tensor = dequantize_gemm(
            parts["qweight"], parts["qzeros"], parts["scales"], bits, 32
        )
        return read.t()
    if keeps_zeros:
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    k, n = parts["qweight"].shape[0] * 32 // bits, parts["qweight"].shape[1]
    module: Any = QuantLinear(bits, 32, k, n, bias=False)
    module.load_state_dict(parts, strict=False)
    module.post_init()
    values: torch.Tensor = module(torch.eye(k)).t()
    return values.half()  # it computes in float16


# --- msmodelslim -------------------------------------------------------------------------------------------


def ascend() -> Published:
    """msmodelslim: quantized per channel and saved by its writer of Ascend's format, dequantized in float32."""
    from msmodelslim.core.quant_service.modelslim_v1.save.ascendv1 import AscendV1Saver
    from msmodelslim.ir.api import calculate_qparam, dequantize
    from msmodelslim.ir.api import quantize as to_int8
    from msmodelslim.ir.qal import QDType, QScope, QStorage
    from msmodelslim.ir.w8a8_dynamic import W8A8DynamicPerChannelFakeQuantLinear

    description: Json = {"model_quant_type": "W8A8_DYNAMIC"}
    written: Tensors = {}
    saver = AscendV1Saver.__new__(AscendV1Saver)
    saver.update_quant_type = lambda *_: None  # of the whole model
    saver.write_tensor = lambda name, kind, tensor: (
        written.update({name: tensor}),
        description.update({name: kind}),
    )

    def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        column = weight.t().contiguous()
        scale = calculate_qparam(
            column.amin(0), column.amax(0), QDType.INT8, QScope.PER_CHANNEL, True
        )
        stored = to_int8(QStorage(QDType.FLOAT, column), scale)
        read = dequantize(stored, scale).value.t()
        linear = W8A8DynamicPerChannelFakeQuantLinear(None, scale, stored.T, None)
        saver.on_w8a8_dynamic_per_channel(module, linear)
        return of_module(written, module), read

    one = qwen3_moe(named("msmodelslim"), BOTH, quantize, {})
    names = {f"{LAYER}.gate.weight": "FLOAT", **description}
    return replace(one, documents={**one.documents, "quant_model_description.json": names})


# --- compressed-tensors, of old ----------------------------------------------------------------------------


def actorder() -> Published:
    """compressed-tensors 0.10: columns in the order of g_idx, in bfloat16."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=32, actorder="group"
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    words = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    compressor = PackedQuantizationCompressor(config=words)

    def quantize(_module: str, drawn_weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        weight = drawn_weight.bfloat16()
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        groups = (torch.arange(weight.shape[1], dtype=torch.int32) // 32)[order]
        tiles = torch.stack(
            [weight[:, groups == group] for group in range(int(groups.max()) + 1)], 1
        )
        scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args)
        state = {"scale": scale.bfloat16(), "zero_point": zero, "g_idx": groups}
        packed = compressor.compress_weight(weight=weight, quantization_args=args, **state)
        parts = {**packed, "weight_scale": state["scale"], "weight_g_idx": groups}
        return parts, compressor.decompress_weight(parts, args)

    config = {**words.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    return qwen3_moe(named("compressed-tensors"), BOTH, quantize, {"quantization_config": config})


_GROUP: Json = {"ch_axis": -1, "group_size": 32, "is_dynamic": False}
_TENSOR: Json = {"is_dynamic": False, "observer_method": "min_max"}
_CHANNEL: Json = {"symmetric": True, "ch_axis": 0, "is_dynamic": False}
_STATIC: Json = {"ch_axis": -1, "is_dynamic": False}

RECORDED: dict[str, Callable[[], Published]] = {
    "modelopt-fp8": modelopt("FP8_DEFAULT_CFG", own_file=True),
    "modelopt-fp8-blocks": modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", hidden=256, inner=128),
    "modelopt-mxfp8": modelopt("MXFP8_DEFAULT_CFG"),
    "modelopt-nvfp4": modelopt("NVFP4_DEFAULT_CFG"),
    "modelopt-nvfp4-file": modelopt("NVFP4_DEFAULT_CFG", own_file=True),
    "gptq-int4": gptq(4, 32),
    "gptq-int4-zp": gptq(4, 32, sym=False),
    "gptq-v2-int4-zp": gptq(4, 32, sym=False, v2=True),
    "gptq-int2": gptq(2, 32),
    "gptq-int3": gptq(3, 32),
    "gptq-int8-zp": gptq(8, 32, sym=False),
    "gptq-channel": gptq(4, -1),
    "gptq-desc-act": gptq(4, 32, desc_act=True),
    "mixed-gptq-dynamic": gptq(4, 32, dynamic={r"+:model\.layers\.0\..*": {"bits": 8}}),
    "awq": autoawq,
    "awq-sym": auto_round("auto_awq", sym=True),
    "auto-round": auto_round("auto_round:gptqmodel", sym=True),
    "auto-round-gptq": auto_round("auto_round:auto_gptq", sym=False),
    "auto-round-awq": auto_round("auto_round:auto_awq", sym=False),
    "ascend-w8a8-file": ascend,
    "ct-int4-actorder": actorder,
    "quark-int4": quark("Int4PerGroupSpec", symmetric=True, **_GROUP),
    "quark-int4-order": quark("Int4PerGroupSpec", "order", symmetric=True, **_GROUP),
    "quark-int4-zp": quark("Int4PerGroupSpec", symmetric=False, **_GROUP),
    "quark-uint4": quark("Uint4PerGroupSpec", symmetric=False, **_GROUP),
    "quark-int8": quark("Int8PerChannelSpec", **_CHANNEL),
    "quark-fp8-tensor": quark("FP8E4M3PerTensorSpec", **_TENSOR),
    "quark-fp8-channel": quark("FP8E4M3PerChannelSpec", ch_axis=0, is_dynamic=False),
    "quark-mxfp4": quark("OCP_MXFP4Spec", **_STATIC),
    "quark-mxfp6-e2m3": quark("OCP_MXFP6E2M3Spec", **_STATIC),
    "quark-mxfp6-e3m2": quark("OCP_MXFP6E3M2Spec", **_STATIC),
    "quark-mxfp4-embedded": quark_embedded,
    "quark-int2": quark(
        "Int2PerGroupSpec", symmetric=True, scale_type="float", round_method="half_even", **_GROUP
    ),
    "quark-int4-tensor": quark(
        "Int4PerTensorSpec",
        symmetric=False,
        scale_type="float",
        round_method="half_even",
        **_TENSOR,
    ),
    "quark-int8-zp": quark("Int8PerGroupSpec", symmetric=False, **_GROUP),
    "quark-fp8-e5m2": quark("FP8E5M2PerChannelSpec", ch_axis=0, is_dynamic=False),
    "quark-fp4-fp8": quark(
        "ScaleQuantSpec",
        first_stage=("FP4PerGroupSpec", {"ch_axis": -1, "group_size": 16, "is_dynamic": False}),
        second_stage=("FP8E4M3PerTensorSpec", _TENSOR),
    ),
    "quark-int4-fp8": quark(
        "ProgressiveSpec",
        first_stage=("FP8E4M3PerTensorSpec", _TENSOR),
        second_stage=("Int4PerChannelSpec", _CHANNEL),
    ),
}


def main() -> None:
    """Record the named ones, or all."""
    for name in sys.argv[1:] or RECORDED:
        one = RECORDED[name]()
        one.record(name)
        print(f"{name}: {one.package}", flush=True)


if __name__ == "__main__":
    main()
