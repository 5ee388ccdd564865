"""Tiny models of the MoE families that GGUF files hold whole; written by transformers, with weights of a fixed seed."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.errors import HqconvError
from hqconv.sources.opening import open_source

RECORDED = Path(__file__).parents[1] / "data" / "gguf"
QUANTIZED = RECORDED.parent / "ggml"  # by scripts/record_gguf.py
VOCABULARY = 64

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_MLA = {
    **_ROUTED,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}

# case → class name without Config and ForCausalLM, and values of the config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe_yarn": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "head_dim": 32,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **_YARN},
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "hidden_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_MLA,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_MLA,
            "hidden_size": 64,
            "moe_intermediate_size": 64,
            "q_lora_rank": 40,
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                **_YARN,
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 8,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_ROUTED,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
    ),
    "dots1": ("Dots1", {**_ROUTED, "head_dim": 32, "norm_topk_prob": True}),
    "olmoe": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "rms_norm_eps": 1e-5},
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.125,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": 32,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "tie_word_embeddings": True,
        },
    ),
}
# The model that llama.cpp's quantizer wrote: with rows of whole blocks, and few different ones, so that it packs well.
WIDE = "mixtral_wide"
_WIDE = {
    WIDE: (
        "Mixtral",
        {
            "hidden_size": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size": 256,
        },
    )
}
_DIFFERENT_ROWS = 7  # which no order of heads or experts maps to themselves


def recorded_types() -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Of every ggml type the blocks [blocks, bytes] and their values [blocks, numbers], both llama.cpp's own."""
    with np.load(QUANTIZED / "types.npz") as arrays:
        names = [name.removesuffix(".blocks") for name in arrays if name.endswith(".blocks")]
        return {name: (arrays[f"{name}.blocks"], arrays[f"{name}.values"]) for name in names}


def decodable() -> list[Any]:
    """The types that the gguf library decodes."""
    import gguf

    kinds = []
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    return kinds


def write_quantized(path: Path) -> Path:
    """The GGUF file of WIDE, as llama.cpp's quantizer wrote it."""
    path.write_bytes(gzip.decompress((QUANTIZED / "Q4_K_M.gguf.gz").read_bytes()))
    return path


def recorded(case: str, folder: Path) -> Path:
    """The GGUF file of a case in a folder, as llama.cpp's converter wrote it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case}.gguf"
    path.write_bytes(gzip.decompress((RECORDED / f"{case}.gguf.gz").read_bytes()))
    return path


def write_recorded(case: str, folder: Path) -> Path:
    """A folder with a case's GGUF file."""
    return recorded(case, folder).parent


def refused(src: Path, kind: type[HqconvError], where: str) -> HqconvError:
    """The error of a source that cannot be opened or mapped; `where` is a pattern."""
    with pytest.raises(kind) as caught, open_source(src) as source:
        source.map_experts()
    assert re.search(where, caught.value.where), str(caught.value)
    return caught.value


def build(case: str) -> Any:
    """A case's model in transformers, with weights of a fixed seed; norms are near 1."""
    import transformers

    name, values = {**MODELS, **_WIDE}[case]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **values})
    config.dtype = torch.bfloat16
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    generator = np.random.default_rng(1)
    with torch.no_grad():
        for name, tensor in sorted(
            {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        ):
            if "rotary" in name or not tensor.is_floating_point():
                continue
            is_norm = "norm" in name and name.endswith("weight")
            center, spread = (1.0, 0.2) if is_norm else (0.0, 0.1)
            shape = tuple(tensor.shape)
            size = (_DIFFERENT_ROWS, shape[-1]) if case in _WIDE and len(shape) > 1 else shape
            numbers = np.resize(generator.normal(center, spread, size).astype(np.float32), shape)
            tensor.copy_(torch.from_numpy(numbers).to(torch.bfloat16))
    return model


def write(case: str, folder: Path) -> Path:
    """The checkpoint of a case, as transformers saves it; of glm4_moe with a draft layer, as its publisher does."""
    build(case).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    if case == "glm4_moe":
        config["num_nextn_predict_layers"] = 1
        _add_draft_layer(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rewrite(
    path: Path,
    out: Path,
    change: Callable[[str, np.ndarray[Any, Any], Any], tuple[np.ndarray[Any, Any], Any] | None]
    | None = None,
    keys: Mapping[str, Any] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Path:
    """Write a GGUF file anew. change: of a tensor, None leaves it out. keys: replaced; None leaves one out.

    part: number and count: every count-th tensor alone; metadata in number 0 only, as llama-gguf-split does it.
    """
    import gguf

    reader, keys = gguf.GGUFReader(path), dict(keys or {})
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = keys.pop("general.architecture", fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in fields.items() if not part[0] else ():
        if key == "general.architecture" or key in keys:
            continue
        of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        if field.contents() != []:
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=of)
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors[part[0] :: part[1]]:
        data, kind = np.asarray(tensor.data), tensor.tensor_type
        changed = (data, kind) if change is None else change(tensor.name, data, kind)
        if changed is not None:
            data, kind = changed
            writer.add_tensor(
                tensor.name,
                np.ascontiguousarray(data),
                raw_dtype=kind if data.dtype == np.uint8 else None,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_draft_layer(path: Path) -> None:
    """Add layer 2, which predicts a second token: the weights of layer 1 in reverse, and its own modules."""
    tensors = load_file(path)
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    prefix, norm, embedding = (
        "model.layers.2",
        tensors["model.norm.weight"],
        tensors["model.embed_tokens.weight"],
    )
    tensors |= {
        name.replace("layers.1.", "layers.2."): tensor.flip(0).contiguous()
        for name, tensor in last.items()
    }
    tensors |= {
        f"{prefix}.{name}.weight": norm.clone() + i
        for i, name in enumerate(("enorm", "hnorm", "shared_head.norm"))
    }
    tensors |= {
        f"{prefix}.{name}.weight": embedding.clone() * 2
        for name in ("embed_tokens", "shared_head.head")
    }
    tensors[f"{prefix}.eh_proj.weight"] = torch.cat((embedding[:32], embedding[32:]), dim=1)
    save_file(tensors, path, metadata={"format": "pt"})
