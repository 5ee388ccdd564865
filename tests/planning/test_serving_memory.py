"""The KV cache of a token, and the GPUs on which weights fit with room for a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.planning.gpu_memory import fit, token_bytes
from hqconv.schemas.gpu_target import GPUS
from hqconv.schemas.grid import GROUPS, Grid
from hqconv.serving.chosen_engine import ENGINE
from tests.make import published
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

PLAIN: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


def change_config(folder: Path, **words: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | words))


# Kilobytes of a token in "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1: 16 bits, one GPU.
PAPER = {
    "DeepSeek-V3": (
        {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        70.272,
    ),
    "Qwen-2.5-72B": (
        {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192},
        327.680,
    ),
    "LLaMA-3.1-405B": (
        {"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "hidden_size": 16384},
        516.096,
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_a_token_takes_what_the_paper_says(name: str) -> None:
    config, kilobytes = PAPER[name]
    assert token_bytes(config, 1) == round(kilobytes * 1000)
    assert token_bytes({"text_config": config}, 1) == round(kilobytes * 1000)


@pytest.mark.parametrize(
    ("words", "tp", "expected"),
    [
        ({}, 1, 4 * 2 * 2 * 64 * 2),
        ({}, 2, 4 * 2 * 1 * 64 * 2),
        ({}, 8, 4 * 2 * 1 * 64 * 2),  # a KV head on several ranks
        ({"head_dim": 128}, 1, 4 * 2 * 2 * 128 * 2),
        ({"num_key_value_heads": None}, 1, 4 * 2 * 8 * 64 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 8, 4 * 576 * 2),  # whole on every rank
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}, 1, 4 * (576 * 2 + 132)),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, 1, 2 * 2 * 2 * 64 * 2),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, 1, 4 * 2 * 2 * 64 * 2),
        ({"full_attention_interval": 4}, 1, 1 * 2 * 2 * 64 * 2),
        ({"layer_types": ["full_attention", "unheard_of"] * 2}, 1, None),
        ({"layer_types": ["full_attention"]}, 1, None),  # of another number of layers
        ({"compress_ratios": [0, 4, 128, 4]}, 1, None),
        ({"hybrid_override_pattern": "M*E-"}, 1, None),
        ({"num_hidden_layers": None}, 1, None),
        ({"num_attention_heads": None, "num_key_value_heads": None}, 1, None),
        ({"index_head_dim": 128}, 1, None),
    ],
)
def test_the_cache_of_a_token(words: dict[str, Any], tp: int, expected: int | None) -> None:
    assert token_bytes(PLAIN | words, tp) == expected


def test_published_models() -> None:
    sizes = {path.stem: token_bytes(published.load(path).config, 1) for path in published.paths()}
    assert sizes["deepseek-ai--DeepSeek-R1"] == 70_272
    assert sizes["Qwen--Qwen3-235B-A22B"] == 94 * 2 * 4 * 128 * 2
    assert sizes["openai--gpt-oss-120b"] == 36 * 2 * 8 * 64 * 2
    assert sizes["deepseek-ai--DeepSeek-V4-Flash-0731"] is None


def test_weights_fit_with_a_share_of_the_memory() -> None:
    memory = GPUS["h200"].memory_gb * 10**9
    found = fit("mxfp4", "h200", 2, 100 * 10**9, 70_272)
    assert found is not None
    assert found.cache == int(memory * ENGINE.memory_share) - 100 * 10**9
    assert found.cache_tokens == found.cache // 70_272
    assert fit("mxfp4", "h200", 2, int(memory * (ENGINE.memory_share - 0.04)), 1) is None
    assert fit("mxfp4", "h100", 2, 100 * 10**9, 1) is None


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
    assert words["kv_cache_bytes_per_token"]["2"] == 2 * 2 * 64 * 2
    h200 = next(one for one in words["fits"] if one["gpu"] == "h200")
    assert (h200["schema"], h200["num_gpus"]) == ("mxfp4", 1)
    assert h200["weights"] == words["gpu_memory"]["mxfp4"]["1"]
    assert h200["cache_tokens"] == h200["cache"] // words["kv_cache_bytes_per_token"]["1"]


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_of_ranks_of_whole_groups_is_that_of_the_artifact(tp: int, src: Path, tmp_path: Path) -> None:
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
    assert {one["num_gpus"] for one in words["fits"]} == {tp}
    assert {GPUS[one["gpu"]].sm_version for one in words["fits"]} == {90}


def test_inspect_says_what_an_artifact_lacks(src: Path, tmp_path: Path) -> None:
    change = write_qwen3_moe(tmp_path / "src", num_layers=3, intermediate_size=256)
    change_config(change, num_hidden_layers=5, num_attention_heads=3)
    (change / "tokenizer.json").unlink()
    run(change, tmp_path / "out", "mxfp4", Grid(2))
    notices = hqconv.inspect(tmp_path / "out")["notices"]
    assert [text.split(":")[0] for text in notices] == [
        "config.json counts 5 layers (num_hidden_layers), and the checkpoint has no tensor of layer 3, 4",
        "the artifact has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …)",
        f"{ENGINE.name} does not start with these ranks",
    ]
    (tmp_path / "out" / "model.safetensors").unlink()
    words = hqconv.inspect(tmp_path / "out")
    assert (words["gpu_memory"], words["fits"], words["is_damaged"]) == (None, [], True)
