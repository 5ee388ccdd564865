"""The page about an artifact: what it says, that all of it is escaped, and where it is written."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.model_card import write_evaluation
from hqconv.cli.page import write_page
from tests.make.command import call
from tests.make.conversions import evaluation_of, manifest, run, write_manifest
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.small import gpt_oss_mxfp4, save


class Page(HTMLParser):
    """A page taken apart: tags that must fit, attributes, all text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", intermediate_size=256)


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact; do not change it."""
    folder = tmp_path_factory.mktemp("artifacts") / "out"
    run(model, folder, "int4-g64-zp")
    return folder


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """An artifact to change."""
    run(model, tmp_path / "own", "mxfp4")
    return tmp_path / "own"


def test_the_page_has_what_inspect_shows_and_two_plots(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = call("report", out, "-o", path)
    assert (done.exit_code, done.stdout) == (0, f"The page is in {path}.\n")
    shown = Page(path)
    for line in call("inspect", out).stdout.splitlines():
        assert all(text in shown.text for text in line.split("  ") if len(text) < 60)
    assert shown.tags.count("svg") == 2
    assert shown.tags.count("polyline") == 3
    for name, layer in manifest(out)["blocks"].items():
        for error in layer["quantization_error"].values():
            assert f"{error['worst_relative_error']:.4g} {name}, " in shown.text
            assert f", expert {error['worst_expert']}" in shown.text
    text = path.read_text()
    write_page(out, path)
    assert path.read_text() == text


def test_where_nothing_was_lost_no_errors_are_drawn(tmp_path: Path) -> None:
    run(save(tmp_path / "model", gpt_oss_mxfp4()), tmp_path / "out", "source")
    write_page(tmp_path / "out", tmp_path / "page.html")
    assert "svg" not in Page(tmp_path / "page.html").tags


def test_nothing_is_loaded_and_nothing_runs(own: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    document = write_page(own, path)
    write_evaluation(own, evaluation_of(document["artifact"]["manifest_sha256"]))
    write_page(own, path)
    shown, text = Page(path), path.read_text()
    assert "KL divergence" in shown.text
    assert not re.findall(r"https?://|//\w|@import|url\(", text)
    tags = {"html", "head", "meta", "style", "title", "body", "h1", "h2", "pre", "span"}
    assert set(shown.tags) <= tags | {"svg", "polyline", "rect", "text"}
    assert not [name for name, _ in shown.attributes if name.startswith("on") or name == "href"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in text


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m\u202e & " + "x" * 300


def test_hostile_names_come_out_as_text(own: Path, tmp_path: Path) -> None:
    document = manifest(own)
    document["source"]["name"] = HOSTILE
    document |= {"schema_name": HOSTILE, "warnings": [HOSTILE]}
    document["family"] = HOSTILE
    layer = document["blocks"].pop("model.layers.0.mlp.experts")
    layer |= {"conversion": HOSTILE, "source_dtype": HOSTILE}
    layer["quantization_error"][HOSTILE] = layer["quantization_error"]["w1"]
    layer["quantization_error"]["w2"] |= {"relative_error": float("nan"), "worst_expert": 999}
    document["blocks"]["model.layers.0.mlp.experts"] = layer
    document["files"][f"{HOSTILE}.txt"] = {"size_bytes": 1, "sha256": "0" * 64}
    write_manifest(own, document)
    evaluation = evaluation_of(read_manifest(own).sha256)
    evaluation |= {"artifact": HOSTILE, "schema": HOSTILE}
    write_evaluation(own, evaluation | {"text": {"name": HOSTILE, "sha256": HOSTILE}})
    check: dict[str, Any] = {"status": "fail", "skipped_because": HOSTILE, "notes": [HOSTILE]}
    check |= {"findings": [dict.fromkeys(("where", "what", "expected", "found"), HOSTILE)]}
    check |= {"seconds": 1.0, "measured": {HOSTILE: {HOSTILE: {"relative_error": 0.1}}}}
    kernel = {**check, "measured": {HOSTILE: {"kernel": float("nan"), "routed_by": HOSTILE}}}
    checks = {"weights": check, "kernel": kernel, HOSTILE: check}
    verification = {"kind": "report", "passed": False, "source": HOSTILE, "checks": checks}
    path = tmp_path / "page.html"
    write_page(own, path, verification)
    shown, text = Page(path), path.read_text()
    assert "KL divergence" in shown.text
    assert shown.tags.count("svg") == 2
    assert {"script", "img"}.isdisjoint(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "x" * 250 not in text
    assert shown.text.count("<script>alert(1)</script>") > 20


@pytest.mark.parametrize("damage", ["a bit", "the manifest", "a file"])
def test_verify_writes_a_page_of_what_is_wrong(
    damage: str, own: Path, model: Path, tmp_path: Path
) -> None:
    path, weights = tmp_path / "page.html", next((own / "experts").rglob("*.safetensors"))
    if damage == "the manifest":
        (own / "hqconv.json").write_text("{}")
    else:
        raw = bytearray(weights.read_bytes())
        raw[-20_000] ^= 1
        weights.write_bytes(raw[:100] if damage == "a file" else raw)
    done = call("verify", own, "--source", model, "--report", path, "--device=cpu")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1][:60] in Page(path).text
    path.unlink()
    done = call("report", own, "-o", path)
    assert (done.exit_code, path.exists()) == (
        (1, False) if damage == "the manifest" else (0, True)
    )
    assert done.stderr.startswith("error: ") == (damage == "the manifest")


def test_the_page_goes_beside_and_never_over_other_files(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = read_tree(out)
    assert call("report", tmp_path / "none", "-o", "page.html").exit_code == 2
    assert not list(tmp_path.iterdir())
    assert call("report", out).exit_code == 0
    path = tmp_path / "out.report.html"
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert call("report", out, "-q").stdout == ""  # a page of ours is replaced
    path.write_text("mine")
    refused = call("report", out)
    assert refused.exit_code == 4
    assert "not a report of hqconv" in refused.stderr
    assert call("verify", out, "--checks", "files", "--report", path).exit_code == 4
    assert path.read_text() == "mine"
    path.unlink()
    done = call("verify", out, "--checks", "files,weights", "--report", path, "--device=cpu")
    assert (done.exit_code, f"The page is in {path}." in done.stderr) == (0, True)
    assert "PASS  files, weights" in Page(path).text
    for command in (("report", out, "-o"), ("verify", out, "--report")):
        refused = call(*command, tmp_path / "nowhere/page.html")
        assert refused.exit_code == 4
        assert "PASS" not in refused.stdout  # nobody waited for the checks
    monkeypatch.chdir(out)
    assert call("report", out).exit_code == 4
    assert read_tree(out) == before
