"""The page about an artifact: what it says, that all of it is escaped, and where it is written."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.artifact import manifest as manifest_module
from hqconv.artifact.manifest import read_manifest
from hqconv.reports.page import NUM_WORST, page, page_document
from hqconv.reports.parts import Series, figure, number, plot, ticks
from tests.make.command import call
from tests.make.conversions import manifest, run, write_manifest
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.small import gpt_oss_mxfp4, save

ROLES = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}
_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page taken apart: tags that must fit, attributes, the cells of tables, all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style",):
            self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", intermediate_size=256)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact; do not change it."""
    out = tmp_path_factory.mktemp("artifacts") / "out"
    run(model, out, "int4-g64-zp")
    return out


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """An artifact to change."""
    run(model, tmp_path / "own", "mxfp4")
    return tmp_path / "own"


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


# --- what it says ------------------------------------------------------------------------------------------


def test_the_page_has_the_figures_of_the_manifest(made: Path) -> None:
    words, shown = manifest(made), Page(page(page_document(made)))
    for name, layer in words["blocks"].items():
        for role, error in layer["quantization_error"].items():
            row = [
                name,
                "int4-g64-zp",
                ROLES[role],
                figure(error["relative_error"]),
                str(error["worst_expert"]),
            ]
            assert [*row, figure(error["worst_relative_error"])] in shown.rows
    errors = [float(row[3]) for row in shown.rows if row[1:2] == ["int4-g64-zp"]]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) > 1
    for name, entry in words["files"].items():
        assert any(row[0] == name and row[2] == entry["sha256"] for row in shown.rows)
    for text in (
        words["digest"],
        words["source"]["files"][0]["header_sha256"],
        words["family_chosen_because"],
    ):
        assert text in shown.text
    assert "vllm serve" in shown.text
    assert "No check was run" in shown.text


def recorded_worst(artifact: Path) -> list[tuple[str, str, int, float]]:
    """Layer, projection, its worst expert, and the relative error of that."""
    return [
        (name, role, error["worst_expert"], error["worst_relative_error"])
        for name, layer in manifest(artifact)["blocks"].items()
        for role, error in layer["quantization_error"].items()
    ]


def test_without_the_source_no_errors_of_experts_are_made_up(made: Path) -> None:
    words = page_document(made)
    assert not words["experts"]["is_measured"]
    recorded = recorded_worst(made)
    keys = ("block", "projection", "expert", "relative_error")
    found = [tuple(one[key] for key in keys) for one in words["experts"]["worst"]]
    assert sorted(found) == sorted(recorded)
    assert [one[3] for one in found] == sorted((one[3] for one in recorded), reverse=True)
    assert "Errors of single experts are not known without the source" in page(words)


def test_with_the_source_the_errors_are_measured(made: Path, model: Path, tmp_path: Path) -> None:
    done = call(
        "report", made, "--source", model, "-o", tmp_path / "page.html", "--json", "--device", "cpu"
    )
    assert done.exit_code == 0, done.stderr
    words = json.loads(done.stdout)
    assert words["experts"]["is_measured"]
    worst = words["experts"]["worst"]
    assert len(worst) == NUM_WORST
    assert worst == sorted(worst, key=lambda one: -one["relative_error"])
    *place, error = max(recorded_worst(made), key=lambda one: one[3])
    assert worst[0]["relative_error"] == pytest.approx(error, rel=1e-9)
    assert [worst[0][key] for key in ("block", "projection", "expert")] == place
    shown = read(tmp_path / "page.html")
    measured = words["verification"]["checks"]["weights"]["measured"]
    for layer, roles in measured.items():
        for role, one in roles.items():
            figures = [figure(one[key]) for key in ("relative_error", "sqnr_db", "cosine")]
            assert any(row[:5] == [layer, ROLES[role], *figures] for row in shown.rows)
    assert "passed" in shown.text


