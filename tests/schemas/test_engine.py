"""How a server is started, and for which ranks there is no start."""

from __future__ import annotations

import shlex

import pytest

from hqconv.schemas.engine import ENGINE, AttentionHeads
from hqconv.schemas.grid import Grid

COMMANDS = {
    Grid(): "vllm serve out",
    Grid(tp=4): "vllm serve out --tensor-parallel-size 4",
    Grid(ep=2): "vllm serve out --tensor-parallel-size 2 --enable-expert-parallel",
    Grid(
        ep=2, placement="round_robin"
    ): "vllm serve out --tensor-parallel-size 2 --enable-expert-parallel "
    "--expert-placement-strategy round_robin",
    Grid(
        ep=2, redundant=2
    ): "vllm serve out --tensor-parallel-size 2 --enable-expert-parallel --enable-eplb "
    "--eplb-config.num_redundant_experts 2",
}


@pytest.mark.parametrize("grid", COMMANDS)
def test_the_command(grid: Grid) -> None:
    assert ENGINE.serve_command("out", "kernel", grid) == COMMANDS[grid]
    assert ENGINE.serve_command("out", "checkpoint", grid) == "vllm serve out"
    assert shlex.split(ENGINE.serve_command("my model", "kernel", grid) or "")[2] == "my model"
    assert ENGINE.kernel_layout_obstacles("qwen_moe", grid) == []


def test_what_has_no_start() -> None:
    for grid in (
        Grid(tp=2, ep=2),
        Grid(redundant=2),
        Grid(ep=2, placement="round_robin", redundant=2),
    ):
        assert ENGINE.serve_command("out", "kernel", grid) is None
        assert len(ENGINE.kernel_layout_obstacles("qwen_moe", grid)) == 1
    for family, reason in {"llama4": "weighs", "moondream3": "kernel of plain weights"}.items():
        (said,) = ENGINE.kernel_layout_obstacles(family, Grid())
        assert reason in said


@pytest.mark.parametrize(
    ("grid", "heads", "reason"),
    [
        (Grid(3), AttentionHeads(16, 4), "16 attention heads"),
        (Grid(ep=3), AttentionHeads(16, 4), "16 attention heads"),
        (Grid(12), AttentionHeads(16), "16 attention heads"),
        (Grid(6), AttentionHeads(12, 4), "4 KV heads"),
        (Grid(8), AttentionHeads(16, 12), "12 KV heads"),
        *((Grid(tp), AttentionHeads(16, 4), "") for tp in (1, 2, 4, 8, 16)),
        (Grid(3), AttentionHeads(), ""),
        (Grid(3, 3), AttentionHeads(16, 4), ""),  # no start at all, for another reason
    ],
)
def test_ranks_share_attention_heads(grid: Grid, heads: AttentionHeads, reason: str) -> None:
    """KV heads are dealt to ranks, or repeated where there are fewer than ranks."""
    found = ENGINE.heads_obstacle(grid, heads)
    assert (reason in (found or ""), found is None) == (True, not reason)
    if reason:
        assert ENGINE.serve_command("out", "kernel", grid, heads) is None
        assert reason in ENGINE.kernel_layout_obstacles("qwen_moe", grid, heads)[0]
    assert ENGINE.serve_command("out", "checkpoint", grid, heads) == "vllm serve out"


def test_every_rank_holds_as_many_experts_as_the_others() -> None:
    """With copies; without them an uneven deal is served."""
    for grid, counts, is_served in (
        (Grid(ep=4, redundant=2), [6, 6], True),
        (Grid(ep=4, redundant=2), [6, 7], False),
        (Grid(ep=4), [7], True),
    ):
        reasons = ENGINE.kernel_layout_obstacles("qwen_moe", grid, num_experts=counts)
        assert ["7 experts and 2 copies" in reason for reason in reasons] == [True] * (
            not is_served
        )
