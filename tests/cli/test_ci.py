"""What docs/ci.md promises to other programs: documents, their keys, and exit codes."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv import errors
from hqconv.artifact.error_summary import over_limit
from hqconv.cli import output, render
from hqconv.cli.interrupt import MESSAGE
from hqconv.conversion import convert as conversion
from hqconv.io.file_access import sha256_of
from tests.make.command import call
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

OPTIONS = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu")
ERROR_KEYS = {
    "json_version",
    "tool",
    "kind",
    "exit_code",
    "what",
    "where",
    "expected",
    "found",
    "remedy",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", num_layers=1)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    assert call("convert", model, "-o", out, *OPTIONS).exit_code == 0
    return out


def answer(*arguments: object, code: int = 0) -> Any:
    """The command's one document; its exit code must be `code`."""
    done = call(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def refused(*arguments: object, code: int) -> Any:
    words = answer(*arguments, code=code)
    assert (words["kind"], words["exit_code"], words.keys()) == ("error", code, ERROR_KEYS)
    return words


# --- documents ---------------------------------------------------------------------------------------------


def documented_keys() -> dict[str, set[str]]:
    """kind → the keys that the table of docs/ci.md calls stable."""
    text = (REPO / "docs/ci.md").read_text().partition("## Documents")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", keys)) for kind, keys in rows}


def kinds_in_code() -> set[str]:
    """`kind` of every dict literal in the package."""
    found = set()
    for path in (REPO / "hqconv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            found |= {
                value.value
                for key, value in pairs
                if isinstance(key, ast.Constant)
                and key.value == "kind"
                and isinstance(value, ast.Constant)
            }
    return found


def test_the_table_lists_every_document() -> None:
    assert kinds_in_code() == set(render._RENDERERS) | {"error"}
    assert documented_keys().keys() == kinds_in_code()


def test_every_document_has_the_keys_of_the_table(model: Path, made: Path, tmp_path: Path) -> None:
    found = [
        answer("convert", model, "-o", tmp_path / "a", *OPTIONS),
        answer("convert", model, "-o", tmp_path / "b", *OPTIONS, "--dry-run"),
        answer("verify", made, "--source", model, "--device", "cpu"),
        answer("inspect", model),
        answer("inspect", made),
        answer("schemas"),
        answer("inspect", tmp_path / "nothing", code=2),
    ]
    found += [
        answer("schemas", "--recipes"),
        answer("check", model),
        answer("schemas", "--for", "h200"),
        answer("report", made, "-o", tmp_path / "page.html"),
    ]
    keys = documented_keys()
    elsewhere = {
        "push",
        "publication",
        "warm",
        "warm_checkpoint",
        "part",
        "unfinished",
        "evaluation",
        "allocation",
    }
    assert {words["kind"] for words in found} == keys.keys() - elsewhere
    for words in found:
        assert keys[words["kind"]] <= words.keys(), words["kind"]
        assert words["json_version"] == 1
        assert words["tool"] == {
            "hqconv_version": hqconv.__version__,
            "humming_kernels_version": version("humming-kernels"),
        }


def test_the_same_digest_and_warnings_everywhere(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ("--tp", 2, "--ep", 2)  # which vLLM cannot start: a warning
    found = [
        answer("convert", model, "-o", out, *OPTIONS, *more),
        answer("convert", model, "-o", out, *OPTIONS, *more, "--resume"),
        answer("verify", out, "--device", "cpu"),
        answer("inspect", out),
    ]
    assert {words["manifest_sha256"] for words in found} == {sha256_of(out / "hqconv.json")}
    (warning,) = found[0]["warnings"]
    assert "vLLM 0.33 will not serve this artifact" in warning
    assert all(words["warnings"] == [warning] for words in found)
    assert [words["was_finished"] for words in found[:2]] == [False, True]
    assert found[0]["source"] == found[3]["source"] == {"name": "small", "revision": None}
    said = call("convert", model, "-o", out, *OPTIONS, *more, "--resume").stdout
    assert "the artifact was already finished: nothing to do" in " ".join(said.split())
    other = refused("convert", model, "-o", out, *OPTIONS, "--ep", 2, "--resume", code=4)
    assert "differs from this request in: tp (--tp)." in other["what"]
    assert (other["expected"], other["found"]) == ("2", "1")


# --- errors ------------------------------------------------------------------------------------------------


def test_an_error_is_a_document_with_the_parts_of_the_message(model: Path, tmp_path: Path) -> None:
    request = ("convert", model, "-o", tmp_path / "out", *OPTIONS, "--tp", 3)
    words = refused(*request, code=2)
    said = call(*request).stderr
    for key in ("what", "where", "expected", "found", "remedy"):
        assert words[key] in said
    assert words["where"]
    assert words["remedy"]


SHORTAGES = (
    (MemoryError(), "MemoryError"),
    (RuntimeError("can't start new thread"), "can't start new thread"),
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        "DefaultCPUAllocator: can't allocate memory",
    ),
)
ENDS: list[tuple[BaseException, int, tuple[str, str, str]]] = [
    (errors.NetworkError("The Hub does not answer."), 5, ("The Hub does not answer.", "", "")),
    (
        OSError(5, "Input/output error", "/x"),
        4,
        ("The operating system refused.", "/x", "Input/output error"),
    ),
    *(
        (error, 2, ("The system has no more memory or threads.", "", text))
        for error, text in SHORTAGES
    ),
    (ZeroDivisionError("a\nb"), 70, ("This is a bug of hqconv.", "", "ZeroDivisionError: a\nb")),
    (KeyboardInterrupt(), 130, (MESSAGE, "", "")),
]


@pytest.mark.parametrize(
    ("error", "code", "parts"), ENDS, ids=lambda value: str(value) if type(value) is int else ""
)
def test_other_ends_are_documents_as_well(
    error: BaseException,
    code: int,
    parts: tuple[str, ...],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And messages without a traceback, unless HQCONV_DEBUG asks for one."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.delenv("HQCONV_DEBUG", raising=False)
    monkeypatch.setattr(conversion, "convert", fail)
    request = ("convert", model, *OPTIONS)
    words = refused(*request, code=code)
    assert (words["what"], words["where"], words["found"]) == parts
    said = call(*request)
    assert (said.exit_code, said.stdout, "Traceback" in said.stderr) == (code, "", False)
    assert parts[1] in said.stderr
    assert ("internal error: " * (code == 70) + (parts[2] or parts[0])) in said.stderr
    monkeypatch.setenv("HQCONV_DEBUG", "1")
    assert "Traceback" in call(*request).stderr


def test_no_document_follows_half_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full under stdout may have room a moment later."""
    led: list[bool] = []
    monkeypatch.setattr("hqconv.cli.output.discard_stdout", lambda: led.append(True))

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        output.print_json({})
    output.print_error(errors.RequestError("No such thing."), 2)  # fails in silence
    assert led == [True, True]


# --- exit codes --------------------------------------------------------------------------------------------


def both(model: Path, out: Path, *more: object) -> tuple[int, int]:
    """The exit codes of a dry run and of the conversion after it."""
    request = ("convert", model, "-o", out, *OPTIONS, *more)
    return call(*request, "--dry-run").exit_code, call(*request).exit_code


def test_a_dry_run_ends_as_the_conversion_would(model: Path, made: Path, tmp_path: Path) -> None:
    assert both(model, made) == (4, 4)
    assert "--overwrite" in refused("convert", model, "-o", made, *OPTIONS, code=4)["remedy"]
    assert both(model, made, "--resume") == (0, 0)
    (tmp_path / "file").write_text("")
    assert both(model, tmp_path / "file") == (4, 4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for mode in ((), ("--resume",), ("--overwrite",)):
        assert both(model, tmp_path / "mine", *mode) == (4, 4)
    assert both(model, model / "out") == (4, 4)
    assert both(model, tmp_path / "new") == (0, 0)
    assert both(model, tmp_path / "new", "--overwrite") == (0, 0)
    (tmp_path / "new/notes.txt").write_text("mine")
    assert both(model, tmp_path / "new", "--overwrite") == (4, 4)
    assert both(model, tmp_path / "other", "--tp", 3) == (2, 2)


def test_a_dry_run_sees_a_disk_that_is_too_small(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, out = (model, tmp_path / "out", "--threads", 1), tmp_path / "out"
    assert both(*request) == (0, 0)
    planned = answer("convert", model, "-o", tmp_path / "x", *OPTIONS, "--dry-run")
    (manifest, journal) = (out / "hqconv.json", out / ".hqconv-progress.jsonl")
    rank_file = next((out / "experts").rglob("*.safetensors"))
    needed = planned["num_bytes_out"]
    free = (
        needed - rank_file.stat().st_size
    )  # and a little for the files beside: none in this model
    manifest.unlink()
    journal.write_text('{"x": 1}\n')
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))

    def dry(place: str, *more: object) -> int:
        return int(
            call("convert", model, "-o", tmp_path / place, *OPTIONS, "--dry-run", *more).exit_code
        )

    assert (dry("new"), dry("out", "--resume")) == (
        4,
        0,
    )  # of a resumed one the disk is not checked
    assert call("convert", model, "-o", tmp_path / "new", *OPTIONS).exit_code == 4
    said = answer("convert", model, "-o", tmp_path / "new", *OPTIONS, "--dry-run", code=4)
    assert "The disk cannot hold the artifact." in said["notes"][0]
    assert said["kind"] == "plan"


def test_a_look_at_a_damaged_artifact_ends_with_1(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made, out)
    (out / "README.md").write_text("mine")
    assert answer("inspect", out)["is_damaged"] is False  # a card may be edited
    shard = out / "model.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    words = answer("inspect", out, code=1)
    assert (words["kind"], words["missing_or_resized_files"]) == ("artifact", [shard.name])
    assert "damaged" in call("inspect", out).stdout
    shard.write_bytes(data)
    manifest = out / "hqconv.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"hqconv_version": "', '"hqconv_version": "9'))
    words = answer("inspect", out, code=1)
    assert (words["is_damaged"], words["missing_or_resized_files"]) == (True, [])
    assert "not those that its digest was made of" in words["altered_manifest"]
    assert words["altered_manifest"] in call("inspect", out).stdout
    manifest.write_text(text[:-9])
    assert "damaged" in refused("inspect", out, code=1)["what"]
    manifest.unlink()
    assert refused("inspect", out, code=1)["what"] == "The artifact has lost its manifest."


def test_every_reader_sees_an_altered_manifest(model: Path, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made, out)
    manifest = out / "hqconv.json"
    manifest.write_text(re.sub(r'("relative_error": 0\.)\d', r"\g<1>0", manifest.read_text()))
    page = tmp_path / "page.html"
    for command in (
        ("report", out, "-o", page),
        ("convert", model, "-o", out, *OPTIONS, "--resume"),
        ("warm", out, "--gpu", "h200"),
    ):
        assert "not those that its digest was made of" in refused(*command, code=1)["what"], command
    assert not page.exists()
    for checks in ("files", "weights", "files,weights"):
        words = answer("verify", out, "--checks", checks, "--device", "cpu", code=1)
        found = [
            finding["what"] for check in words["checks"].values() for finding in check["findings"]
        ]
        assert len([what for what in found if "not those that its digest was made of" in what]) == 1


# --- the largest error -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def largest(made: Path) -> dict[str, float]:
    """Projection → the relative error that the artifact records, of its one layer."""
    words = json.loads((made / "hqconv.json").read_bytes())["blocks"]["model.layers.0.mlp.experts"]
    return {name: float(one["relative_error"]) for name, one in words["quantization_error"].items()}


def test_an_artifact_that_lost_too_much_is_kept_and_ends_with_1(
    model: Path, made: Path, largest: dict[str, float], tmp_path: Path
) -> None:
    worst, limit = max(largest, key=largest.__getitem__), sorted(largest.values())[-2]
    request = ("convert", model, "-o", tmp_path / "out", *OPTIONS, "--max-error", limit)
    words = answer(*request, code=1)
    expected = {
        "block": "model.layers.0.mlp.experts",
        "projection": worst,
        "relative_error": largest[worst],
    }
    assert (words["kind"], words["over_max_error"], words["max_error"]) == (
        "summary",
        [expected],
        limit,
    )
    assert words["manifest_sha256"] == sha256_of(
        made / "hqconv.json"
    )  # complete, and the same bytes
    again = call(*request, "--resume")
    assert again.exit_code == 1
    assert "1 projection above --max-error" in again.stderr
    assert "is complete and kept" in again.stderr
    assert "Serve it with" not in again.stdout
    assert call("verify", tmp_path / "out", "--device", "cpu").exit_code == 0
    limit = max(largest.values())
    words = answer("convert", model, "-o", tmp_path / "within", *OPTIONS, "--max-error", limit)
    assert (words["over_max_error"], words["max_error"]) == ([], limit)
    within = call(
        "convert", model, "-o", tmp_path / "within", *OPTIONS, "--max-error", limit, "--resume"
    )
    assert "Serve it with" in within.stdout


def test_verify_holds_an_artifact_to_the_limit(
    model: Path, made: Path, largest: dict[str, float]
) -> None:
    worst, limit = max(largest, key=largest.__getitem__), sorted(largest.values())[-2]
    verify = ("verify", made, "--device", "cpu", "--max-error")
    words = answer(*verify, limit, code=1)
    check = words["checks"]["max_error"]
    assert (check["status"], words["passed"]) == ("fail", False)
    assert [(f["where"], f["what"].split()[1]) for f in check["findings"]] == [
        (f"model.layers.0.mlp.experts, {worst}", "recorded")
    ]
    words = answer(*verify, limit, "--source", model, code=1)
    kinds = [f["what"].split()[1] for f in words["checks"]["max_error"]["findings"]]
    assert kinds == ["recorded", "measured"]
    assert "FAIL  max_error: The recorded relative error" in call(*verify, limit).stdout
    assert answer(*verify, max(largest.values()))["checks"]["max_error"]["status"] == "pass"
    assert "max_error" not in answer(*verify[:-1])["checks"]


def test_errors_that_are_no_numbers_are_over_any_limit() -> None:
    errors_of = {
        "a": {"w1": {"relative_error": None}, "w2": {"relative_error": math.nan}, "w3": {"x": 1}}
    }
    errors_of |= {"b": {"w1": {"relative_error": 0.25}, "w2": {"relative_error": 0.125}}}
    found = [(one["block"], one["projection"]) for one in over_limit(errors_of, 0.125)]
    assert found == [("a", "w1"), ("a", "w2"), ("b", "w1")]


# --- what no server runs -----------------------------------------------------------------------------------

UNSERVED = ("--schema", "fp8-e5m2", "--dtype", "float16", "--target", "sm90", "--device", "cpu")


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
@pytest.mark.parametrize("mode", [(), ("--dry-run",)])
def test_what_no_server_runs_is_refused(
    layout: str, mode: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    request = ("convert", model, "-o", tmp_path / "out", *UNSERVED, "--layout", layout, *mode)
    words = refused(*request, code=2)
    assert words["what"] == "No server runs these weights."
    assert "gives NaN" in words["found"]
    assert "--allow-unserved" in words["remedy"]
    assert not (tmp_path / "out").exists()
    words = answer(*request, "--allow-unserved")
    assert len([warning for warning in words["warnings"] if "gives NaN" in warning]) == 1
    if layout == "checkpoint" or mode:
        return
    out = tmp_path / "out"
    assert json.loads((out / "hqconv.json").read_bytes())["warnings"] == words["warnings"]
    assert answer("verify", out, "--source", model, "--device", "cpu")["passed"]
    again = ("convert", out, "-o", tmp_path / "tp2", "--schema", "source", "--tp", 2)
    assert refused(*again, code=2)["what"] == "No server runs these weights."
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('schema = "int4"\n[[override]]\nlayers = "0"\nschema = "fp8-e5m2"\n')
    mixed = ("convert", model, "-o", tmp_path / "mixed", "--config", recipe, *UNSERVED[2:])
    assert "model.layers.0.mlp.experts" in refused(*mixed, code=2)["where"]
    words = answer(*mixed, "--allow-unserved")
    assert any("'fp8-e5m2' with float16" in warning for warning in words["warnings"])


@pytest.mark.parametrize(
    "more",
    [
        ("--schema", "fp8-e5m2", "--dtype", "bfloat16"),
        ("--schema", "fp8", "--dtype", "float16"),
        (
            "--schema",
            "fp8-e5m2",
            "--dtype",
            "float16",
            "--input-schema",
            "fp8",
        ),  # was not seen to fail
        (
            "--schema",
            "mxfp4",
            "--tp",
            2,
            "--ep",
            2,
        ),  # one named server has no start for it: a warning
    ],
)
def test_what_some_server_may_run_is_not_refused(
    more: tuple[object, ...], model: Path, tmp_path: Path
) -> None:
    request = ("convert", model, "-o", tmp_path / "out", "--target", "sm90", "--dry-run", *more)
    words = answer(*request)
    assert any("vLLM" in warning for warning in words["warnings"]) == ("--ep" in more)
