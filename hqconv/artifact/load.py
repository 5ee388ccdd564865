"""For programs: an artifact's tensors for one rank, and its experts as floats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from hqconv.artifact.experts import whole_expert
from hqconv.artifact.opened import Artifact
from hqconv.backends.moe import load_gemm
from hqconv.errors import RequestError
from hqconv.schemas import artifact as names


@dataclass(frozen=True)
class RankGemm:
    """One GEMM of one rank, ready for `humming.forward.humming_forward(config, inputs, **tensors, …)`.

    `config` is Humming's LayerConfig, `tensors` its kernel tensors [E_local, …].
    """

    config: Any
    tensors: dict[str, torch.Tensor]


def load(
    path: str | Path, tp_rank: int = 0, ep_rank: int = 0, device: str = "cpu"
) -> dict[str, dict[str, RankGemm]]:
    """All blocks of one rank of a kernel artifact: block → `w13`, `w2` → LayerConfig and tensors on `device`.

    Raises RequestError where `path` is no kernel artifact or has no such rank, VerificationError where a file is
    damaged. On a machine without a GPU the configs are made for the artifact's target.
    """
    with Artifact(Path(path)) as artifact:
        if artifact.manifest["layout"] != names.KERNEL:
            raise RequestError("The checkpoint layout has no ranks.", where=str(path))
        if (tp_rank, ep_rank) not in artifact.grid.ranks:
            raise RequestError(
                "The artifact has no such rank.",
                where=str(path),
                expected=f"tp rank < {artifact.grid.tp}, ep rank < {artifact.grid.ep}",
                found=f"tp {tp_rank}, ep {ep_rank}",
            )
        return {block: _load_block(artifact, block, tp_rank, ep_rank, device) for block in artifact.blocks}


def _load_block(
    artifact: Artifact, block: str, tp_rank: int, ep_rank: int, device: str
) -> dict[str, RankGemm]:
    path = names.rank_file(block, tp_rank, ep_rank)
    stored = artifact.header(path)[0]
    gemms = {}
    with safe_open(artifact.root / path, framework="pt", device=device) as file:
        for gemm in names.GEMMS:
            prefix = f"{block}.{gemm}_"
            tensors = {n.removeprefix(prefix): file.get_tensor(n) for n in stored if n.startswith(prefix)}
            words = artifact.layer_config(block, gemm, tp_rank, ep_rank)
            loaded = load_gemm(words, tensors)
            gemms[gemm] = RankGemm(loaded.config, tensors)
    return gemms


def dequantize(path: str | Path, block: str) -> dict[str, torch.Tensor]:
    """One block's experts as float32, decoded from the kernel layout and put together from all ranks.

    Returns `w1` (gate, if there is one) and `w3` (up) [E, I, H], `w2` (down) [E, H, I], and `b1`, `b3`, `b2` where
    there are biases. Raises RequestError for an unknown block or the checkpoint layout, VerificationError where a
    file is damaged.
    """
    with Artifact(Path(path)) as artifact:
        if artifact.manifest["layout"] != names.KERNEL:
            raise RequestError("The checkpoint layout is not decoded here.", where=str(path))
        if block not in artifact.blocks:
            raise RequestError(
                "The artifact has no such block.",
                where=str(path),
                expected=", ".join(artifact.blocks),
                found=block,
            )
        count = artifact.blocks[block]["num_experts"]
        experts = [whole_expert(artifact, block, expert) for expert in range(count)]
    return {name: torch.from_numpy(np.stack([e[name] for e in experts])) for name in experts[0]}
