"""docs/manifest.md: every key of real manifests and of every document of --json has a row there, of its type, and
every row is met by a document."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hqconv.cli.app import app
from hqconv.schemas.grid import GROUPS, Grid
from tests.make import hub_server, small
from tests.make.conversions import manifest, run
from tests.make.families import save_family
from tests.make.formats import write
from tests.make.hub_upload import serve_uploads
from tests.make.importance import columns_of, write_importance, write_tokenizer
from tests.make.input_scales import STATIC
from tests.make.kernels import fake_compiler, use_compiler
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.reference import Reference

PAGE = REPO / "docs" / "manifest.md"
# What only values that are not made here bring about; tests/verification has them.
NOT_MADE_HERE = {"Figures.num_flushed_scales", "Figures.num_misread_codes"}
Documents = dict[str, tuple[str, Any]]  # what it is of → the table, the document


def told(*arguments: object, exit_code: int = 0) -> Any:
    """What a command prints with --json."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == exit_code, done.output
    words = json.loads(done.stdout)
    assert words.pop("json_version") == 1  # of every document: docs/ci.md
    assert words.pop("tool").keys() == {"hqconv_version", "humming_kernels_version"}
    return words


MIXED = """
target = "sm90"
input_schema = "fp8"
[[override]]
layers = "0"
schema = "int8"
input_schema = "int8"
[[override]]
layers = "1"
schema = "none"
"""


def make_artifacts(folder: Path) -> None:
    """Artifacts of every sort: of each format version, layout and kind of source."""
    src = write_qwen3_moe(folder / "src", num_layers=3, intermediate_size=256)
    scales, schema, inputs = STATIC["fp8"]
    run(src, folder / "kernel", "mxfp4", Grid(2))
    run(src, folder / "checkpoint", "int4", layout="checkpoint", source_digests=True)
    (folder / "mixed.toml").write_text(MIXED)
    options = ("--config", folder / "mixed.toml", "--schema", "fp8", "--device", "cpu", "--cuda", "13.0")
    told("convert", src, "-o", folder / "mixed", *options, "--dtype", "float16", "--target", "sm89")
    run(small.save(folder / "scaled", scales()), folder / "static", schema, input_schema=inputs)
    columns = write_importance(folder / "columns.safetensors", columns_of(src))
    run(src, folder / "searched", "int4-g32", quantizer="mse", importance=columns)
    rounded = write(folder / "rounded-src", "gptq-int4-zp").folder
    run(rounded, folder / "rounded", "source", dtype="bfloat16", round_scales=True)
    run(write(folder / "coded", "fp8-block").folder, folder / "requantized", "mxfp4")
    run(small.save(folder / "ordered", small.gptq()), folder / "sorted", "int4-g64", dtype="float16")
    activated = small.with_activation({"model_type": "qwen3_moe", "hidden_act": "situ"})
    run(small.save(folder / "activated", activated), folder / "unknown", "int8")
    limited = small.with_activation({"model_type": "gpt_oss"})
    run(small.save(folder / "limited", limited), folder / "with-numbers", "int8")
    run(folder / "mixed", folder / "cut-mixed", "source", Grid(2), dtype="float16", target="sm89", cuda="13.0")
    run(folder / "searched", folder / "cut-searched", "source", Grid(2))
    run(folder / "rounded", folder / "cut-rounded", "source", Grid(2))
    run(src, folder / "for-a-compiler", "fp8", dtype="float16", target="sm89", cuda="13.0")
    run(folder / "for-a-compiler", folder / "cut-again", "int8")
    run(src, folder / "by-groups", "mxfp4", Grid(3, split=GROUPS))


def make_unfinished(folder: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.num_groups_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder / "src", folder / "unfinished", "mxfp4", progress=stop)


