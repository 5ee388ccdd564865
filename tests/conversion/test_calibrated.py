"""Conversions with `--calibrate`: what they record, where they change nothing, and what `verify` says of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import OutputError
from hqconv.planning.layer_encoding import CALIBRATION_VERSION
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, check, manifest, run
from tests.make.damage import Damaged
from tests.make.families import save_family
from tests.make.tensors import snapshot
from tests.make.tokenizer import write_tokenizer

OPTIONS: dict[str, Any] = {"calibrate_tokens": 48, "calibrate_context": 16}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a text, and the artifact of both."""
    folder = tmp_path_factory.mktemp("calibrated")
    save_family(folder / "src", "qwen3_moe", inner=64)
    write_tokenizer(folder / "src")
    (folder / "text").write_text(" ".join(str(3 + i * 7 % 60) for i in range(80)))
    run(folder / "src", folder / "out", "int4-g32", Grid(2, 2), calibrate=folder / "text", **OPTIONS)
    return folder


def test_the_artifact_records_its_calibration_and_is_proven(made: Path) -> None:
    words = manifest(made / "out")
    assert (words["quantizer"], words["quantizer_version"]) == ("gptq", CALIBRATION_VERSION)
    assert (words["calibration"]["name"], words["calibration"]["num_tokens"]) == ("text", 48)
    assert_verified(made / "out", made / "src")
    assert hqconv.inspect(made / "out")["calibration"] == words["calibration"]


def test_a_changed_code_and_a_changed_record_are_found(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    copy = Damaged(tmp_path / "out", made / "src", "int4-g32")
    layer = next(iter(manifest(copy.root)["blocks"]))
    copy.flip(copy.path, f"{layer}.w13_weight", mask=0x10)
    copy.reseal()
    for source in (None, made / "src"):
        assert not check(copy.root, source, "weights").passed
    shutil.copytree(made / "out", tmp_path / "figures")
    other = Damaged(tmp_path / "figures", made / "src", "int4-g32")

    def edit(words: dict[str, Any]) -> None:
        words["blocks"][layer]["quantization_error"]["w2"]["relative_error"] *= 1.001

    other.edit_manifest(edit)
    assert check(other.root, None, "weights").passed
    (finding,) = [one for result in check(other.root, made / "src", "weights").results for one in result.findings]
    assert finding.where.endswith("w2: relative_error")
    for change in ({"device": "tpu"}, {"sha256": "0"}, {"num_tokens": 0}):
        copy.edit_manifest(lambda words, change=change: words["calibration"].update(change))
        assert not check(copy.root, None, "files").passed


def test_codes_that_are_kept_are_not_calibrated(made: Path, tmp_path: Path) -> None:
    run(made / "src", tmp_path / "first", "mxfp4")
    plain = run(tmp_path / "first", tmp_path / "plain", "source")
    found = run(tmp_path / "first", tmp_path / "found", "source", calibrate=made / "text", **OPTIONS)
    assert not plain.warnings
    assert any(text.startswith("--calibrate has no effect") for text in found.warnings)
    assert snapshot(tmp_path / "plain" / "experts") == snapshot(tmp_path / "found" / "experts")


def test_another_text_is_another_artifact(made: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("3 4 5 6 7 8 9 10")
    with pytest.raises(OutputError, match="calibration"):
        run(made / "src", made / "out", "int4-g32", Grid(2, 2), calibrate=tmp_path / "text", resume=True, **OPTIONS)


def test_a_folder_of_texts_is_read_in_the_order_of_its_names(made: Path, tmp_path: Path) -> None:
    words = (made / "text").read_text().split()
    (tmp_path / "texts/b").mkdir(parents=True)
    (tmp_path / "texts/a.txt").write_text(" ".join(words[:30]))
    (tmp_path / "texts/b/c.txt").write_text(" ".join(words[30:]))
    run(made / "src", tmp_path / "out", "int4-g32", Grid(2, 2), calibrate=tmp_path / "texts", **OPTIONS)
    assert snapshot(tmp_path / "out/experts") == snapshot(made / "out/experts")
