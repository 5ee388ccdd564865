"""Artifacts in vLLM's whole model classes, through the plugin, on a machine without a GPU: built, loaded, compared.

Run as a program, `python -m tests.make.vllm_serving OUT [CASE…]`, as `vllm_models`, whose stand-ins these are. A case
is a model type (all that can be built, where none is named), or one of `vllm_quantized`. A small model is converted,
and vLLM builds and loads its class twice: from the artifact, and from the source without hqconv. All memory is filled
with one byte before, so that it can be told what was not loaded.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make import vllm_models  # isort: skip  - before vLLM
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.humming import HummingMoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model

from hqconv.artifact.load import RankGemm, load_layer
from hqconv.errors import HqconvError
from hqconv.serving.vllm.plugin import register
from hqconv.warm.no_gpu import building
from tests.make import vllm_quantized
from tests.make.conversions import manifest, run
from tests.make.families import FAMILIES, save_family
from tests.make.vllm_cpu import as_bytes, humming_on_cpu
from tests.make.vllm_lists import DRAFTS, LEFT_OUT, STOCK, Draft

SCHEMA = "int8"  # which fits every family's tiny sizes
SIZES = {"hidden": 64, "inner": 64}
MORE_SIZES = {
    "deepseek_v4": {"head_dim": 512, "qk_rope_head_dim": 64},
    "minimax_m3_vl": {"shared_intermediate_size": 64},
    "hy_v3": {"expert_hidden_dim": 64},
}
POISON = 0x7E  # a huge number in every dtype
KINDS = (CompressedTensorsConfig, Fp8Config, ModelOptFp8Config, Mxfp4Config)
# What vLLM registers among the experts' parameters and is the router's.
ROUTING = ("e_score_correction_bias", "hash_indices_table")

NOT_DRAFTED = (
    "tid2eid",
    "attn.compressor",
)  # DeepSeek-V4's drafts choose by scores, and compress nothing
# What transformers saves otherwise than publishers do, and vLLM reads only as publishers do; None: left out.
NAMES: dict[str, dict[str, str | None]] = {
    "deepseek_v4": {
        r"model\.hc_head\.hc_": "hc_head_",
        r"model\.embed_tokens": "embed",
        r"model\.": "",
        r"(.*\.attn\.)norm": r"\1kv_norm",
    },
    "inkling_mm_model": {r"model\.(audio|visual)\..*": None},
    "kimi_linear": {r"(model\.layers\.0\.)block_sparse_moe": r"\1mlp"},
    "minimax_m3_vl": {r"(.*vision_model\..*)block_sparse_moe": r"\1mlp"},
}


def publish(folder: Path, model_type: str, hidden: int) -> None:
    """Have a saved model's folder as publishers have it: their names, and the tensors of a draft."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for pattern, new in NAMES.get(model_type, {}).items():
        found = {name: re.match(pattern, name) for name in tensors}
        tensors = {
            name if match is None else match.expand(new or "") + name[match.end() :]: tensors[name]
            for name, match in found.items()
            if match is None or new is not None
        }
    if model_type in DRAFTS:
        tensors |= _draft(tensors, hidden, DRAFTS[model_type])
    for path in (*files, folder / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _draft(
    tensors: Mapping[str, torch.Tensor], hidden: int, draft: Draft
) -> dict[str, torch.Tensor]:
    """The last layer's tensors under other names, and what joins the draft to the model."""
    first = next(iter(draft.moved.values()))
    moved = {
        new + name[len(old) :]: tensor.clone()
        for old, new in draft.moved.items()
        for name, tensor in tensors.items()
        if name.startswith(old) and not any(word in name for word in NOT_DRAFTED)
    }
    wide, square = (hidden, 2 * hidden), (hidden, hidden)
    shapes = {"eh_proj": wide, "mtp.fc": wide, "e_proj": square, "h_proj": square}
    shapes["shared_head.head"] = (64, hidden)
    for name in draft.modules:
        full = name if name.startswith("mtp.") else f"{first}{name}"
        moved[f"{full}.weight"] = torch.randn(shapes.get(name, (hidden,))).bfloat16()
    return moved


# --- one model ---------------------------------------------------------------------------------------------


def load(
    vllm: VllmConfig, model_config: ModelConfig, before: Callable[[torch.nn.Module], object] = id
) -> dict[str, Any]:
    """Build and load a model, as vLLM's default loader does, and fill its experts. before: of what is loaded."""
    with building(vllm), humming_on_cpu():
        model = initialize_model(vllm_config=vllm, model_config=model_config)
        before(model)
        for parameter in model.parameters():
            parameter.data.reshape(-1).view(torch.uint8).fill_(POISON)
        weights = DefaultModelLoader(vllm.load_config).get_all_weights(model_config, model)
        named = set(model.load_weights(weights) or ())
        for _, layer in experts_of(model):
            if type(layer.quant_method).__name__ == "HqconvMoEMethod":
                layer.quant_method.process_weights_after_loading(layer)
    return {"model": model, "named": named, "config": vllm.quant_config}


def load_all(folder: Path, is_drafted: bool) -> dict[str, dict[str, Any]]:
    """A folder's model, and its draft, loaded by a config that was sent to another process; or what was raised."""
    try:
        vllm, draft = vllm_models.configure(folder, is_drafted)
        vllm = pickle.loads(pickle.dumps(vllm))
        loaded = {"main": load(vllm, vllm.model_config)}
        if draft is not None:
            vllm.compilation_config.static_forward_context.clear()
            loaded["draft"] = load(vllm, draft)
        return loaded
    except HqconvError as error:
        return {"main": {"refused": str(error)}}
    except Exception as error:  # noqa: BLE001 - the test's to judge
        return {"main": {"error": f"{type(error).__name__}: {error}"[:400]}}


def experts_of(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The layers of experts by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
    ]


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model but for its experts', as bytes."""
    experts = [name for name, _ in experts_of(model)]
    return {
        name: parameter.data.reshape(-1).view(torch.uint8)
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in experts or name.rpartition(".")[2] in ROUTING
    }


def layers_of(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """What the layers of experts have become."""
    for _, layer in experts_of(model):
        method = layer.quant_method
        facts = {"prefix": layer.layer_name, "method": type(method).__name__}
        if facts["method"] == "HqconvMoEMethod":
            name, stored = method.stored.name, load_file(method.file.path)
            found = {f"{name}.{n}": p for n, p in layer.named_parameters() if n not in ROUTING}
            facts |= {"block": name, "activation": layer.activation.value}
            facts["limit"] = layer.swiglu_limit
            facts["holds_its_file"] = found.keys() == stored.keys() and all(
                torch.equal(stored[name], found[name]) for name in stored
            )
        yield facts


def methods_of(model: torch.nn.Module) -> dict[str, str]:
    """How the layers other than experts are stored."""
    found = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    experts = [name for name, _ in experts_of(model)]
    return {
        name: type(method).__name__
        for name, method in found.items()
        if isinstance(method, QuantizeMethodBase)
        and not any(expert.startswith(name) for expert in experts)
    }


def linear_of(model: torch.nn.Module, out: Path, *, is_draft: bool) -> dict[str, bool]:
    """Linear groups of an artifact that a layer of the model is for, and whether it holds their tensors."""
    paths = sorted(out.glob("*.safetensors"))
    stored = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    groups, found = manifest(out)["linear_layers"], {}
    for name, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ != "HummingLinearMethod":
            continue
        ending = name[name.index("layers.") :].replace(".attn.", ".self_attn.")
        ending = ending.replace(".mtp_block.", ".")
        fitting = [group for group in groups if group.endswith(f".{ending}")]
        [group] = [name for name in fitting if name.startswith("mtp.") == is_draft] or fitting
        parent = group.rpartition(".")[0]
        modules = [f"{parent}.{module_name}" for module_name in groups[group]["shapes"]]
        held = []
        for part, parameter in module.named_parameters():
            if part != "bias":
                each = [stored[f"{module_name}.{part}"] for module_name in modules]
                expected = each[0] if each[0].numel() == 1 else torch.cat(each)
                held.append(torch.equal(as_bytes(parameter), as_bytes(expected)))
        found[group] = bool(held) and all(held)
    return found


def described(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """What a model has become."""
    values, config = parameters_of(loaded["model"]), loaded["config"]
    return {
        "layers": list(layers_of(loaded["model"])),
        "unloaded": sorted(name for name, value in values.items() if bool((value == POISON).all())),
        "methods": methods_of(loaded["model"]),
        "kinds": [kind.__name__ for kind in KINDS if isinstance(config, kind)],
        "method": config.get_name(),
    }


def compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM makes of the source without hqconv, and where the artifact's layers are not the same."""
    if "model" not in theirs:
        return {"source": theirs["error"]}
    found, wanted = parameters_of(ours["model"]), parameters_of(theirs["model"])
    experts = tuple(f"{name}." for name, _ in experts_of(theirs["model"]))
    named = {
        name for name in theirs["named"] if not name.startswith(experts) or name.endswith(ROUTING)
    }
    unlike = {n for n in found.keys() & wanted.keys() if not torch.equal(found[n], wanted[n])}
    methods = methods_of(ours["model"]).items() ^ methods_of(theirs["model"]).items()
    return {
        "unlike": sorted((found.keys() ^ wanted.keys()) | unlike),
        "unnamed": sorted(named - ours["named"]),
        "other_methods": sorted(methods),
    }


def is_read_by_stock_vllm(folder: Path, source: Path) -> bool:
    """Whether vLLM's class, without hqconv, makes of the checkpoint layout what the kernel layout holds."""
    packed, kernel = folder / "packed", folder / "kernel"
    run(source, packed, "mxfp4", layout="checkpoint", threads=1)
    run(source, kernel, "mxfp4", threads=1)
    vllm, _ = vllm_models.configure(packed, False)
    with building(vllm), humming_on_cpu():
        model = initialize_model(vllm_config=vllm, model_config=vllm.model_config)
        layers = [layer for _, layer in experts_of(model)]
        blocks = list(manifest(packed)["blocks"])[: len(layers)]  # drafts follow
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.data.view(torch.uint8).fill_(POISON)
        stored = {
            name: tensor
            for path in sorted(packed.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
            if name.startswith(tuple(f"{block}." for block in blocks)) and "shared" not in name
        }
        try:
            model.load_weights(iter(stored.items()))
        except (AttributeError, KeyError, ValueError):
            return False
        return all(
            _has_become(layer, load_layer(kernel, block))
            for layer, block in zip(layers, blocks, strict=True)
        )


def _has_become(layer: Any, expected: Mapping[str, RankGemm]) -> bool:
    if not isinstance(layer.quant_method, HummingMoEMethod):
        return False
    layer.quant_method.process_weights_after_loading(layer)
    found = {n: as_bytes(p) for n, p in layer.named_parameters() if n not in ROUTING}
    wanted = {
        f"{gemm}_{name}": as_bytes(tensor)
        for gemm, loaded in expected.items()
        for name, tensor in loaded.tensors.items()
    }
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def ask(folder: Path, case: str) -> dict[str, Any]:
    """Convert a small model and compare what vLLM makes of it, and of its draft where it has one."""
    model_type, _, dense = case.partition("+")
    source, out, stored = (
        folder / "source",
        folder / "artifact",
        vllm_quantized.CASES.get(model_type),
    )
    model_type = stored.model_type if stored else model_type
    more: dict[str, Any] = {
        **SIZES,
        **MORE_SIZES.get(model_type, {}),
        **(stored.words if stored else {}),
    }
    save_family(source, model_type, **more)
    drafted = vllm_models.reword(source, model_type, **MORE_SIZES.get(model_type, {}))
    publish(source, model_type, more["hidden"])
    if stored:
        vllm_quantized.store(source, stored)
    asked = {"dense": dense} if dense else {}
    run(source, out, stored.schema if stored else SCHEMA, threads=1, **asked)
    answers: dict[str, Any] = {"blocks": list(manifest(out)["blocks"]), "drafted": drafted}
    if dense:
        parts = load_all(out, bool(drafted))
        answers["linear"], answers["groups"] = {}, list(manifest(out)["linear_layers"])
        for part, loaded in parts.items():
            if "model" not in loaded:
                return answers | loaded
            answers["linear"] |= linear_of(loaded["model"], out, is_draft=part == "draft")
            answers[part] = described(loaded)
        if stored:
            answers["main"] |= compared(parts["main"], load_all(source, False)["main"])
        return answers
    if case in STOCK:
        answers["is_read_by_stock_vllm"] = is_read_by_stock_vllm(folder, source)
    ours, theirs = load_all(out, bool(drafted)), load_all(source, bool(drafted))
    for part, loaded in ours.items():
        answers[part] = loaded
        if "model" in loaded:
            answers[part] = described(loaded) | compared(loaded, theirs.get(part, theirs["main"]))
    return answers


if __name__ == "__main__":
    register()
    vllm_models.answer(
        Path(sys.argv[1]), ask, sys.argv[2:] or sorted(set(FAMILIES) - set(LEFT_OUT))
    )
