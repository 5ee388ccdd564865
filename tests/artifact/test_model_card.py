"""The model card and SHA256SUMS: what they say, whatever the source's own card is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import hqconv
from hqconv.artifact.manifest import (
    Manifest,
    ManifestLayer,
    ManifestSource,
    ProjectionError,
    TensorAccounting,
)
from hqconv.artifact.model_card import card_bytes
from hqconv.errors import InputError, OutputError
from hqconv.io.checkpoint_files import FrontMatter
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, check, manifest, run
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
MARKER = b"<!-- hqconv: what follows is the card of the source, as it was -->\n"
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
    words = yaml.safe_load(card.split(b"---\n")[1])
    assert isinstance(words, dict)
    return words


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
    assert "block" not in text
    assert "| for | sm90; 2 TP x 1 EP ranks; no other GPU or ranks |" in text
    worst = max(words["w1"]["relative_error"] for words in report.errors.values())
    assert f"| {worst:.5f} |" in text.split("gate (w1)")[1].split("\n")[0]
    assert "hqconv verify . --source SRC" in text
    assert_verified(tmp_path / "out", source)


def test_the_sources_card_is_kept_whole(source: Path, tmp_path: Path) -> None:
    """And not once more inside itself, where an artifact is cut again."""
    run(source, tmp_path / "out", "int4-g64", Grid(2, 1))
    run(tmp_path / "out", tmp_path / "again", "source")
    cards = [
        (tmp_path / name / "README.md").read_bytes().partition(MARKER) for name in ("out", "again")
    ]
    listing, body = CARD.split(b"---\n")[1], CARD.split(b"---\n", 2)[2]
    assert cards[0][2] == cards[1][2] == b"\n```yaml\n" + listing + b"```\n\n" + body
    assert cards[0][0] != cards[1][0]
    assert front(cards[1][0]) == front(cards[0][0])
    assert_verified(tmp_path / "again", tmp_path / "out")


def test_a_card_of_a_repo() -> None:
    text = card_bytes(_manifest(), None, is_artifact=False).decode()
    assert "base_model:\n- org/name\nbase_model_relation: quantized\n" in text
    assert f"hqconv verify . --source org/name --revision {'0' * 40}\n" in text
    assert text.endswith("## Warnings\n\nWhat the conversion warned of:\n\n* Something | odd.\n")


def _manifest() -> Manifest:
    layer = ManifestLayer(
        **dict.fromkeys(("layer", "num_experts", "hidden_size", "intermediate_size", "top_k"), 1),
        activation="silu",
        gated=True,
        source_dtype="BF16",
        source_format={},
        source_parts={},
        w13_order=["gate", "up"],
        content_sums={},
        conversion="quantized",
        quantization_error={
            "w2": ProjectionError(relative_error=0.25, worst_expert=0, worst_relative_error=0.25)
        },
    )
    return Manifest(
        format_version=1,
        hqconv_version="0",
        humming_kernels_version="0",
        source=ManifestSource(name="org/name", revision="0" * 40, files=[]),
        layout="kernel",
        schema_name="mxfp4",
        weight_schema={},
        input_schema="a16",
        dtype="bfloat16",
        target="sm90",
        tp=2,
        ep=2,
        expert_placement="linear",
        redundant_experts=0,
        family="mixtral",
        warnings=["Something | odd."],
        blocks={"a.b": layer},
        files={},
        tensors=TensorAccounting(converted={}, copied=[], dropped={}),
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"a: [",
        b"- 1\n- 2",
        b"a: \xff",
        b"a: 2024-13-45",
        b"? [1]\n: {}",
        b"a: " + b"[" * 20_000,
        b"a: " + b"x" * (5 << 20),
        b"a: !!python/object:os.system {}",
    ],
)
def test_front_matter_that_cannot_be_read(raw: bytes, source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_bytes(b"---\n" + raw + b"\n---\nbody")
    report = run(source, tmp_path / "out", "int4-g64")
    assert NO_YAML in report.warnings
    assert NO_YAML in manifest(tmp_path / "out")["warnings"]
    assert hqconv.inspect(tmp_path / "out")["warnings"] == list(report.warnings)
    card = (tmp_path / "out/README.md").read_bytes()
    assert f"* {NO_YAML}".encode() in card
    assert card.endswith(raw + b"\n```\n\nbody")
    assert set(front(card)) == {"library_name", "tags"}


@pytest.mark.parametrize(
    ("card", "words", "body"),
    [
        (b"", {}, b""),
        (b"# No front", {}, b"# No front"),
        (b"\xef\xbb\xbf---\r\na: b\r\n---\r\n# T", {"a": "b"}, b"# T"),
        (b"---\n---\nx", {}, b"x"),
        (b"---\na: b\n---", {"a": "b"}, b""),
        (b"---\nnever ends", {}, b"---\nnever ends"),
        (b"text\n---\na: b\n---\n", {}, b"text\n---\na: b\n---\n"),
    ],
)
def test_front_matter(card: bytes, words: dict[str, Any], body: bytes) -> None:
    found = FrontMatter.of(card)
    assert (found.document, found.body, found.problem) == (words, body, "")


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


def test_a_published_artifact_verifies_and_converts(source: Path, tmp_path: Path) -> None:
    """With what a download brings along, and a card that somebody edited."""
    out = tmp_path / "out"
    run(source, out, "int4-g64", Grid(2, 1))
    (out / "README.md").write_text("A card of our own.")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs")
    (out / ".cache/huggingface/download").mkdir(parents=True)
    (out / ".cache/huggingface/download/config.json.metadata").write_text("x")
    report = check(out, source, "files", "weights")
    assert report.passed
    run(out, tmp_path / "again", "source")
    assert (
        (tmp_path / "again/README.md")
        .read_text()
        .endswith(f"{MARKER.decode()}\nA card of our own.")
    )
    assert hqconv.inspect(out)["missing_or_resized_files"] == []
