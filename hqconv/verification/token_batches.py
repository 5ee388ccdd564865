"""Tokens for the kernel check, and their routes to the experts of each rank.

Legend: T tokens, k choices per token, E experts, H hidden size.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from hqconv.artifact.reader import Artifact
from hqconv.models.families import text_config
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.untrusted_files import read_json
from hqconv.verification.reference import Routing, cover_all_experts, route


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of the parameter dtype and their routes, on the device."""

    x: torch.Tensor
    routing: Routing
    routed_by: str


def make_batch(artifact: Artifact, layer: str, num_tokens: int, device: torch.device) -> TokenBatch:
    """Make seeded tokens, routed by the layer's own router if the artifact holds it; every expert is hit."""
    entry = artifact.layers[layer]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer}/{num_tokens}".encode()))
    x = torch.randn(num_tokens, entry.hidden_size, generator=generator)
    x = x.to(torch_dtype_of(artifact.param_dtype))
    config = _config(artifact)
    router, bias = _router(artifact, layer)
    if router is None or router.shape != (entry.num_experts, entry.hidden_size):
        logits = torch.randn(num_tokens, entry.num_experts, generator=generator)
        routing, routed_by = route(logits, entry.top_k, {"norm_topk_prob": True}), "seeded scores"
    else:
        logits = x.float() @ router.float().t()
        routing = route(logits, entry.top_k, config, None if bias is None else bias.float())
        routed_by = "the checkpoint's router"
    routing = cover_all_experts(routing, entry.num_experts)
    moved = Routing(routing.ids.to(device), routing.weights.float().to(device))
    return TokenBatch(x.to(device), moved, routed_by)


def _config(artifact: Artifact) -> dict[str, Any]:
    document = read_json(artifact.root / names.CONFIG)
    return dict(text_config(document))


def _router(artifact: Artifact, layer: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Router weight [E, H] and correction bias [E], if they have their usual names."""
    parent = layer.rpartition(".")[0]
    found = [_copied(artifact, f"{parent}.{name}") for name in ("gate.weight", "router.weight")]
    biases = [_copied(artifact, f"{parent}.{name}") for name in ("gate.e_score_correction_bias",)]
    return next((t for t in found if t is not None), None), next((t for t in biases if t is not None), None)


def _copied(artifact: Artifact, name: str) -> torch.Tensor | None:
    for path in artifact.manifest.files:
        if artifact.is_shard(path) and name in artifact.header(path)[0]:
            with safe_open(artifact.fetched(path), framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None


def together(batches: list[TokenBatch]) -> TokenBatch:
    """Concatenate all batches, so that the reference decodes every expert once."""
    ids = torch.cat([b.routing.ids for b in batches])
    weights = torch.cat([b.routing.weights for b in batches])
    return TokenBatch(torch.cat([b.x for b in batches]), Routing(ids, weights), batches[0].routed_by)


def local_ids(artifact: Artifact, ids: torch.Tensor, num_experts: int, ep_rank: int) -> torch.Tensor:
    """Map source expert ids to this rank's local indices, -1 elsewhere.

    A redundant expert's routes go to its copies in turn, so that every copy is run.
    """
    homes = artifact.grid.homes(num_experts)
    table = torch.full((num_experts, max(len(h) for h in homes)), -1, dtype=torch.long)
    count = torch.tensor([len(h) for h in homes])
    for expert, places in enumerate(homes):
        for copy, (rank, index) in enumerate(places):
            if rank == ep_rank:
                table[expert, copy] = index
    flat = ids.reshape(-1).cpu()
    turn = torch.arange(flat.numel()) % count[flat]
    return table[flat, turn].view_as(ids.cpu()).to(ids.device)
