"""Whole experts back from an artifact's rank files, as floats, through the independent decoder."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from hqconv.artifact.opened import Artifact
from hqconv.artifact.unlayout.form import to_float32
from hqconv.artifact.unlayout.read import decode, unlayout
from hqconv.schemas import artifact as names

Floats = NDArray[np.float32]


def rank_expert(artifact: Artifact, block: str, tp_rank: int, ep_rank: int, local: int) -> dict[str, Floats]:
    """One expert's share on one rank as float32: w1 (if gated), w3 [I/T, H], w2 [H, I/T], and b1, b3, b2."""
    words = artifact.blocks[block]
    parts: dict[str, Floats] = {}
    for gemm in names.GEMMS:
        config = artifact.layer_config(block, gemm, tp_rank, ep_rank)
        flags = artifact.flags(block, gemm)
        unpacked = unlayout(config, artifact.read_expert(block, gemm, tp_rank, ep_rank, local), flags)
        matrix = decode(unpacked, config)[0]
        bias = None if unpacked.bias is None else to_float32(unpacked.bias, unpacked.param_dtype)[0]
        projections = (
            ("w1", "w3") if gemm == "w13" and words["gated"] else ("w3",) if gemm == "w13" else ("w2",)
        )
        rows = matrix.shape[0] // len(projections)
        for index, projection in enumerate(projections):
            parts[projection] = matrix[index * rows : (index + 1) * rows]
            if bias is not None:
                parts["b" + projection[1:]] = bias[index * rows : (index + 1) * rows]
    return parts


def whole_expert(artifact: Artifact, block: str, expert: int) -> dict[str, Floats]:
    """One source expert reassembled from all TP ranks of the first EP rank that holds it, as float32."""
    words = artifact.blocks[block]
    ep_rank, local = artifact.grid.homes(words["num_experts"])[expert][0]
    inner = words["intermediate_size"]
    shares = [rank_expert(artifact, block, t, ep_rank, local) for t in range(artifact.grid.tp)]
    whole: dict[str, Floats] = {}
    for name in shares[0]:
        if name == "b2":  # on TP rank 0, zero elsewhere: ranks are summed
            whole[name] = functools.reduce(np.add, [share[name] for share in shares])
        else:
            joined = np.concatenate([share[name] for share in shares], axis=1 if name == "w2" else 0)
            # The last TP rank may be padded.
            whole[name] = joined[:, :inner] if name == "w2" else joined[:inner]
    return whole
