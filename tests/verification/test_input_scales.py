"""Static activation scales that are not the source's: verify finds them, whatever else agrees with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hqconv.schemas.grid import Grid
from hqconv.verification.result import CheckResult
from tests.make.conversions import run
from tests.make.damage import Damaged, found
from tests.make.input_scales import expected, fp8
from tests.make.small import LAYER, save

NAME = f"{LAYER}.w13_input_scale"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    folder = tmp_path_factory.mktemp("good")
    source = save(folder / "src", fp8())
    run(source, folder / "out", "fp8-tensor", Grid(2, 2), input_schema="fp8-static")
    return Damaged(folder / "out", source, "fp8-tensor")


@pytest.fixture
def copy(good: Damaged, tmp_path: Path) -> Damaged:
    return Damaged(Path(shutil.copytree(good.root, tmp_path / "out")), good.source, good.schema)


def put(copy: Damaged, number: float, *paths: str) -> None:
    """Another scale of w13 in some rank files, digests made good."""
    for path in paths:
        copy.expert_bytes(path, NAME, 0)[:] = np.frombuffer(np.float32(number).tobytes(), np.uint8)
    copy.reseal()


def record(copy: Damaged, number: Any) -> None:
    """Another scale of w13 in the manifest."""
    copy.edit_manifest(lambda words: words["blocks"][LAYER]["w13"].update(input_scale=number))


def checked(copy: Damaged, *, with_source: bool = True) -> tuple[CheckResult, CheckResult]:
    return copy.check(with_source)


def test_one_bit_of_one_rank(copy: Damaged) -> None:
    copy.flip(copy.path, NAME)
    copy.reseal()
    for result in checked(copy):
        found(result, f"{copy.path}, tensor {NAME}", "activation scale", f"{expected()['w13']:.4g}")
        assert len(result.findings) == 1
    files, weights = checked(copy, with_source=False)
    assert len(files.findings) == 1
    assert not weights.findings  # without a source only the manifest can tell


def test_all_ranks_and_the_manifest_alike(copy: Damaged) -> None:
    put(copy, 0.25, *(copy.rank_file(LAYER, t, e) for t in range(2) for e in range(2)))
    record(copy, 0.25)
    files, weights = checked(copy)
    assert not files.findings
    found(weights, "hqconv.json", f"{LAYER}: w13: input_scale", "not the source's", "0.25")
    assert sum(NAME in finding.where for finding in weights.findings) == 4
    assert len(weights.findings) == 5


@pytest.mark.parametrize("number", [None, "0.1", 0.0, -1.0, float("nan"), float("inf"), 0.1, 1])
def test_what_the_manifest_says_is_no_scale(number: Any, copy: Damaged) -> None:
    record(copy, number)
    files, weights = checked(copy)
    is_number = type(number) is float
    what = (
        ("one that a conversion writes", "not the source's")
        if is_number
        else ("manifest is damaged",) * 2
    )
    for result, text in zip((files, weights), what, strict=True):
        found(result, "hqconv.json", f"{LAYER}: w13: input_scale", text)


@pytest.mark.parametrize("entry", [{"dtype": "I32"}, {"shape": [1, 1]}, None])
def test_a_tensor_that_is_no_scale(entry: dict[str, Any] | None, copy: Damaged) -> None:
    def edit(header: dict[str, Any]) -> None:
        if entry is None:
            header[f"{LAYER}.w13_other"] = header.pop(NAME)
        else:
            header[NAME].update(entry)

    copy.edit_header(copy.path, edit)
    copy.reseal()
    for result in checked(copy):
        found(result, f"{copy.path}", NAME.rpartition(".")[2])


def test_a_source_whose_scales_are_no_numbers(copy: Damaged, tmp_path: Path) -> None:
    tensors, config = fp8()
    name = f"{LAYER}.3.down_proj.input_scale"
    tensors[name] = torch.tensor(-1.0)
    other = Damaged(copy.root, save(tmp_path / "other", (tensors, config)), copy.schema)
    _, weights = checked(other)
    found(weights, f"source: tensor {name}", "scale is not usable")
