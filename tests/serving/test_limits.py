"""How a server is started, and for which ranks there is no start."""

from __future__ import annotations

import shlex

import pytest

from hqconv.schemas.grid import Grid
from hqconv.serving.chosen_engine import ENGINE

COMMANDS = {
    Grid(): "vllm serve out",
    Grid(tp=4): "vllm serve out --tensor-parallel-size 4",
    Grid(ep=2): "vllm serve out --tensor-parallel-size 2 --enable-expert-parallel",
    Grid(ep=2, placement="round_robin"): "vllm serve out --tensor-parallel-size 2 --enable-expert-parallel "
    "--expert-placement-strategy round_robin",
}


@pytest.mark.parametrize("grid", COMMANDS)
def test_the_command(grid: Grid) -> None:
    assert ENGINE.serve_command("out", "kernel", grid) == COMMANDS[grid]
    assert ENGINE.serve_command("out", "checkpoint", grid) == "vllm serve out"
    assert ENGINE.kernel_layout_obstacles("qwen_moe", grid) == []


@pytest.mark.parametrize("grid", [Grid(tp=2, ep=2), Grid(ep=2, redundant=2)])
def test_ranks_without_a_start(grid: Grid) -> None:
    assert ENGINE.serve_command("out", "kernel", grid) is None
    assert len(ENGINE.kernel_layout_obstacles("qwen_moe", grid)) == 1


def test_llama_4_is_not_served() -> None:
    assert "weighs" in ENGINE.kernel_layout_obstacles("llama4", Grid())[0]


def test_a_folder_with_a_space_is_one_word() -> None:
    command = ENGINE.serve_command("my model", "kernel", Grid())
    assert command is not None
    assert shlex.split(command) == ["vllm", "serve", "my model"]
