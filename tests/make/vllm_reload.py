"""`reload_weights` in vLLM's whole model classes on a machine without a GPU: compared with a fresh start.

Run as a program, `python -m tests.make.vllm_reload OUT MODEL_TYPE…`, as `vllm_serving`. Two steps of a small model's
training are converted; the server's model is loaded from the first and reloaded from the second.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make import vllm_models  # isort: skip  - before vLLM
from tests.make import vllm_serving  # isort: skip
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import inplace, layerwise

from hqconv.serving.vllm.plugin import register
from tests.make.conversions import run
from tests.make.families import save_family
from tests.make.vllm_cpu import humming_on_cpu


def start(folder: Path) -> tuple[Any, torch.nn.Module]:
    """A server's config and model, loaded; before that vLLM notes the parameters as the classes make them."""
    vllm, _ = vllm_models.configure(folder, False)
    model = vllm_serving.load(vllm, vllm.model_config, before=layerwise.record_metadata_for_reloading)["model"]
    return vllm, model


def state(model: torch.nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {
        name: (one.data_ptr(), one.data.reshape(-1).view(torch.uint8).clone()) for name, one in model.named_parameters()
    }


def ask(folder: Path, model_type: str) -> dict[str, Any]:
    """Reload a model, and compare it with a fresh start."""
    first, second = folder / "source", folder / "second"
    save_family(first, model_type, **vllm_serving.SIZES, **vllm_serving.MORE_SIZES.get(model_type, {}))
    vllm_models.reword(first, model_type, **vllm_serving.MORE_SIZES.get(model_type, {}))
    vllm_serving.publish(first, model_type, vllm_serving.SIZES["hidden"])
    second.mkdir()
    for path in first.iterdir():
        if path.suffix != ".safetensors":
            (second / path.name).write_bytes(path.read_bytes())
    tensors = load_file(first / "model.safetensors")
    moved = {name: one * 0.5 if one.is_floating_point() else one for name, one in tensors.items()}
    save_file(moved, second / "model.safetensors", {"format": "pt"})
    for source in (first, second):
        run(source, folder / f"{source.name}-out", vllm_serving.SCHEMA, threads=1)
    _, fresh = start(folder / "second-out")
    wanted = state(fresh)
    vllm, model = start(folder / "source-out")
    before = state(model)
    with vllm_models.building(vllm, "cpu"), humming_on_cpu(), set_current_vllm_config(vllm):
        inplace.reload_weights(vllm, model, None, str(folder / "second-out"), True)
    after = state(model)
    return {
        "moved": sorted(name for name in after if after[name][0] != before[name][0]),
        "unlike": sorted(name for name in after if not torch.equal(after[name][1], wanted[name][1])),
        "same": sorted(name for name in after if torch.equal(after[name][1], before[name][1])),
        "all": sorted(after),
    }


if __name__ == "__main__":
    register()
    vllm_models.answer(Path(sys.argv[1]), ask, sys.argv[2:])
