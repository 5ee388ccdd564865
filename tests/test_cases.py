"""Checkpoints as public bug reports describe them: each converts to what its format means, or is refused in a sentence.

The meaning of codes and scales is known from the writer (`tests.make.layouts`), which shares nothing with hqconv.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import InputError
from hqconv.sources.opening import open_source
from tests.make import configs
from tests.make import packing as pack
from tests.make.configs import Json
from tests.make.layouts import GPT_OSS, QWEN3_MOE, Block, Layout, Sizes, plain, write_checkpoint
from tests.make.packing import Draw, Encoder, Stored
from tests.make.qwen import write_qwen3_moe

SIZES = Sizes(256, 128, 4)
LAYER = "model.layers.{layer}"
GATE_UP_DOWN, W1_W3_W2 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def _local_experts(model_type: str) -> Callable[[Sizes], Json]:
    return lambda sizes: {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": 2,
    }


SPARSE = f"{LAYER}.block_sparse_moe"
GRANITE = Layout(f"{SPARSE}.experts", GATE_UP_DOWN, _local_experts("granitemoe"), f"{SPARSE}.router.layer.weight")
MIXTRAL = Layout(f"{SPARSE}.experts", W1_W3_W2, _local_experts("mixtral"), f"{SPARSE}.gate.weight")
APART = replace(GPT_OSS, fused=None)
INT4 = configs.compressed("pack-quantized", 4, "int", "group", group_size=32)
MXFP4 = configs.compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32)


def changed(config: Json, **words: Any) -> Json:
    """The config with other words of its quantization; `targets` of its one group."""
    quantization: Json = json.loads(json.dumps(config["quantization_config"]))
    if "targets" in words:
        quantization["config_groups"]["group_0"]["targets"] = words.pop("targets")
    return {"quantization_config": {**quantization, **words}}


def _write(folder: Path, layout: Layout, encode: Encoder, config: Json) -> dict[str, Block]:
    return write_checkpoint(
        folder, layout, [encode, encode], SIZES, dense=plain, config={"torch_dtype": "bfloat16", **config}
    )


# --- what converts --------------------------------------------------------------------------------------------


def dead_expert(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """NVFP4 as llm-compressor writes an expert without any weight: codes and scales 0, and 2688 / 0."""
    stored = pack.nvfp4("weight_packed", divides=True)(draw, n, k, second)
    if draw.integers(0, 3, 1).item():
        return stored
    parts = {
        name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in stored.parts.items()
    }
    parts |= {name: torch.tensor([torch.inf]) for name in ("weight_global_scale", "input_global_scale")}
    return Stored(parts, torch.zeros(n, k, dtype=torch.float64), torch.zeros(n, k, dtype=torch.float64))


class Converts(NamedTuple):
    """Layout, matrices and config of a checkpoint that converts exactly. notice: part of a warning of its plan."""

    layout: Layout
    encode: Encoder
    config: Json
    notice: str = ""


CONVERTS = {
    "granitemoe with a tensor for each expert": Converts(
        GRANITE, pack.fp8(dtype=torch.bfloat16), configs.compressed("float-quantized", 8, "float", "channel")
    ),
    "mixtral, targets name the modules of the linearized class": Converts(
        MIXTRAL,
        pack.mxfp4("weight_packed"),
        changed(MXFP4, targets=["re:.*mlp\\.experts\\.[0-9]+\\.(gate|up|down)_proj$"]),
    ),
    "mixtral under the names of llm-compressor": Converts(
        replace(MIXTRAL, words=GATE_UP_DOWN), pack.pack_quantized(4, 32), INT4
    ),
    "ignored names are those of the experts' parents": Converts(
        QWEN3_MOE,
        pack.pack_quantized(4, 32),
        changed(INT4, ignore=["lm_head", *(f"model.layers.{n}.mlp.experts.{e}" for n in (0, 1) for e in range(4))]),
    ),
    "an expert that no token has seen": Converts(
        QWEN3_MOE, dead_expert, configs.compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16)
    ),
    "gpt-oss with gate and up apart": Converts(
        APART, pack.pack_quantized(4, 32), changed(INT4, targets=["re:.*mlp.experts.*"], version="0.17.1"), "halves"
    ),
}


@pytest.mark.parametrize("name", CONVERTS)
def test_it_converts_to_what_it_means(name: str, tmp_path: Path) -> None:
    case, src = CONVERTS[name], tmp_path / "src"
    truth = _write(src, case.layout, case.encode, case.config)
    with open_source(src) as source:
        layers = {layer.name: layer for layer in source.map_experts().layers}
        assert layers.keys() == truth.keys()
        for layer, expert in itertools.product(truth, range(SIZES.experts)):
            for role, matrix in source.read_expert(layers[layer], expert, W1_W3_W2, torch.device("cpu")).items():
                found, expected = matrix.values().float(), truth[layer][role][expert]
                assert torch.equal(found + 0.0, expected + 0.0), (layer, expert, role)
    options: dict[str, Any] = {"schema": "int4-g32", "target": "sm90"}
    plan = hqconv.plan(src, **options)
    assert any(case.notice in text for text in (*plan.warnings, *plan.notices, ""))
    hqconv.convert(src, tmp_path / "out", device="cpu", **options)
    assert hqconv.verify(tmp_path / "out", src, checks=("files", "weights"), device="cpu").passed


# --- what is refused ------------------------------------------------------------------------------------------


def tensors_of(src: Path) -> dict[str, torch.Tensor]:
    return load_file(src / "model.safetensors")


def save(src: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, src / name, {"format": "pt"})


def stray_file(src: Path) -> None:
    """Two shards with their index, and the single file of another save."""
    tensors = tensors_of(src)
    shards = [dict(list(tensors.items())[number::2]) for number in (0, 1)]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save(src, shard, name)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save(src, {key: tensor * 2 for key, tensor in tensors.items()})


def leftover_config(src: Path) -> None:
    """Merged to 16 bits, with the config of the quantization before."""
    config = json.loads((src / "config.json").read_bytes())
    (src / "config.json").write_text(json.dumps(config | configs.bitsandbytes("nf4", False)))


def adapter(src: Path) -> None:
    """LoRA on attention that was saved without being merged."""
    tensors, module = tensors_of(src), "model.layers.0.self_attn.q_proj"
    more = {"base_layer.weight": (128, 128), "lora_A.default.weight": (8, 128), "lora_B.default.weight": (128, 8)}
    save(src, tensors | {f"{module}.{name}": torch.zeros(shape) for name, shape in more.items()})


def no_router(src: Path) -> None:
    save(src, {key: tensor for key, tensor in tensors_of(src).items() if key != "model.layers.1.mlp.gate.weight"})


def cut_for_ranks(src: Path) -> None:
    """A file for each tensor-parallel rank, with its part of every expert, and one of the rest."""
    tensors = tensors_of(src)
    (src / "model.safetensors").unlink()
    save(src, {key: one for key, one in tensors.items() if ".experts." not in key}, "model-00000-TP-common.safetensors")
    for rank in (0, 1):
        cut = {key: one.chunk(2, 1 if "down" in key else 0)[rank] for key, one in tensors.items() if ".experts." in key}
        save(src, cut, f"model-00001-TP-00{rank}.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a stray single file beside the index": (
        stray_file,
        ("model.safetensors.index.json, which", "and model.safetensors"),
    ),
    "a config of the quantization before": (leftover_config, ("take quantization_config out of config.json",)),
    "an adapter that was not merged": (adapter, ("Merge the adapter", "lora_A.default.weight")),
    "a layer without a router": (no_router, ("experts and no router", "model.layers.1.mlp")),
    "tensors cut for ranks": (cut_for_ranks, ("cut for tensor-parallel ranks", "TP-000.safetensors")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    src = write_qwen3_moe(tmp_path / "src")
    change(src)
    for call in (hqconv.inspect, lambda src: hqconv.plan(src, schema="int4-g32", target="sm90")):
        with pytest.raises(InputError) as caught:
            call(src)
        assert all(word in str(caught.value) for word in words), caught.value
