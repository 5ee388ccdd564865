"""A checkpoint of one file dealt into several."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file


def split_by_layer(folder: Path) -> None:
    """A shard `layer-N.safetensors` for each layer, and `rest.safetensors` for all else."""
    of_shard: dict[str, dict[str, object]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        match = re.search(r"\.layers\.(\d+)\.", name)
        shard = f"layer-{match[1]}.safetensors" if match else "rest.safetensors"
        of_shard.setdefault(shard, {})[name] = tensor
    (folder / "model.safetensors").unlink()
    for shard, tensors in of_shard.items():
        save_file(tensors, folder / shard, metadata={"format": "pt"})  # type: ignore[arg-type]
    words = {name: shard for shard, tensors in of_shard.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": words}))