def commands(folder: Path) -> Iterator[tuple[str, Any]]:
    """The documents of commands that need no Hub."""
    src, out = folder / "src", folder / "kernel"
    options = ("--target", "sm90", "--device", "cpu")
    profile = folder / "profile.json"
    words = told("convert", src, "-o", folder / "again", "--schema", "mxfp4", *options, "--profile", profile)
    yield "Summary", words
    yield "Profile", json.loads(profile.read_bytes())
    yield "Summary", told("convert", src, "-o", folder / "again", "--schema", "mxfp4", *options, "--resume")
    coded = ("convert", folder / "coded", "-o", folder / "anew", "--schema", "int4", *options)
    yield "Plan", told(*coded, "--dry-run")
    yield "Summary", told(*coded)
    yield "Plan", told("convert", out, "--schema", "source", "--dry-run", *options, "--tp", 4)
    bad = small.save(folder / "bad", small.plain())
    words = json.loads((bad / "config.json").read_bytes()) | {"quantization_config": {"quant_method": "huh"}}
    (bad / "config.json").write_text(json.dumps(words))
    for name in ("src", "coded", "activated", "bad"):
        yield "Source", told("inspect", folder / name)
    yield "Unfinished", told("inspect", folder / "unfinished")
    yield "Report", told("verify", out, "--source", src)
    yield "Report", told("verify", out)
    victim = Path(shutil.copytree(out, folder / "damaged")) / "tokenizer.json"
    victim.write_text("{ }")
    yield "Report", told("verify", victim.parent, exit_code=1)
    save_family(folder / "mixtral", "mixtral", inner=64)
    write_tokenizer(folder / "mixtral")
    (folder / "text").write_text("1 2 3")
    made = ("--text", folder / "text", "-o", folder / "made.safetensors", "--device", "cpu")
    yield "ImportanceFile", told("importance", folder / "mixtral", *made)
    for number, (name, *more) in enumerate(
        (
            ("src", "--bits", 6, "--candidates", "mxfp4,int8", "--max-layer-error", 0.5),
            ("src", "--size", "9MB", "--quantizer", "mse", "--importance", folder / "columns.safetensors"),
            ("coded", "--bits", 99, "--input-schema", "fp8"),
            ("rounded-src", "--bits", 99, "--candidates", "source", "--dtype", "bfloat16", "--round-scales"),
        )
    ):
        recipe = folder / f"{number}.toml"
        yield "Allocation", told("allocate", folder / name, "-o", recipe, *more, *options)
    run(folder / "mixtral", folder / "of-mixtral", "int4-g32")
    made = ("--text", folder / "text", "--context", 2, "--device", "cpu")
    yield "Evaluation", told("evaluate", folder / "of-mixtral", "--source", folder / "mixtral", *made)
    yield "Schemas", told("schemas")
    yield "Recipes", told("schemas", "--recipes")
    for options in (("h200", "--input-schema", "fp8"), ("b200",)):
        yield "Ranking", told("schemas", "--for", *options)


