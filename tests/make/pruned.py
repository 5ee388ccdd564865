"""Checkpoints pruned by hand with transformers' own classes: the oracle of `--keep-experts`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import hqconv
from tests.make.families import make_family, moe_layers

Kept = Mapping[int, Sequence[int]]  # layer → experts to keep


def write_kept(path: Path, kept: Mapping[Any, Sequence[int]]) -> Path:
    """A file of `--keep-experts`."""
    path.write_text(json.dumps({str(layer): list(experts) for layer, experts in kept.items()}))
    return path


def prune(model: nn.Module, smaller: nn.Module, kept: Kept, num_experts: int) -> nn.Module:
    """`smaller`, a model of fewer experts, with the values of `model`: wherever a dimension of a parameter follows the
    number of experts, its entries of the kept ones, and what comes after all experts (scores of zero experts)."""
    values, pruned = model.state_dict(), {}
    for name, tensor in smaller.state_dict().items():
        layer = re.search(r"\.(\d+)\.", name)
        whole = values[name]
        axes = [axis for axis in range(whole.dim()) if whole.shape[axis] != tensor.shape[axis]]
        if axes:
            assert layer is not None, name
            assert len(axes) == 1, name
            chosen = [*kept[int(layer[1])]]
            if ".experts.mlp." in name:  # flat: all experts' rows one after the other
                whole = whole.view(num_experts, -1, whole.shape[1])[chosen].flatten(0, 1)
            else:
                after = range(num_experts, whole.shape[axes[0]])
                whole = whole.index_select(axes[0], torch.tensor([*chosen, *after]))
        pruned[name] = whole
    smaller.load_state_dict(pruned)
    return smaller


def make_pair(
    model_type: str, kept: Kept, num_experts: int, *, is_exact: bool = False, **words: Any
) -> tuple[nn.Module, nn.Module]:
    """A tiny model of a family, and the same one with some of its experts. is_exact: mxfp4 holds all experts."""
    number = len(next(iter(kept.values())))
    model = make_family(model_type, experts=num_experts, **words)
    if is_exact:
        in_mxfp4(model)
    return model, prune(model, make_family(model_type, experts=number, seed=1, **words), kept, num_experts)


def prune_file(folder: Path, out: Path, kept: Mapping[str, Sequence[int]], stacked: Sequence[str] = ()) -> Path:
    """A checkpoint of one file with some of its experts: renamed, or cut out of stacks, and the rows of `mlp.gate`.

    kept: experts module → experts. stacked: endings of tensors with an entry for each expert, which are cut.
    """
    out.mkdir()
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = next((layer for layer in kept if name.startswith(f"{layer.removesuffix('experts')}")), None)
        match = re.fullmatch(rf"{layer}\.(\d+)\.(.*)", name)
        if layer is None:
            tensors[name] = tensor
        elif match is not None:
            if int(match[1]) in kept[layer]:
                tensors[f"{layer}.{kept[layer].index(int(match[1]))}.{match[2]}"] = tensor
        elif name.endswith(("mlp.gate.weight", *stacked)):
            tensors[name] = tensor[torch.tensor(kept[layer])].contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    words = json.loads((folder / "config.json").read_bytes())
    words["num_experts"] = len(next(iter(kept.values())))
    (out / "config.json").write_text(json.dumps(words))
    for path in folder.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            (out / path.name).write_bytes(path.read_bytes())
    return out


def in_mxfp4(model: nn.Module) -> None:
    """Replace the experts' matrices by random values that mxfp4 holds exactly: of its codes, times 1/16."""
    with torch.no_grad():
        for _, _, module in moe_layers(model):
            for name, parameter in module.named_parameters():
                if "bias" not in name:
                    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(0, 8, parameter.shape)]
                    parameter.copy_(codes * (torch.randint(0, 2, parameter.shape) * 2 - 1) / 16)


def experts_apart(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices of each expert by the names of most families. values: as of `hqconv.dequantize`."""
    words = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return {f"{e}.{word}.weight": one for role, word in words.items() for e, one in enumerate(values[role])}


def experts_of_gpt_oss(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks of gpt_oss: gate and up alternate, and inputs come first."""
    return {
        "gate_up_proj": torch.stack([values["w1"], values["w3"]], 2).flatten(1, 2).transpose(1, 2),
        "gate_up_proj_bias": torch.stack([values["b1"], values["b3"]], 2).flatten(1),
        "down_proj": values["w2"].transpose(1, 2),
        "down_proj_bias": values["b2"],
    }


def load_artifact(
    out: Path, folder: Path, experts: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> nn.Module:
    """The model that transformers loads from an artifact: its config, its copied tensors, its experts dequantized."""
    folder.mkdir()
    words = json.loads((out / "config.json").read_bytes())
    words = {key: value for key, value in words.items() if key not in ("quantization_config", "transformers_weights")}
    tensors = {name: one for path in sorted(out.glob("*.safetensors")) for name, one in load_file(path).items()}
    for layer in json.loads((out / "hqconv.json").read_bytes())["blocks"]:
        tensors |= {f"{layer}.{name}": one for name, one in experts(hqconv.dequantize(out, layer=layer)).items()}
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(words))
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(problems.values()), problems
    found: nn.Module = model.eval()
    return found
