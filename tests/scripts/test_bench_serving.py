"""The list, the turns, the record and the table of scripts/bench_serving.py."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hqconv.reports.ranking import rank_schemas
from scripts.bench_serving import (
    ACTIVATIONS,
    BASE,
    PAGE,
    Way,
    chosen,
    make_model,
    merged,
    page_text,
    recorded,
    table,
    ways,
)
from scripts.engines import Engine, run_in_turns
from scripts.few_kernels import kept
from scripts.shared import make_source

# An engine that starts at once or fails, and notes when it worked.
STANDIN = """
import json, pathlib, sys, time
model, report, *words = sys.argv[1:]
folder = pathlib.Path(report).parent
if "broken" in words:
    raise SystemExit("RuntimeError: no such kernel")
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
begun = time.time()
time.sleep(0.2)
(folder / "part").write_text(json.dumps({"worked": [begun, time.time()]}))
(folder / "part").rename(report)
"""


def row(name: str, prefill_ms: float = 10.0, **words: Any) -> dict[str, Any]:
    timed = {what: {"gpu_ms": ms} for what, ms in (("prefill", prefill_ms), ("decode_1", 0.5), ("decode_64", 2.0))}
    facts = {
        "name": name,
        "schema": name.partition("/")[0],
        "input_schema": "a16",
        "served": "vLLM",
        "gpu": "NVIDIA H200",
    }
    return {**facts, "date": "2026-11-24", "layers": 8, "gpu_bytes": 3 * 10**9, **timed, **words}


@pytest.mark.parametrize("inputs", ACTIVATIONS)
def test_every_pair_of_the_ranking_is_in_the_list(inputs: str) -> None:
    """Of the presets; the ranking of `schemas --for` has shorthands, too."""
    found = {way.schema for way in ways() if way.inputs == inputs and way.model == "kernel"}
    ranked = {one["name"] for one in rank_schemas("sm90", inputs)["schemas"]}
    assert found
    assert found == ranked & {way.schema for way in ways()}


def test_names_are_unique_and_can_be_chosen() -> None:
    names = [way.name for way in ways()]
    assert len({*names}) == len(names)
    assert [way.name for way in chosen(ways(), "bf16,mxfp4/*", "*/int8")] == [BASE, "mxfp4/a16", "mxfp4/fp8"]


def test_engines_work_in_turns(tmp_path: Path) -> None:
    """Three at a time; a broken one and one without its model are rows, and stop nobody."""
    (script := tmp_path / "standin.py").write_text(STANDIN)
    engines = [Engine(name, tmp_path, ["broken"] if name == "b" else [], script=script) for name in "abcdef"]
    prepared: dict[str, float] = {}

    def prepare(engine: Engine) -> None:
        prepared[engine.name] = time.time()
        if engine.name == "d":
            raise ValueError("cannot be converted")

    found = {engine.name: report for engine, report in run_in_turns(engines, 3, prepare)}
    assert "no such kernel" in str(found["b"]["failed"])
    assert found["d"] == {"failed": ["ValueError: cannot be converted"]}
    worked = sorted(found[name]["worked"] for name in "acef")
    assert all(before[1] <= after[0] for before, after in pairwise(worked))
    assert max(prepared[name] for name in "def") < found["a"]["worked"][0], "made while the engines before start"


def test_measured_rows_keep_their_own_tile_sizes() -> None:
    """In Humming's form [least, most, settings]: every count is covered once, the measured ones as before."""
    table = [[0, 4, "a"], [4, 16, "b"], [16, 100, "c"], [100, 600, "d"], [600, 9000, "e"], [9000, 2**30, "f"]]
    rows = (1, 8, 64, 8192)
    assert kept(table, rows) == [[0, 4, "a"], [4, 16, "b"], [16, 100, "c"], [100, 2**30, "e"]]
    assert kept(table, (64,)) == [[0, 2**30, "c"]]


def test_a_failure_takes_no_measured_rows_place() -> None:
    failed = {**row("mxfp4/a16"), "failed": ["why"]}
    old, new = row("mxfp4/a16"), row("mxfp4/a16", 5.0)
    assert merged([old], [failed]) == [old]
    assert merged([failed], [new]) == [new]
    assert merged([old], [new]) == [new]
    other = row("mxfp4/a16", gpu="NVIDIA H100")
    assert merged([old, row("int4/a16")], [row(BASE), other]) == [other, row(BASE), old, row("int4/a16")]


def test_the_table_has_rates_ratios_and_dates() -> None:
    text = table([row(BASE), row("mxfp4/fp8", 8.0), {**row("nvfp4/a16"), "failed": ["why"]}])
    assert "| 819200 (1.00×) | 2000 (1.00×) | 32000 (1.00×) | NVIDIA H200, 2026-11-24 |" in text
    assert "| `mxfp4` | a16 | vLLM | 3.00 | 1024000 (1.25×) |" in text
    assert text.endswith("\nNot started: nvfp4/a16.\n")


def test_the_page_has_the_record() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_text(text, recorded()) == text


def test_the_int4_checkpoint_is_read_as_such(tmp_path: Path) -> None:
    """By hqconv's own reader of compressed-tensors, which knows it as uint4 in groups of 128."""
    import hqconv

    sizes = {"hidden": 256, "intermediate": 128, "layers": 1, "experts": 4, "top_k": 2}
    source = make_source(tmp_path / "source", **sizes)
    make_model(Way("marlin-int4", "int4", "a16", "", "int4"), source, tmp_path / "int4")
    hqconv.convert(tmp_path / "int4", tmp_path / "out", schema="source", target="sm90", device="cpu")
    manifest = json.loads((tmp_path / "out" / "hqconv.json").read_text())
    assert manifest["schema_name"] == "int4"
    assert {one["conversion"] for one in manifest["blocks"].values()} == {"direct"}