def of_a_hub(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """What comes from the Hub, and goes there."""
    with serve_uploads() as hub:
        hub_server.use(patch, hub.url, folder / "cache")
        yield "Push", told("push", folder / "kernel", "org/name")
        made = ("publish", folder / "src", "org/name", "-o", folder / "published", "--schema", "mxfp4")
        of_cpu = ("--target", "sm90", "--device", "cpu", "--branch", "other")
        yield "Publication", told(*made, *of_cpu, "--max-error", "0.01", exit_code=1)
        yield "Publication", told(*made, *of_cpu, "--source-digests")
        yield "Publication", told(*made, *of_cpu)
        options = ("--target", "sm90", "--device", "cpu", "--resume")
        yield ("Summary", told("convert", folder / "src", "-o", folder / "again", "--schema", "mxfp4", *options))
        part = (*options[:-1], "--part", "1/2")
        yield ("PartSummary", told("convert", folder / "src", "-o", folder / "parts", "--schema", "mxfp4", *part))
    for name in ("src", "kernel"):
        with hub_server.serve(folder / name) as hub_of_one:
            hub_server.use(patch, hub_of_one.url, folder / f"cache-{name}")
            yield ("Source" if name == "src" else "Artifact"), told("inspect", "org/name")
            if name == "src":
                run("org/name", folder / "of-hub", "mxfp4")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    folder = tmp_path_factory.mktemp("reference")
    make_artifacts(folder)
    make_unfinished(folder)
    found: Documents = {}

    def add(pairs: Iterator[tuple[str, Any]]) -> None:
        for number, (table, words) in enumerate(pairs, start=len(found)):
            found[f"{number} {table}"] = (table, words)

    with pytest.MonkeyPatch.context() as patch:
        use_compiler(patch, fake_compiler())
        add(iter([("Warm", told("warm", folder / "kernel", "--gpu", "h200"))]))
    add(commands(folder))
    with pytest.MonkeyPatch.context() as patch:
        add(of_a_hub(folder, patch))
    for path in sorted(folder.glob("*/hqconv.json")):
        found[f"manifest of {path.parent.name}"] = ("Manifest", manifest(path.parent))
        code = int(path.parent.name == "damaged")
        found[f"inspect {path.parent.name}"] = ("Artifact", told("inspect", path.parent, exit_code=code))
    return found


def figures(words: Any) -> Any:
    return words["checks"]["weights"]["measured"]


@pytest.fixture(scope="module")
def reference(documents: Documents) -> Reference:
    """The page, held to every document."""
    return Reference.read(PAGE)


@pytest.mark.full
def test_every_key_has_a_row_and_every_row_a_key(documents: Documents, reference: Reference) -> None:
    wrong = [
        f"{name}{problem}" for name, (table, words) in documents.items() for problem in reference.problems(words, table)
    ]
    for name, (table, words) in documents.items():
        if table == "Report":
            wrong += [f"{name}{one}" for one in reference.problems(figures(words), "map of map of Figures")]
    assert not wrong, "\n".join(sorted(set(wrong)))
    assert reference.unseen() == NOT_MADE_HERE
    kinds = {table: words["kind"] for table, words in documents.values() if "kind" in words}
    text = PAGE.read_text()
    assert all(
        f"`kind` is `{kind}`" in text.partition(f"### {table}\n")[2].partition("###")[0]
        for table, kind in kinds.items()
    )


def broken(change: Callable[[dict[str, Any]], object], documents: Documents) -> list[str]:
    words = json.loads(json.dumps(documents["manifest of kernel"][1]))
    change(words)
    return list(Reference.read(PAGE).problems(words, "Manifest"))


def layer(words: dict[str, Any]) -> Any:
    return next(iter(words["blocks"].values()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda words: words.update(new=1), "the table Manifest has no row for `new`"),
        (lambda words: words.pop("digest"), "`digest` of Manifest is missing"),
        (lambda words: words.update(tp=True), ".tp is no integer: True"),
        (lambda words: words.update(files=[]), ".files is no map: []"),
        (lambda words: words["source"].update(revision=1), ".source.revision is no text: 1"),
        (lambda words: layer(words)["w2"]["flags"].popitem(), "of Flags is missing"),
        (lambda words: layer(words).update(w13_order="gate"), "w13_order is no list: 'gate'"),
        (lambda words: layer(words)["quantization_error"]["w1"].update(worst_expert=0.5), "is no integer: 0.5"),
    ],
)
def test_a_document_that_is_otherwise_is_seen(
    change: Callable[[dict[str, Any]], object], problem: str, documents: Documents
) -> None:
    (found,) = broken(change, documents)
    assert problem in found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| `tp` | integer | always |", "| `tp` | integr | always |"),
        ("| `worst_block` | text |", "| worst_block | text |"),
        ("### View", "### Part"),
        ("| `ep` | integer", "| `tp` | integer"),
    ],
)
def test_a_table_that_cannot_be_read_is_seen(old: str, new: str, tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert old in text
    (tmp_path / "page.md").write_text(text.replace(old, new, 1))
    with pytest.raises(AssertionError):
        Reference.read(tmp_path / "page.md")
