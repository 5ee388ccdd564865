"""Documents beside an artifact's weights: model card, SHA256SUMS, evaluation.json."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import hqconv
from hqconv.artifact.manifest import ManifestSource, read_manifest
from hqconv.artifact.model_card import card_bytes, read_evaluation, write_evaluation
from hqconv.errors import InputError, OutputError
from hqconv.io.checkpoint_files import FrontMatter
from hqconv.planning.calibration import Calibration
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, evaluation_of, manifest, run
from tests.make.qwen import write_qwen3_moe

CARD = b"""---
license: apache-2.0
license_link: https://example.org/LICENSE
tags:
- moe
- "\xc3\xbcber"
language: [en, de]
base_model: org/before
library_name: transformers
model-index: [{name: x, results: []}]
---
# The original

```yaml
text: "|"
```
Last line without an end"""
NO_YAML = "The front matter of README.md was not taken over: it is no YAML of keys and values, or larger than 4 MiB."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("card") / "src", num_layers=2, num_experts=3)


@pytest.fixture
def source(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "src")
    (tmp_path / "src/README.md").write_bytes(CARD)
    return tmp_path / "src"


def front(card: bytes) -> dict[str, Any]:
    document = yaml.safe_load(card.split(b"---\n")[1])
    assert isinstance(document, dict)
    return document


def test_the_card_says_what_the_artifact_is(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out", "int4-g64", Grid(2, 1))
    card = (tmp_path / "out/README.md").read_bytes()
    assert front(card) == {
        "license": "apache-2.0",
        "license_link": "https://example.org/LICENSE",
        "language": ["en", "de"],
        "library_name": "vllm",
        "tags": ["moe", "über", "hqconv", "humming"],
    }
    text = card.decode()
    assert "# src, int4-g64 for Humming\n" in text
    assert (
        "    pip install './hqconv[vllm]'\n    vllm serve ORG/NAME --tensor-parallel-size 2\n"
        in text
    )
    assert (
        "| for | H100, H200, H20, GH200 (sm90); 2 TP x 1 EP ranks; no other GPU or ranks |" in text
    )
    assert str(tmp_path) not in text
    worst = max(errors["w1"]["relative_error"] for errors in report.errors.values())
    assert f"| {worst:.5f} |" in text.split("gate (w1)")[1].split("\n")[0]
    assert "hqconv verify . --source SRC" in text
    assert_verified(tmp_path / "out", source)


def test_a_card_of_a_repo(model: Path, tmp_path: Path) -> None:
    """Its bytes depend on the manifest without its `files`, and on the front matter of the source's card."""
    run(model, tmp_path / "out", "int4-g64")
    recorded = read_manifest(tmp_path / "out")
    repo = ManifestSource(name="org/name", revision="0" * 40, files=[])
    described = replace(recorded, source=repo, tp=2, ep=2, files={})
    text = card_bytes(described, None).decode()
    assert "base_model:\n- org/name\nbase_model_relation: quantized\n" in text
    assert f"| source | org/name at {'0' * 40} |" in text
    assert "| schema | int4-g64: uint4, " in text
    text_of = Calibration("wiki.txt", "", 4096, 512, "cpu", "", "")
    calibrated = replace(described, quantizer="gptq", calibration=text_of)
    row = "| quantizer | gptq: calibrated with 4096 tokens of wiki.txt |"
    assert row in card_bytes(calibrated, None).decode()
    assert f"    hqconv verify . --source org/name --revision {'0' * 40}\n" in text
    assert "vLLM has no start for these ranks." in text
    start, _, body = CARD.rpartition(b"---\n")
    card = card_bytes(described, CARD)
    assert card == card_bytes(described, start + b"---\nAnother text.")
    assert body not in card


NOT_YAML = (
    b"a: [",
    b"- 1\n- 2",
    b"a: \xff",
    b"a: 2024-13-45",
    b"? [1]\n: {}",
    b"a: " + b"[" * 20_000,
    b"a: " + b"x" * (5 << 20),
    b"a: !!python/object:os.system {}",
)