def test_results_of_the_kernel_are_on_the_page(made: Path) -> None:
    measured = {
        "kernel": 0.004,
        "channel": 0.02,
        "batch": 0.0051,
        "against_source": 0.117,
        "routed_by": "made up",
    }
    check = {"status": "pass", "skipped_because": "", "notes": ["a note"], "findings": []}
    check["measured"] = {"model.layers.0.mlp.experts": measured}
    verification = {"passed": True, "source": None, "checks": {"kernel": check}}
    shown = Page(page(page_document(made, verification)))
    expected = [
        "model.layers.0.mlp.experts",
        "0.004000",
        "–",
        "0.02000",
        "0.005100",
        "0.1170",
        "made up",
    ]
    assert expected in shown.rows
    assert "a note" in shown.text


def test_the_page_names_no_folder_of_this_machine(made: Path, model: Path) -> None:
    verified = hqconv.verify(made, model, checks=["weights"], device="cpu")
    text = page(page_document(made, verified.to_dict()))
    assert text == page(page_document(made, verified.to_dict()))
    assert "passed" in Page(text).text
    assert str(made.parent) not in text
    assert str(model.parent) not in text
    assert f"Checked against {model.name}." in text
    assert f"vllm serve {made.name}" in text


def test_where_nothing_was_lost_no_errors_are_drawn(tmp_path: Path) -> None:
    model = save(tmp_path / "model", gpt_oss_mxfp4())
    run(model, tmp_path / "out", "source")
    verified = hqconv.verify(tmp_path / "out", model, checks=["weights"], device="cpu")
    words = page_document(tmp_path / "out", verified.to_dict(), verified.results[0].of_experts)
    shown = Page(page(words))
    assert words["experts"]["worst"] == []
    assert shown.text.count("No weight differs from the source") == 2
    assert "quantizer" not in shown.texts
    assert not [tag for tag, _ in shown.attributes if tag == "figure"]


def test_layers_of_several_schemas_and_layers_that_were_left(model: Path, tmp_path: Path) -> None:
    recipe = (
        '[[override]]\nlayers = "0"\nschema = "none"\n[[override]]\nlayers = "1"\nschema = "fp8"\n'
    )
    (tmp_path / "recipe.toml").write_text(f'schema = "mxfp4"\ntarget = "sm90"\n{recipe}')
    write_qwen3_moe(tmp_path / "three", num_layers=3)
    done = call(
        "convert",
        tmp_path / "three",
        "-o",
        tmp_path / "out",
        "--config",
        tmp_path / "recipe.toml",
        "-q",
    )
    assert done.exit_code == 0, done.stderr
    words = page_document(tmp_path / "out")
    shown = Page(page(words))
    assert "fp8, a16 activations in 1 layer; 1 layer left as in the source" in shown.text
    assert "model.layers.0.mlp.experts" in shown.text


def test_warnings_and_lineage_of_a_manifest(own: Path) -> None:
    words = manifest(own)
    ancestor = replace(read_manifest(own), sha256="ab12" * 16).as_ancestor()
    words |= {"warnings": ["Beware of <this>."], "derived_from": [ancestor.to_dict()]}
    write_manifest(own, words)
    text = page(page_document(own))
    assert "Beware of &lt;this&gt;." in text
    assert "manifest_sha256 ab12ab12" in text


# --- safe to open ------------------------------------------------------------------------------------------


