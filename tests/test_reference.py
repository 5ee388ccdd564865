"""docs/artifact.md: every key of real manifests has a row there, of its type, and every row is met by a manifest."""

from __future__ import annotations

import re
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
from tests.make.input_scales import STATIC
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tokenizer import write_tokenizer

PAGE = REPO / "docs" / "artifact.md"
Manifests = dict[str, Any]


def call(*arguments: object) -> None:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


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


def write_calibrated(folder: Path) -> Path:
    """A model that transformers runs."""
    save_family(folder, "qwen3_moe", inner=64)
    write_tokenizer(folder)
    return folder


def make_artifacts(folder: Path) -> None:
    """Artifacts of every sort: of each format version, layout and kind of source."""
    src = write_qwen3_moe(folder / "src", num_layers=3, intermediate_size=256)
    scales, schema, inputs = STATIC["fp8"]
    run(src, folder / "kernel", "mxfp4", Grid(2))
    run(src, folder / "checkpoint", "int4", layout="checkpoint", source_digests=True)
    (folder / "mixed.toml").write_text(MIXED)
    options = ("--config", folder / "mixed.toml", "--schema=fp8", "--device=cpu", "--cuda=13.0")
    call("convert", src, "-o", folder / "mixed", *options, "--dtype", "float16", "--target", "sm89")
    run(small.save(folder / "scaled", scales()), folder / "static", schema, input_schema=inputs)
    run(src, folder / "searched", "int4-g32", quantizer="mse")
    calibrated, text = write_calibrated(folder / "calibrated-src"), folder / "text"
    text.write_text(" ".join(map(str, range(3, 60))))
    run(calibrated, folder / "calibrated", "int4-g32", calibrate=text, calibrate_context=16)
    run(folder / "calibrated", folder / "cut-calibrated", "source", Grid(2))
    run(calibrated, folder / "dense", "int8", dense="int8", dense_layers={"*.o_proj": "fp8"})
    rounded = write(folder / "rounded-src", "gptq-int4-zp").folder
    run(rounded, folder / "rounded", "source", dtype="bfloat16", round_scales=True)
    run(write(folder / "coded", "fp8-block").folder, folder / "requantized", "mxfp4")
    run(
        small.save(folder / "ordered", small.gptq()), folder / "sorted", "int4-g64", dtype="float16"
    )
    activated = small.with_activation({"model_type": "qwen3_moe", "hidden_act": "situ"})
    run(small.save(folder / "activated", activated), folder / "unknown", "int8")
    limited = small.with_activation({"model_type": "gpt_oss"})
    run(small.save(folder / "limited", limited), folder / "with-numbers", "int8")
    run(
        folder / "mixed",
        folder / "cut-mixed",
        "source",
        Grid(2),
        dtype="float16",
        target="sm89",
        cuda="13.0",
    )
    run(folder / "searched", folder / "cut-searched", "source", Grid(2))
    run(folder / "rounded", folder / "cut-rounded", "source", Grid(2))
    run(src, folder / "for-a-compiler", "fp8", dtype="float16", target="sm89", cuda="13.0")
    run(folder / "for-a-compiler", folder / "cut-again", "int8")
    run(src, folder / "by-groups", "mxfp4", Grid(3, split=GROUPS))


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    folder = tmp_path_factory.mktemp("reference")
    make_artifacts(folder)
    with pytest.MonkeyPatch.context() as patch, hub_server.serve(folder / "src") as hub:
        hub_server.use(patch, hub.url, folder / "cache")
        run("org/name", folder / "of-hub", "mxfp4")  # type: ignore[arg-type]
    return {
        path.parent.name: manifest(path.parent) for path in sorted(folder.glob("*/hqconv.json"))
    }


# --- the page's tables -------------------------------------------------------------------------------------

PLAIN: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "any": (object,),
}
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|[^|]*\|$", re.MULTILINE)
Tables = dict[str, dict[str, tuple[str, str]]]


def tables_of(page: Path) -> Tables:
    """Title of a table → key → its type in words, and when it is there."""
    tables: Tables = {}
    for section in re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        tables[title] = {key: (kind, when) for key, kind, when in ROW.findall(section)}
        num_lines = len(re.findall(r"^\|", section, re.MULTILINE)) - 2
        assert len(tables[title]) == num_lines, f"{title}: a row cannot be read, or is there twice"
    return tables


def problems(tables: Tables, value: Any, kind: str, where: str, seen: set[str]) -> list[str]:
    """What of a value is not as a type in words, or a table, has it; adds the rows that it met to `seen`."""
    choices = kind.split(" or ")
    if len(choices) > 1:
        return min((problems(tables, value, one, where, seen) for one in choices), key=len)
    if kind in PLAIN:
        is_right = isinstance(value, PLAIN[kind])
        if isinstance(value, bool):
            is_right = kind in ("boolean", "any")
        return [] if is_right else [f"{where} is no {kind}: {value!r:.60}"]
    outer, _, inner = kind.partition(" of ")
    items = dict(enumerate(value)) if outer == "list" and isinstance(value, list) else value
    if not isinstance(items, dict):
        return [f"{where} is no {outer}: {value!r:.60}"]
    if not inner:
        return _table_problems(tables, items, kind, where, seen)
    return [
        problem
        for key, item in items.items()
        for problem in problems(tables, item, inner, f"{where}[{key}]", seen)
    ]


def _table_problems(
    tables: Tables, document: dict[str, Any], title: str, where: str, seen: set[str]
) -> list[str]:
    table = tables[title]
    found = [f"{where}: {title} has no row for `{key}`" for key in document.keys() - table.keys()]
    for key, (kind, when) in table.items():
        if key in document:
            seen.add(f"{title}.{key}")
            found += problems(tables, document[key], kind, f"{where}.{key}", seen)
        elif when.startswith("always"):
            found.append(f"{where}: `{key}` of {title} is missing")
    return found


@pytest.mark.full
def test_every_key_has_a_row_and_every_row_a_key(manifests: Manifests) -> None:
    tables, seen = tables_of(PAGE), set[str]()
    wrong = [
        problem
        for name, document in manifests.items()
        for problem in problems(tables, document, "Manifest", name, seen)
    ]
    assert not wrong, "\n".join(sorted(wrong))
    assert seen == {f"{title}.{key}" for title, table in tables.items() for key in table}
