"""The models that check_serving.py serves: sources, their conversions, and 16-bit checkpoints of decoded experts."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.schemas import artifact_names as names
from scripts.large_artifact import grow
from scripts.shared import make_source


def source_of(a: argparse.Namespace) -> Path:
    """The 16-bit checkpoint that everything comes from."""
    folder: Path = a.work / f"{a.model_type}-{a.dtype}-{a.layers}x{a.experts}"
    if not folder.exists() and a.model_type == "gpt_oss":
        write_gpt_oss(folder, a)
    elif not folder.exists():
        sizes = {key: getattr(a, key) for key in ("hidden", "intermediate", "layers", "experts", "dtype")}
        make_source(folder, **sizes, model_type=a.model_type, distinct_layers=2, shard_size="2GB")
    return folder


def write_gpt_oss(folder: Path, a: argparse.Namespace) -> None:
    """A tiny GPT-OSS whose experts are mxfp4 of random codes, with biases, as the original is stored."""
    import transformers

    config = transformers.GptOssConfig(
        hidden_size=a.hidden,
        intermediate_size=a.intermediate,
        num_hidden_layers=a.layers,
        num_local_experts=a.experts,
        num_experts_per_tok=4,
        num_attention_heads=a.hidden // 64,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=2048,
        max_position_embeddings=4096,
        torch_dtype=a.dtype,
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to(getattr(torch, a.dtype))
    tensors = {name: t for name, t in model.state_dict().items() if not name.endswith("_proj")}
    for layer in range(a.layers):
        for name, rows, columns in (
            ("gate_up_proj", 2 * a.intermediate, a.hidden),
            ("down_proj", a.hidden, a.intermediate),
        ):
            shape, prefix = (a.experts, rows, columns // 32), f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{prefix}_scales"] = torch.randint(117, 122, shape, dtype=torch.uint8)
            tensors[f"{prefix}_bias"] = torch.randn(a.experts, rows).mul(0.1).to(getattr(torch, a.dtype))
    folder.mkdir()
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(folder)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def convert(a: argparse.Namespace, source: Path, schema: str, layout: names.Layout) -> Path:
    """One conversion, unless it is there."""
    grid = {"tp": 1, "ep": a.tp} if a.ep else {"tp": a.tp, "ep": 1}
    if layout == "checkpoint":
        grid = {"tp": 1, "ep": 1}
    out: Path = a.work / f"{source.name}-{schema}-{layout}-tp{grid['tp']}-ep{grid['ep']}"
    if not out.exists():
        hqconv.convert(source, out, schema=schema, layout=layout, dtype=a.dtype, target="sm90", **grid)
    return out


LARGE = {"intermediate": 1536, "hidden": 4096, "experts": 128, "top_k": 8}  # layers of Qwen3-235B-A22B
SMALLER = {**LARGE, "intermediate": 768, "hidden": 2048}  # and of Qwen3-30B-A3B


def large(work: Path, size_gb: float) -> Path:
    """An mxfp4 artifact of about this many GB: one converted layer as often as it takes."""
    sizes = LARGE if size_gb > 30 else SMALLER
    source, small, out = work / "one-layer", work / "one-layer-mxfp4", work / f"artifact-{size_gb:g}GB"
    for folder in (source, small, out, *work.glob(f"{out.name}-*")):  # kernels of an earlier run, too
        shutil.rmtree(folder, ignore_errors=True)
    make_source(source, **sizes, layers=1, shard_size="2GB")
    hqconv.convert(source, small, schema="mxfp4", dtype="bfloat16", target="sm90")
    shutil.rmtree(source)
    one = sum(path.stat().st_size for path in (small / names.EXPERTS_FOLDER).rglob("*.safetensors"))
    grow(small, out, max(1, round(size_gb * 1e9 / one)))
    shutil.rmtree(small)
    return out


def decoded(a: argparse.Namespace, source: Path, artifact: Path) -> Path:
    """The source with the artifact's experts, decoded and rounded to 16 bits."""
    out: Path = a.work / f"{artifact.name}-decoded"
    if not out.exists():
        decode_into(out, source, artifact)
    return out


def decode_into(out: Path, source: Path, artifact: Path) -> None:
    """Write the source, in its dtype, with the artifact's experts decoded."""
    out.mkdir()
    shards = sorted(source.glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for layer in json.loads((artifact / names.MANIFEST).read_text(encoding="utf-8"))["blocks"]:
        experts = hqconv.dequantize(artifact, layer=layer)
        for role, word in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            for index, matrix in enumerate(experts[role]):
                name = f"{layer}.{index}.{word}.weight"
                tensors[name] = matrix.to(tensors[name].dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*.json"):
        if path.name != names.INDEX:
            (out / path.name).write_bytes(path.read_bytes())