def test_nothing_is_loaded_and_nothing_runs(made: Path) -> None:
    text = page(page_document(made))
    shown = Page(text)
    assert not re.findall(r"https?://|//\w|@import|url\(", text)
    tags = {tag for tag, _ in shown.attributes}
    assert tags.isdisjoint({"script", "iframe", "object", "embed", "img", "base", "form"})
    assert not [
        name for _, attributes in shown.attributes for name in attributes if name.startswith("on")
    ]
    links = [attributes["href"] or "" for _, attributes in shown.attributes if "href" in attributes]
    assert all(link == "data:," or link.startswith("#") for link in links)
    anchors = {attributes["id"] for _, attributes in shown.attributes if "id" in attributes}
    assert {link[1:] for link in links if link.startswith("#")} == anchors
    metas = [attributes for tag, attributes in shown.attributes if tag == "meta"]
    policy = next(
        one["content"] for one in metas if one.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in str(policy)
    assert "script" not in str(policy)
    assert any(one.get("name") == "viewport" for one in metas)


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m\u202e & " + "x" * 300


def test_hostile_names_come_out_as_text(own: Path) -> None:
    words = manifest(own)
    words["source"] |= {"name": HOSTILE, "revision": HOSTILE, "index_sha256": HOSTILE}
    words["source"]["files"][0] |= {"name": HOSTILE, "header_sha256": HOSTILE}
    words |= {"family_chosen_because": HOSTILE, "warnings": [HOSTILE]}
    ancestor = replace(
        read_manifest(own), sha256=HOSTILE, schema_name=HOSTILE, dtype=HOSTILE
    ).as_ancestor()
    words["derived_from"] = [ancestor.to_dict()]
    words |= {"hqconv_version": HOSTILE, "humming_kernels_version": HOSTILE, "schema_name": HOSTILE}
    words["family"] = HOSTILE
    layer = words["blocks"]["model.layers.0.mlp.experts"]
    layer |= {"conversion": HOSTILE, "source_dtype": HOSTILE}
    layer["quantization_error"]["w1"]["worst_expert"] = 999
    words["files"][f"{HOSTILE}.txt"] = {"size_bytes": 1, "sha256": HOSTILE}
    words["tensors"]["dropped"][HOSTILE] = HOSTILE
    write_manifest(own, words)
    check: dict[str, Any] = {"status": HOSTILE, "skipped_because": HOSTILE, "notes": [HOSTILE]}
    check |= {"findings": [dict.fromkeys(("where", "what", "expected", "found"), HOSTILE)]}
    check["measured"] = {HOSTILE: {HOSTILE: {"relative_error": 0.1}}}
    kernel = {**check, "measured": {HOSTILE: {"kernel": 0.1, "routed_by": HOSTILE}}}
    checks = {"weights": check, "kernel": kernel, HOSTILE: check}
    errors = {
        HOSTILE: {HOSTILE: [0.5]},
        "model.layers.0.mlp.experts": {"w1": [0.1, float("nan"), 0.2, 0.3]},
    }
    verification = {"passed": False, "source": HOSTILE, "checks": checks}
    text = page(page_document(own, verification, errors))
    shown = Page(text)
    assert {tag for tag, _ in shown.attributes}.isdisjoint({"script", "img"})
    assert not [
        name for _, attributes in shown.attributes for name in attributes if name.startswith("on")
    ]
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "x" * 250 not in text
    assert shown.text.count("<script>alert(1)</script>") > 20


# --- damage, and places ------------------------------------------------------------------------------------


def test_verify_writes_a_page_of_what_is_wrong(own: Path, model: Path, tmp_path: Path) -> None:
    path = next((own / "experts").rglob("*layers.0*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-20_000] ^= 1
    path.write_bytes(raw)
    place = tmp_path / "page.html"
    done = call("verify", own, "--source", model, "--report", place, "--json", "--device", "cpu")
    assert done.exit_code == 1
    findings = [
        one for check in json.loads(done.stdout)["checks"].values() for one in check["findings"]
    ]
    shown = read(place)
    assert findings
    for one in findings:
        assert any(row[1] == one["what"] for row in shown.rows)
    assert "failed" in shown.text
    assert call("report", own, "--source", model, "-o", place, "--device", "cpu").exit_code == 1


@pytest.mark.parametrize("damage", ["manifest", "file"])
def test_what_cannot_be_read_is_said(damage: str, own: Path, tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    if damage == "manifest":
        (own / "hqconv.json").write_text("{}")
    else:
        path = next((own / "experts").rglob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:100])
    refused = call("report", own, "-o", place)
    if damage == "manifest":
        assert refused.exit_code == 1
        assert refused.stderr.startswith("error: ")
        assert not place.exists()
    else:  # of the manifest alone
        assert refused.exit_code == 0
    assert call("verify", own, "--checks", "files", "--report", place).exit_code == 1
    shown = read(place)
    assert "failed" in shown.text
    assert ("damaged" if damage == "manifest" else "file") in shown.text
    assert str(tmp_path) not in place.read_text()


def test_the_page_goes_beside_and_never_over_other_files(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = read_tree(made)
    assert call("report", tmp_path / "none", "-o", "page.html").exit_code == 2
    assert call("report", made, "-o", "page.html", "--revision", "main").exit_code == 2
    assert not list(tmp_path.iterdir())
    assert call("report", made).exit_code == 0
    place = tmp_path / "out.report.html"
    mask = os.umask(0)
    os.umask(mask)
    assert place.stat().st_mode & 0o777 == 0o666 & ~mask
    assert call("report", made, "-q").stdout == ""  # a page of ours is replaced
    place.write_text("mine")
    refused = call("report", made)
    assert refused.exit_code == 4
    assert "not a report of hqconv" in refused.stderr
    assert place.read_text() == "mine"
    assert call("verify", made, "--checks", "files", "--report", place).exit_code == 4
    assert place.read_text() == "mine"
    place.unlink()
    done = call("verify", made, "--checks", "files,weights", "--report", place, "--device", "cpu")
    assert (done.exit_code, f"The page is in {place}." in done.stderr) == (0, True)
    assert "passed" in read(place).text
    assert read_tree(made) == before
    (tmp_path / "folder").mkdir()
    assert call("report", made, "-o", tmp_path / "folder").exit_code == 4
    for command in (("report", made, "-o"), ("verify", made, "--report")):
        refused = call(*command, tmp_path / "nowhere/page.html")
        assert refused.exit_code == 4
        assert "no such folder" in refused.stderr
        assert "PASS" not in refused.stdout  # nobody waited for the checks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.report.html"]


def test_the_page_lies_outside_of_the_artifact(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_tree(own)
    monkeypatch.chdir(own)
    refused = call("report", own)
    assert refused.exit_code == 4
    assert "-o" in refused.stderr
    assert read_tree(own) == before
    assert call("report", own, "-o", own / "page.html").exit_code == 4
    assert read_tree(own) == before


# --- plots -------------------------------------------------------------------------------------------------


def test_ticks_are_round_and_reach_the_top() -> None:
    for top in (1e-9, 0.02, 0.1, 0.16193, 1, 7.5, 10, 640):
        found = ticks(top)
        assert found[0] == 0
        assert found[-1] >= top * (1 - 1e-9)
        assert found[-2] < top
        assert 2 <= len(found) <= 6
        assert all(len(f"{one:.6g}".strip("0.").replace(".", "")) <= 9 for one in found)


def test_lines_have_gaps_where_nothing_is_known() -> None:
    values = [0.1, None, 0.2, float("nan")]
    drawn = plot(
        "t", [Series("s", "w1", [(x, y, str(x)) for x, y in enumerate(values)])], ["a", "d"]
    )
    (line,) = drawn["lines"]
    assert line["path"].count("M") == 2
    assert "L" not in line["path"]
    assert [dot["value"] for dot in drawn["dots"]] == [0.1, 0.2]
    flat = plot("t", [Series("s", "w1", [(1.0, 0.0, "a"), (1.0, 0.5, "b")])], [])
    assert flat["lines"][0]["path"] == "M500 100L500 0"


def test_figures() -> None:
    values = (0.5, 1_234_567, float("nan"), None, True)
    assert [number(value) for value in values] == ["0.5", "1,234,567", "–", "–", "–"]
    assert [figure(value) for value in (0.16, 3, 0.0, float("inf"))] == ["0.1600", "3", "0", "–"]


def test_the_manifest_is_read_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a large model has a million lines."""
    read, paths = manifest_module._read, list[Path]()

    def noted(root: Path, path: Path) -> Any:
        paths.append(path)
        return read(root, path)

    monkeypatch.setattr(manifest_module, "_read", noted)
    assert call("report", made, "-o", tmp_path / "page.html").exit_code == 0
    assert len(paths) == 1
