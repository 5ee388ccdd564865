"""Small checkpoints that publishers' own packages wrote or read, and the weights as these packages dequantize them.

Each holds the experts of one layer under the names of a known family. Recorded ones are safetensors files in
tests/golden/publishers, by scripts/record_publishers.py; live ones are made by the installed package
(`tests.make.proofs_live`). This module imports nothing of hqconv: the recorder runs where it is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

RECORDINGS = Path(__file__).resolve().parents[1] / "golden" / "publishers"
ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_VALUES = "values."  # begins the names of dequantized weights in a recording

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """A checkpoint: its tensors and JSON files, and its experts' weights as the package gives them.

    values: "expert.role" (0.w1) to the weights [out, in], in the dtype that the package computes in. package: name and
    version. wrote: what the package did, "wrote and read" or "read". roundings: float32 roundings of its two products
    where they are in another order than ours, so that the last bit may differ; else 1.
    """

    package: str
    wrote: str
    tensors: Tensors
    documents: Mapping[str, Json]
    values: Tensors
    roundings: int = 1

    def checkpoint(self, folder: Path) -> Path:
        """Write it as a checkpoint into a new folder."""
        folder.mkdir()
        save_file(
            {name: one.contiguous().clone() for name, one in self.tensors.items()},
            folder / "model.safetensors",
        )
        for name, document in self.documents.items():
            (folder / name).write_text(json.dumps(document))
        return folder

    def record(self, name: str) -> None:
        """Write it as a recording."""
        RECORDINGS.mkdir(exist_ok=True)
        tensors = {**self.tensors, **{f"{_VALUES}{key}": one for key, one in self.values.items()}}
        tensors = {key: one.detach().contiguous().clone() for key, one in sorted(tensors.items())}
        facts = {"package": self.package, "wrote": self.wrote, "roundings": str(self.roundings)}
        facts["documents"] = json.dumps(self.documents, sort_keys=True)
        path = RECORDINGS / f"{name}.safetensors"
        save_file(tensors, path, facts)
        path.chmod(0o644)


def named(package: str) -> str:
    """Name and version of an installed package."""
    return f"{package} {version(package)}"


def recording(name: str) -> Published:
    """A recording."""
    with safe_open(RECORDINGS / f"{name}.safetensors", "pt") as file:
        facts = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    values = {
        key.removeprefix(_VALUES): one for key, one in tensors.items() if key.startswith(_VALUES)
    }
    kept = {key: one for key, one in tensors.items() if not key.startswith(_VALUES)}
    documents = json.loads(facts["documents"])
    return Published(
        facts["package"], facts["wrote"], kept, documents, values, int(facts["roundings"])
    )


def recorded() -> list[str]:
    """Names of all recordings."""
    return sorted(path.stem for path in RECORDINGS.glob("*.safetensors"))


# Formats of tests/make/formats.py whose matrices are those of another format: only names, order or config differ.
SAME_AS = {
    "fp8-tensor-apart": "fp8-tensor",
    "modelopt-nvfp4-apart": "modelopt-nvfp4",
    "ascend-w8a8": "ascend-w8a8-file",
    "awq-router-gate": "awq",
    "quark-mxfp4-gpt-oss": "quark-mxfp4",
    "mixed-ct-ignore": "ct-int4-g128",
}
# Formats of which tests/formats/test_written.py decodes one matrix that the package wrote, from its headers on: what
# the package did, and when.
BY_MATRIX = {
    "modelopt-mxfp4": ("nvidia-modelopt 0.47.0", "wrote and read one matrix", "recorded"),
    "auto-round-mxfp4": ("auto-round 0.16.1", "wrote one matrix", "recorded"),
    "auto-round-mxfp8": ("auto-round 0.16.1", "wrote one matrix", "recorded"),
    "auto-round-nvfp4": ("auto-round 0.16.1", "wrote one matrix", "recorded"),
    "fp8-gptqmodel": ("gptqmodel 7.7.0", "wrote one matrix", "recorded"),
    "ct-mxfp6": ("compressed-tensors 0.20.0", "wrote and read one matrix", "live"),
}
# Formats that no publisher's package has written or read here, and why.
NOT_PROVEN = {
    "w4afp8": "no package writes it alone; the order of its pairs is that of a test of vLLM",
    "modelopt-nvfp4-fp8": "no tensors of its package have been recorded yet",
    "modelopt-int8": "no tensors of its package have been recorded yet",
    "fbgemm-fp8": "its kernels need a GPU, and transformers has no other reader",
    "fused-fp8-expert": "no package was found that writes such stacks and gives their values",
    "fused-fp8-projection": "no package was found that writes such stacks and gives their values",
    "fused-fbgemm-fp8": "its kernels need a GPU, and transformers has no other reader",
}

# --- a checkpoint of one layer -----------------------------------------------------------------------------

LAYER = "model.layers.0.mlp"
HIDDEN, INNER = 64, 32


def shape_of(role: str, hidden: int = HIDDEN, inner: int = INNER) -> tuple[int, int]:
    """[out, in] of a projection."""
    return (hidden, inner) if role == "w2" else (inner, hidden)


def drawn(role: str, hidden: int = HIDDEN, inner: int = INNER, seed: int = 0) -> torch.Tensor:
    """Float32 weights to quantize: normal, with a few large ones, so that codes and scales differ."""
    generator = torch.Generator().manual_seed(seed * 3 + list(ROLES).index(role))
    weight = torch.randn(shape_of(role, hidden, inner), generator=generator) * 0.05
    rows = 2.0 ** torch.randint(-2, 3, (len(weight), 1), generator=generator)
    return weight * rows + 0.01


def qwen3_moe(
    package: str,
    wrote: str,
    quantize: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    documents: Json,
    *,
    hidden: int = HIDDEN,
    inner: int = INNER,
    dtype: str = "bfloat16",
    config: Json | None = None,
) -> Published:
    """A layer of Qwen3-MoE with one expert.

    quantize: a module's name and its float32 weight to its tensors, by the end of their names, and its weights as
    dequantized. documents: the quantization's own files, or "quantization_config" for the one in config.json.
    """
    documents = dict(documents)
    tensors: Tensors = {f"{LAYER}.gate.weight": torch.ones(1, hidden, dtype=torch.bfloat16)}
    values = {}
    for role, word in ROLES.items():
        module = f"{LAYER}.experts.0.{word}"
        parts, values[f"0.{role}"] = quantize(module, drawn(role, hidden, inner))
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    words: Json = {**model_config(hidden, inner), "torch_dtype": dtype, **(config or {})}
    if "quantization_config" in documents:
        words["quantization_config"] = documents.pop("quantization_config")
    return Published(package, wrote, tensors, {"config.json": words, **documents}, values)


def model_config(
    hidden: int, inner: int, model_type: str = "qwen3_moe", num_experts: int = 1
) -> Json:
    """The model's part of config.json."""
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "num_hidden_layers": 1,
    }


def roles_of(values: Tensors) -> Iterator[tuple[int, str]]:
    """Expert and role of each key of `Published.values`."""
    for key in values:
        expert, _, role = key.partition(".")
        yield int(expert), role
