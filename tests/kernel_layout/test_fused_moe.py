"""The production kernel's index tensors, against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from hqconv.kernel_layout.fused_moe import align


def align_plainly(
    local_ids: torch.Tensor, num_experts: int, block_size: int
) -> dict[str, list[int]]:
    """Expert by expert."""
    flat = local_ids.flatten().tolist()
    sorted_ids: list[int] = []
    expert_ids: list[int] = []
    for expert in range(num_experts):
        routes = [i for i, one in enumerate(flat) if one == expert]
        num_blocks = math.ceil(len(routes) / block_size)
        sorted_ids += routes + [len(flat)] * (num_blocks * block_size - len(routes))
        expert_ids += [expert] * num_blocks
    return {"sorted_ids": sorted_ids, "expert_ids": expert_ids}


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "lowest"), [(1, 4, 0), (17, 5, -1), (64, 40, -1), (300, 3, 0)]
)
def test_routes_are_sorted_by_expert(
    num_tokens: int, num_experts: int, lowest: int, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(lowest, num_experts, (num_tokens, 2), generator=generator)
    found, expected = (
        align(ids, num_experts, block_size),
        align_plainly(ids, num_experts, block_size),
    )
    assert {name: found[name].tolist() for name in expected} == expected
    assert all(tensor.dtype == torch.int32 for tensor in found.values())
    assert int(found["num_tokens_padded"]) == len(expected["sorted_ids"])
