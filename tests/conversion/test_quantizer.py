"""Conversions with `--quantizer mse`: what they say, their bytes, and the proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import OutputError
from hqconv.planning.layer_encoding import SEARCH_VERSION
from tests.make.conversions import check, run, run_until
from tests.make.damage import Damaged, both_ways
from tests.make.qwen import write_qwen3_moe


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("quantizer") / "src", intermediate_size=256)


def rank_bytes(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}


def test_what_is_kept_is_kept(src: Path, tmp_path: Path) -> None:
    """Direct layers have nothing to search; and mxfp4 to nvfp4 is lossless as it is."""
    run(src, tmp_path / "first", "mxfp4", quantizer="mse")
    for schema in ("source", "nvfp4"):
        for quantizer in ("rtn", "mse"):
            run(tmp_path / "first", tmp_path / schema / quantizer, schema, quantizer=quantizer)
        one, other = (rank_bytes(tmp_path / schema / quantizer) for quantizer in ("rtn", "mse"))
        assert one == other


@pytest.mark.parametrize("version", [None, SEARCH_VERSION - 1, SEARCH_VERSION + 1])
def test_another_version_of_the_search_is_told_from_damage(
    version: int | None, src: Path, tmp_path: Path
) -> None:
    """None is of before versions were recorded. Without the source nothing is searched again."""
    run(src, tmp_path / "out", "int4-g32", quantizer="mse")
    other = Damaged(tmp_path / "out", src, "int4-g32")

    def edit(words: dict[str, Any]) -> None:
        words.update(hqconv_version="0.0.9", quantizer_version=version)
        if version is None:
            del words["quantizer_version"]

    other.edit_manifest(edit)
    (finding,) = both_ways(other.root, src).findings
    assert finding.where == "hqconv.json: quantizer_version"
    assert finding.expected == f"{SEARCH_VERSION} (hqconv {hqconv.__version__})"
    assert finding.found == f"{version or 'none'} (hqconv 0.0.9)"
    assert check(other.root, None, "files", "weights").passed
    other.edit_manifest(lambda words: words.update(hqconv_version=hqconv.__version__))
    with pytest.raises(OutputError, match="differs from this request in: quantizer_version"):
        run(src, other.root, "int4-g32", quantizer="mse", resume=True)


def test_a_conversion_is_not_resumed_by_another_search(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rtn knows nothing of."""
    for quantizer in ("rtn", "mse"):
        run_until(src, tmp_path / quantizer, 1, "int4-g32", quantizer=quantizer)
    version = "hqconv.planning.layer_encoding.SEARCH_VERSION"
    monkeypatch.setattr(version, SEARCH_VERSION + 1)
    run(src, tmp_path / "rtn", "int4-g32", quantizer="rtn", resume=True)
    with pytest.raises(OutputError, match="differs from this one"):
        run(src, tmp_path / "mse", "int4-g32", quantizer="mse", resume=True)
