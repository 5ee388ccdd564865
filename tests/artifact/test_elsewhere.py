"""The kernel layout where there is no hqconv: downloaders take the ordinary shards, transformers refuses it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hqconv.schemas.artifact_names import (
    INDEX,
    NOT_FOR_TRANSFORMERS,
    admit_transformers,
    refuse_transformers,
)
from hqconv.schemas.grid import Grid
from tests.make import conversions
from tests.make.families import save_family
from tests.make.qwen import write_qwen3_moe

SCHEMA = "int4-g32"
KEY = "transformers_weights"
TEXT, NESTED = "qwen3_moe", ("qwen3_5_moe", "llama4")


def convert(
    src: Path, out: Path, layout: str = "kernel", schema: str = SCHEMA, **words: Any
) -> Path:
    conversions.run(
        src, out, schema, Grid(tp=2, ep=2) if layout == "kernel" else Grid(), layout=layout, **words
    )
    conversions.assert_verified(out, src)
    return out


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_bytes()))


def paths_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- downloads ---------------------------------------------------------------------------------------------


def weights_fetched(folder: Path) -> set[str]:
    """What vLLM's `download_weights_from_hf` has the Hub's library fetch of a repo with these files."""
    paths, patterns = sorted(paths_in(folder)), ["*.safetensors"]
    if INDEX in paths:
        patterns = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    return set(filter_repo_objects(paths, allow_patterns=patterns))


@pytest.mark.parametrize("limit", [10**9, 10_000])
def test_a_download_takes_no_rank_file(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqconv.planning.output_units.MAX_SHARD_BYTES", limit)
    out = convert(write_qwen3_moe(tmp_path / "src"), tmp_path / "out")
    shards = {path for path in paths_in(out) if "/" not in path and path.endswith(".safetensors")}
    assert (shards == {"model.safetensors"}) == (limit == 10**9)
    assert weights_fetched(out) == shards
    (out / INDEX).unlink()  # then a pattern decides, and its star stands for folders too
    assert len(weights_fetched(out)) == len(shards) + 2 * 4


# --- transformers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of models that transformers saved, with a tokenizer."""
    folder, served = tmp_path_factory.mktemp("served"), {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), unk_token="a"
    )
    for model_type in (TEXT, *NESTED):
        src = folder / model_type
        save_family(src, model_type, torch.bfloat16, hidden=64, inner=64)
        tokenizer.save_pretrained(src)
        served[model_type] = convert(src, folder / f"{model_type}-out")
    return served


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dtype": {"dtype": "auto"},
    "map": {"device_map": "cpu"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForCausalLM"])
@pytest.mark.parametrize("model_type", [TEXT, *NESTED])
def test_transformers_refuses_the_folder(
    served: dict[str, Path], model_type: str, auto: str, way: str
) -> None:
    if way == "map" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("device_map needs accelerate")
    with pytest.raises(OSError, match=NOT_FOR_TRANSFORMERS):
        getattr(transformers, auto).from_pretrained(served[model_type], **WAYS[way])


@pytest.mark.parametrize("model_type", [TEXT, *NESTED])
def test_config_and_tokenizer_are_for_everybody(served: dict[str, Path], model_type: str) -> None:
    config = transformers.AutoConfig.from_pretrained(served[model_type])
    assert config.model_type == model_type
    assert config.quantization_config["quant_method"] == "hqconv"
    ours, theirs = (
        transformers.AutoTokenizer.from_pretrained(folder)
        for folder in (served[model_type], served[model_type].parent / model_type)
    )
    assert ours.get_vocab() == theirs.get_vocab()


# --- the entry comes and goes ------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [TEXT, "llama4"])
def test_only_the_kernel_layout_has_the_entry(
    served: dict[str, Path], model_type: str, tmp_path: Path
) -> None:
    first = served[model_type]
    assert json.dumps(config_of(first)).count(f'"{KEY}"') == (1 if model_type == TEXT else 2)
    again = convert(first, tmp_path / "again", schema="source")
    assert config_of(again) == config_of(first)
    back = convert(first, tmp_path / "back", "checkpoint", "source")
    assert KEY not in json.dumps(config_of(back))
    direct = convert(first.parent / model_type, tmp_path / "direct", "checkpoint")
    assert (config_of(back), paths_in(back)) == (config_of(direct), paths_in(direct))
    last = convert(back, tmp_path / "last", schema="source")
    assert {**config_of(last), "quantization_config": 0} == {
        **config_of(first),
        "quantization_config": 0,
    }


CONFIGS: list[dict[str, Any]] = [
    {},
    {"a": 1, "text_config": {"b": 2}, "vision_config": {}},
    {KEY: None, "thinker_config": {KEY: "y", "text_config": {"c": {}}}, "ffn_config": {"d": 3}},
    {"text_config": None, "llm_config": [1]},
    {"thinker_config": {}, "text_config": {"language_config": {"llm_config": {}}}},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_entry_is_taken_out_as_it_was_put_in(config: dict[str, Any]) -> None:
    kept = json.dumps(config)
    marked = refuse_transformers(config)
    assert json.dumps(config) == kept != json.dumps(marked)
    assert json.dumps(admit_transformers(marked)) == kept
    assert json.dumps(admit_transformers(config)) == kept
    assert marked.get("vision_config") == config.get("vision_config")
    # transformers 4's DBRX takes no key there that it does not know.
    assert marked.get("ffn_config") == config.get("ffn_config")
