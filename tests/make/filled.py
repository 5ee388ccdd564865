"""Checkpoints with wider experts: the same weights, and zeros beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_filled(src: Path, folder: Path, inner: int) -> Path:
    """Copy a qwen3_moe checkpoint of one shard; zeros fill the experts' intermediate size up to `inner`."""
    shutil.copytree(src, folder)
    config = json.loads((src / "config.json").read_text())
    missing = inner - config["moe_intermediate_size"]
    [shard] = folder.glob("*.safetensors")
    tensors = load_file(shard)
    for name, tensor in tensors.items():
        if ".experts." in name:
            columns, rows = (missing, 0) if ".down_proj." in name else (0, missing)
            tensors[name] = torch.nn.functional.pad(tensor, (0, columns, 0, rows))
    save_file(tensors, shard, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": inner}))
    return folder
