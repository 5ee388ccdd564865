"""The cases of scripts/check_serving.py models: their verdicts, and the models that they make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hqconv
from scripts import serving_cases
from scripts.check_serving import judged
from scripts.engines import Engine
from scripts.serving_cases import CASES, Comparison, Place, comparisons

ANSWERS: dict[str, Any] = {
    "first": [{"5": -0.5, "7": -1.0}],
    "answers": [[[5, -0.5], [7, -0.25]]],
    "again": [[[5, -0.5], [7, -0.25]]],
}
NEAR: dict[str, Any] = {**ANSWERS, "first": [{"5": -0.6, "7": -1.0}]}
DRAFTS = {"vllm:spec_decode_num_draft_tokens": 40, "vllm:spec_decode_num_accepted_tokens": 9}
OTHER_DRAFTS = {**DRAFTS, "vllm:spec_decode_num_accepted_tokens": 8}


@pytest.mark.parametrize(
    ("mine", "other", "identical", "near"),
    [
        (ANSWERS, ANSWERS, True, True),
        (ANSWERS, NEAR, False, True),
        (ANSWERS, {**NEAR, "first": [{"5": -0.9, "7": -1.0}]}, False, False),
        (ANSWERS, {"failed": ["no"]}, False, False),
        ({**ANSWERS, "drafts": DRAFTS}, {**ANSWERS, "drafts": DRAFTS}, True, True),
        ({**ANSWERS, "drafts": DRAFTS}, {**ANSWERS, "drafts": OTHER_DRAFTS}, False, False),
        ({**ANSWERS, "drafts": DRAFTS}, ANSWERS, True, True),  # the other has no draft
    ],
)
def test_the_verdict(mine: dict[str, Any], other: dict[str, Any], identical: bool, near: bool) -> None:
    engines = Engine("mine", Path("a")), Engine("other", Path("b"))
    found = {"mine": mine, "other": other}
    verdicts = [judged(Comparison("one", *engines, limit), found)["good"] for limit in (None, 0.15)]
    assert verdicts == [identical, near]


def test_a_case_that_cannot_be_made_is_a_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: Place) -> Iterator[Comparison]:
        yield from ()
        raise ValueError("no such class")

    def good(place: Place) -> Iterator[Comparison]:
        yield Comparison("good", place.engine("a", tmp_path), place.engine("b", tmp_path, tp=2))

    monkeypatch.setattr(serving_cases, "CASES", {"broken": broken, "good": good})
    line, comparison = comparisons(Place(tmp_path, "cpu", {"max_num_seqs": 4}), ["broken", "good"])
    assert line[0] == "broken"
    assert "ValueError: no such class" in line[1]
    assert isinstance(comparison, Comparison)
    assert json.loads(comparison.mine.arguments[-1]) == {"max_num_seqs": 4}
    assert comparison.other.variables["PYTHONPATH"].split(":")[0] == str(tmp_path / "one_gpu")
    assert (tmp_path / "one_gpu" / "one_gpu-0.dist-info" / "entry_points.txt").is_file()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.full
def test_ranks_by_groups_have_the_bytes_of_the_filled_model(tmp_path: Path) -> None:
    made = [one for one in CASES["groups"](Place(tmp_path, "cpu", {})) if isinstance(one, Comparison)]
    assert len(made) == 2
    for one in made:
        mine, other = (load_rank_tensors(engine.model) for engine in (one.mine, one.other))
        assert mine == other
        sizes = [json.loads((engine.model / "config.json").read_text())["moe_intermediate_size"] for engine in one[1:3]]
        assert sizes[0] < sizes[1]


def load_rank_tensors(folder: Path) -> dict[str, str]:
    """Digests of the tensors of an artifact's rank files, by file and name."""
    files = sorted((folder / "experts").rglob("*.safetensors"))
    return {
        f"{path.relative_to(folder)} {name}": hashlib.sha256(one.view(torch.uint8).numpy().tobytes()).hexdigest()
        for path in files
        for name, one in load_file(path).items()
    }


@pytest.mark.full
def test_the_static_model_keeps_its_weights(tmp_path: Path) -> None:
    """Codes times scale are the plain model's weights; gate and up have one scale, and the artifact has the inputs'."""
    place = Place(tmp_path, "cpu", {})
    (one,) = CASES["static"](place)
    plain, coded = tensors_of(place.plain()), tensors_of(one.other.model)
    name = "model.layers.1.mlp.experts.3.{}.weight"
    for role in ("gate_proj", "up_proj", "down_proj"):
        weight, scale = coded[name.format(role)].float(), coded[name.format(role) + "_scale"]
        assert torch.allclose(weight * scale, plain[name.format(role)].float(), rtol=2**-4, atol=float(scale) * 2**-9)
    assert coded[name.format("gate_proj") + "_scale"] == coded[name.format("up_proj") + "_scale"]
    assert hqconv.inspect(one.mine.model)["input_schema"] == "fp8-static"