def test_front_matter_that_cannot_be_read(source: Path, tmp_path: Path) -> None:
    for raw in NOT_YAML:
        (source / "README.md").write_bytes(b"---\n" + raw + b"\n---\nbody")
        found = FrontMatter.of((source / "README.md").read_bytes())
        assert (found.document, found.problem != "") == ({}, True), raw[:20]
    report = run(source, tmp_path / "out", "int4-g64")
    assert NO_YAML in report.warnings
    assert NO_YAML in manifest(tmp_path / "out")["warnings"]
    assert hqconv.inspect(tmp_path / "out")["warnings"] == list(report.warnings)
    card = (tmp_path / "out/README.md").read_bytes()
    assert b"body" not in card
    assert set(front(card)) == {"library_name", "tags"}


def test_front_matter() -> None:
    cards: dict[bytes, dict[str, Any]] = {
        b"": {},
        b"# No front": {},
        b"\xef\xbb\xbf---\r\na: b\r\n---\r\n# T": {"a": "b"},
        b"---\n---\nx": {},
        b"---\na: b\n---": {"a": "b"},
        b"---\nnever ends": {},
        b"text\n---\na: b\n---\n": {},
    }
    for card, values in cards.items():
        assert FrontMatter.of(card) == FrontMatter(values), card


def test_the_sums_are_sha256sums(source: Path, tmp_path: Path) -> None:
    """Of every file but themselves, with names that a line cannot hold as they are."""
    for name in ("back\\slash.txt", "line\nfeed.txt", "return\rs.txt", "ü space.txt"):
        (source / name).write_text(name)
    out = tmp_path / "out"
    run(source, out, "int4-g64", Grid(2, 1))
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [path for path in out.rglob("*") if path.is_file()]
    assert done.stdout.count(": OK") == len(files) - 1
    assert_verified(out, source)
    (out / "tokenizer.json").write_text("[]")
    assert subprocess.run(command, cwd=out, capture_output=True, check=False).returncode == 1


def test_a_card_that_is_no_file_or_too_large(source: Path, tmp_path: Path) -> None:
    with (source / "README.md").open("r+b") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(InputError, match="model card cannot be read"):
        run(source, tmp_path / "out", "int4-g64")
    (source / "README.md").unlink()
    (source / "README.md").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="leads out of the source"):
        run(source, tmp_path / "out", "int4-g64")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["README.md", "SHA256SUMS"])
def test_what_people_edited_is_not_replaced(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out, "int4-g64")
    run(source, out, "int8", overwrite=True)  # as hqconv wrote it, it is
    (out / name).write_text("ours")
    with pytest.raises(OutputError, match="did not make") as caught:
        run(source, out, "int4-g64", overwrite=True)
    assert caught.value.found == name
    notes = hqconv.api.describe_plan(
        hqconv.plan(source, schema="int4-g64", target="sm90"), out, device="cpu", overwrite=True
    )["notes"]
    assert any(name in note for note in notes)
    (out / name).unlink()
    run(source, out, "int4-g64", overwrite=True)
    assert_verified(out, source)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_evaluation_counts_while_it_is_whole_and_names_the_manifest(
    model: Path, tmp_path: Path
) -> None:
    """Whatever else lies there: it may come with a stranger's artifact."""
    run(model, tmp_path / "out", "int4-g64")
    described = read_manifest(tmp_path / "out")
    whole = evaluation_of(described.sha256)
    assert read_evaluation(tmp_path, described) is None
    write_evaluation(tmp_path, whole)
    assert read_evaluation(tmp_path, described) == whole
    assert read_evaluation(tmp_path, replace(described, sha256="cd" * 32)) is None
    used = whole.keys() - {"kind", "warnings"}
    altered: list[Any] = [[whole], "x"]
    altered += [{key: whole[key] for key in whole if key != missing} for missing in used]
    altered += [{**whole, key: value} for key in used for value in (None, [], {}, True)]
    for key in ("kl", "perplexity", "mean_nll", "top1_agreement"):
        inner = whole[key] if isinstance(whole[key], dict) else {}
        altered.append({**whole, key: 10**400})  # no float
        altered += [{**whole, key: {**inner, name: 10**400}} for name in inner]
        altered += [{**whole, key: {**inner, name: "x"}} for name in inner]
    for document in altered:
        (tmp_path / "evaluation.json").write_text(json.dumps(document))
        assert read_evaluation(tmp_path, described) is None, document
    (tmp_path / "evaluation.json").write_bytes(b"{")
    assert read_evaluation(tmp_path, described) is None
