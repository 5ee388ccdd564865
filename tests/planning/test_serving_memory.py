"""The TP sizes and the memory that `inspect` tells, and those of the artifact that is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.schemas.grid import GROUPS, Grid
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe


def change_config(folder: Path, **words: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | words))


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_qwen3_moe(tmp_path_factory.mktemp("serving") / "src", intermediate_size=192)
    change_config(folder, num_attention_heads=6, num_key_value_heads=2, head_dim=64)
    return folder


def test_inspect_says_what_serves_a_model(src: Path) -> None:
    words = hqconv.inspect(src)
    assert words["tp_obstacles"].keys() == {"4", "8", "16"}
    assert "6 attention heads" in words["tp_obstacles"]["4"]
    assert any("--tp 4" in text for text in words["warnings"])


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_of_ranks_of_whole_groups_is_that_of_the_artifact(
    tp: int, src: Path, tmp_path: Path
) -> None:
    """192 columns in groups of 128: the second of 2 ranks has half a group, as large as the first with zeros."""
    before = hqconv.inspect(src)
    schema = "int4" if tp == 2 else "mxfp4"
    split = GROUPS if str(tp) in before["gpu_memory_of_groups"][schema] else "even"
    expected = before["gpu_memory_of_groups" if split == GROUPS else "gpu_memory"][schema][str(tp)]
    assert (split == GROUPS) == (tp == 2)
    run(src, tmp_path / "out", schema, Grid(tp, split=split))
    words = hqconv.inspect(tmp_path / "out")
    header_bytes = 2 * 8192  # of a rank's two files
    assert expected <= words["gpu_memory"]["total"] <= expected + header_bytes


def test_inspect_says_what_an_artifact_lacks(src: Path, tmp_path: Path) -> None:
    change = write_qwen3_moe(tmp_path / "src", num_layers=3, intermediate_size=256)
    change_config(change, num_hidden_layers=5, num_attention_heads=3)
    (change / "tokenizer.json").unlink()
    run(change, tmp_path / "out", "mxfp4", Grid(2))
    notices = hqconv.inspect(tmp_path / "out")["notices"]
    assert [text.split(":")[0] for text in notices] == [
        "config.json counts 5 layers (num_hidden_layers), and the checkpoint has no tensor of layer 3, 4",
        "the artifact has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …)",
        "vLLM does not start with these ranks",
    ]
    (tmp_path / "out" / "model.safetensors").unlink()
    words = hqconv.inspect(tmp_path / "out")
    assert (words["gpu_memory"], words["is_damaged"]) == (None, True)
