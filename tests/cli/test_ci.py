"""What docs/ci.md promises to other programs: documents, their keys, exit codes and limits."""

from __future__ import annotations

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
from hqconv.artifact.error_summary import over_limits
from hqconv.cli import output, render
from hqconv.conversion import convert as conversion
from hqconv.io.file_access import sha256_of
from tests.make.command import call
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

OPTIONS = ("--schema=mxfp4", "--target=sm90", "--device=cpu")
PARTS = ("what", "where", "expected", "found", "remedy")
LAYER = "model.layers.0.mlp.experts"


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
    document = answer(*arguments, code=code)
    assert (document["kind"], document["exit_code"]) == ("error", code)
    assert document.keys() == {"json_version", "tool", "kind", "exit_code", *PARTS}
    return document


# --- documents ---------------------------------------------------------------------------------------------


def documented_keys() -> dict[str, set[str]]:
    """kind → the keys that the table of docs/ci.md calls stable."""
    text = (REPO / "docs/ci.md").read_text().partition("## Documents")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", keys)) for kind, keys in rows}


def test_the_table_lists_every_document() -> None:
    modules = (REPO / "hqconv").rglob("*.py")
    found = {kind for path in modules for kind in re.findall(r'"kind": "(\w+)"', path.read_text())}
    assert found == set(render._RENDERERS) | {"error"} == documented_keys().keys()


# Commands of all documents but those that other tests make.
DOCUMENTS = {
    "convert {model} -o {tmp}/a": 0,
    "convert {model} -o {tmp}/b --dry-run": 0,
    "verify {made} --source {model} --device cpu": 0,
    "inspect {model}": 0,
    "inspect {made}": 0,
    "inspect {tmp}/nothing": 2,
    "schemas": 0,
    "schemas --recipes": 0,
    "schemas --for h200": 0,
    "check {model}": 0,
    "report {made} -o {tmp}/page.html": 0,
}
ELSEWHERE = {"push", "publication", "warm", "warm_checkpoint", "part", "unfinished"}
ELSEWHERE |= {"evaluation", "allocation"}


def test_every_document_has_the_keys_of_the_table(model: Path, made: Path, tmp_path: Path) -> None:
    keys, kinds = documented_keys(), set()
    tool = {"hqconv_version": hqconv.__version__}
    tool["humming_kernels_version"] = version("humming-kernels")
    for command, code in DOCUMENTS.items():
        more = OPTIONS if command.startswith("convert") else ()
        document = answer(
            *command.format(model=model, made=made, tmp=tmp_path).split(), *more, code=code
        )
        kinds.add(document["kind"])
        assert keys[document["kind"]] <= document.keys(), command
        assert (document["json_version"], document["tool"]) == (1, tool)
    assert kinds == keys.keys() - ELSEWHERE


def test_the_same_digest_and_warnings_everywhere(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    request = ("convert", model, "-o", out, *OPTIONS, "--tp", 2, "--ep", 2)  # vLLM cannot start it
    commands = (request, (*request, "--resume"), ("verify", out), ("inspect", out))
    found = [answer(*command) for command in commands]
    assert {document["manifest_sha256"] for document in found} == {sha256_of(out / "hqconv.json")}
    (warning,) = found[0]["warnings"]
    assert "vLLM 0.33 will not serve this artifact" in warning
    assert all(document["warnings"] == [warning] for document in found)
    assert [document["was_finished"] for document in found[:2]] == [False, True]
    assert found[0]["source"] == found[3]["source"] == {"name": "small", "revision": None}


# --- errors ------------------------------------------------------------------------------------------------


def test_an_error_is_a_document_with_the_parts_of_the_message(model: Path, tmp_path: Path) -> None:
    request = ("convert", model, "-o", tmp_path / "out", *OPTIONS, "--tp", 3)
    document, said = refused(*request, code=2), call(*request).stderr
    assert all(document[key] and document[key] in said for key in PARTS)


MEMORY = "The system has no more memory or threads."
ENDS: list[tuple[BaseException, int, tuple[str, str, str]]] = [
    (errors.NetworkError("The Hub does not answer."), 5, ("The Hub does not answer.", "", "")),
    (OSError(5, "EIO", "/x"), 4, ("The operating system refused.", "/x", "EIO")),
    (MemoryError(), 2, (MEMORY, "", "MemoryError")),
    (RuntimeError("can't start new thread"), 2, (MEMORY, "", "start new thread")),
    (RuntimeError("Allocator: can't allocate memory"), 2, (MEMORY, "", "Allocator")),
    (ZeroDivisionError("a\nb"), 70, ("This is a bug of hqconv.", "", "ZeroDivisionError: a\nb")),
]


@pytest.mark.parametrize(("error", "code", "parts"), ENDS, ids=[str(code) for _, code, _ in ENDS])
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
    document = refused(*request, code=code)
    assert (document["what"], document["where"]) == parts[:2]
    assert parts[2] in document["found"]
    said = call(*request)
    assert (said.exit_code, said.stdout, "Traceback" in said.stderr) == (code, "", False)
    assert said.stderr.startswith(f"{'internal error' if code == 70 else 'error'}: {parts[0]}")
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
    output.fail(errors.RequestError("No such thing."), json=True)  # the document fails in silence
    assert led == [True, True]


# --- exit codes --------------------------------------------------------------------------------------------


def test_a_dry_run_ends_as_the_conversion_would(model: Path, made: Path, tmp_path: Path) -> None:
    def both(out: Path, *more: object) -> int:
        request = ("convert", model, "-o", out, *OPTIONS, *more)
        dry, code = call(*request, "--dry-run").exit_code, int(call(*request).exit_code)
        assert dry == code
        return code

    assert both(made) == 4
    assert "--overwrite" in refused("convert", model, "-o", made, *OPTIONS, code=4)["remedy"]
    assert both(made, "--resume") == 0
    (tmp_path / "file").write_text("")
    assert both(tmp_path / "file") == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for mode in ((), ("--resume",), ("--overwrite",)):
        assert both(tmp_path / "mine", *mode) == 4
    assert both(model / "out") == 4
    assert both(tmp_path / "new") == both(tmp_path / "new", "--overwrite") == 0
    (tmp_path / "new/notes.txt").write_text("mine")
    assert both(tmp_path / "new", "--overwrite") == 4
    assert both(tmp_path / "other", "--tp", 3) == 2


def test_a_dry_run_sees_a_disk_that_is_too_small(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ("convert", model, "-o", tmp_path / "out", *OPTIONS)
    needed = answer(*request, "--dry-run")["num_bytes_out"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    planned = answer(*request, "--dry-run", code=4)
    assert "The disk cannot hold the artifact." in planned["notes"][0]
    assert call(*request).exit_code == 4


def test_a_look_at_a_damaged_artifact_ends_with_1(made: Path, tmp_path: Path) -> None:
    out = shutil.copytree(made, tmp_path / "out")
    (out / "README.md").write_text("mine")
    assert answer("inspect", out)["is_damaged"] is False  # a card may be edited
    shard = out / "model.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    document = answer("inspect", out, code=1)
    assert document["missing_or_resized_files"] == ["model.safetensors"]
    shard.write_bytes(data)
    manifest = out / "hqconv.json"
    manifest.write_text(manifest.read_text()[:-9])
    assert "damaged" in refused("inspect", out, code=1)["what"]
    manifest.unlink()
    assert refused("inspect", out, code=1)["what"] == "The artifact has lost its manifest."


def test_every_reader_sees_an_altered_manifest(model: Path, made: Path, tmp_path: Path) -> None:
    out, page = shutil.copytree(made, tmp_path / "out"), tmp_path / "page.html"
    manifest, message = out / "hqconv.json", "not those that its digest was made of"
    manifest.write_text(re.sub(r'("relative_error": 0\.)\d', r"\g<1>0", manifest.read_text()))
    convert = ("convert", model, "-o", out, *OPTIONS, "--resume")
    for command in (("report", out, "-o", page), convert, ("warm", out, "--gpu", "h200")):
        assert message in refused(*command, code=1)["what"], command
    assert not page.exists()
    for checks in ("files", "weights"):
        document = answer("verify", out, "--checks", checks, "--device=cpu", code=1)
        found = [finding["what"] for finding in document["checks"][checks]["findings"]]
        assert len([what for what in found if message in what]) == 1


# --- limits ------------------------------------------------------------------------------------------------


def test_an_artifact_that_lost_too_much_is_kept_and_ends_with_1(
    model: Path, made: Path, tmp_path: Path
) -> None:
    request = ("convert", model, "-o", tmp_path / "out", *OPTIONS, "--max-error")
    document = answer(*request, 0.01, code=1)
    worst, *more = document["over_max_error"]
    assert (worst["block"], len(more), document["max_error"]) == (LAYER, 2, 0.01)
    assert document["manifest_sha256"] == sha256_of(made / "hqconv.json")  # complete
    again = call(*request, 0.01, "--resume")
    assert (again.exit_code, "above --max-error" in again.stderr) == (1, True)
    within = answer(*request, worst["relative_error"], "--resume")
    assert within["over_max_error"] == []

    verify = ("verify", made, "--device=cpu", "--source", model)
    limit = more[0]["relative_error"]
    document = answer(*verify, "--max-error", limit, code=1)
    check = document["checks"]["max_error"]
    where = f"{LAYER}, {worst['projection']}"
    kinds = [(finding["where"], finding["what"].split()[1]) for finding in check["findings"]]
    assert kinds == [(where, "recorded"), (where, "measured")]
    passed = answer(*verify, "--max-error", worst["relative_error"])["checks"]["max_error"]
    assert passed["status"] == "pass"
    assert "max_error" not in answer(*verify)["checks"]


def test_a_limit_that_cannot_be_judged_is_not_kept() -> None:
    """Errors and divergences that are no numbers, and no evaluation."""
    figures = {"a": {"w1": None, "w2": math.nan}, "b": {"w1": 0.25, "w2": 0.125}}
    found: dict[str, Any] = {
        layer: {name: {"relative_error": error} for name, error in of.items()}
        for layer, of in figures.items()
    }
    found["a"]["w3"] = {"x": 1}
    over = over_limits(found, None, 0.125, None)
    assert [(worst["block"], worst["projection"]) for worst in over["over_max_error"]] == [
        *(("a", "w1"), ("a", "w2"), ("b", "w1"))
    ]
    assert over["over_max_kl"] is False
    for mean, is_over in ((0.1, True), (0.05, False), (math.nan, True), (None, True)):
        assert over_limits({}, {"kl": {"mean": mean}}, None, 0.05)["over_max_kl"] is is_over
    assert over_limits({}, None, None, 0.05)["over_max_kl"] is True


# --- what no server runs -----------------------------------------------------------------------------------

UNSERVED = ("--schema=fp8-e5m2", "--dtype", "float16", "--target=sm90", "--device=cpu")


@pytest.mark.parametrize("more", ["", "--dry-run", "--layout checkpoint"])
def test_what_no_server_runs_is_refused(more: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    request = ("convert", model, "-o", out, *UNSERVED, *more.split())
    document = refused(*request, code=2)
    assert document["what"] == "No server runs these weights."
    assert "--allow-unserved" in document["remedy"]
    assert not out.exists()
    document = answer(*request, "--allow-unserved")
    assert len([warning for warning in document["warnings"] if "gives NaN" in warning]) == 1
    if more:
        return
    assert answer("verify", out, "--source", model, "--device=cpu")["passed"]
    again = ("convert", out, "-o", tmp_path / "tp2", "--schema=source", "--tp", 2)
    assert refused(*again, code=2)["what"] == "No server runs these weights."
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('schema = "int4"\n[[override]]\nlayers = "0"\nschema = "fp8-e5m2"\n')
    mixed = ("convert", model, "-o", tmp_path / "mixed", "--config", recipe, *UNSERVED[1:])
    assert LAYER in refused(*mixed, code=2)["where"]


@pytest.mark.parametrize(
    "more",
    [
        "--schema fp8-e5m2 --dtype bfloat16",
        "--schema fp8 --dtype float16",
        "--schema fp8-e5m2 --dtype float16 --input-schema fp8",  # was not seen to fail
        "--schema mxfp4 --tp 2 --ep 2",  # one named server has no start for it: a warning
    ],
)
def test_what_some_server_may_run_is_not_refused(more: str, model: Path, tmp_path: Path) -> None:
    request = ("convert", model, "-o", tmp_path / "out", "--target=sm90", "--dry-run")
    warnings = answer(*request, *more.split())["warnings"]
    assert any("vLLM" in warning for warning in warnings) == ("--ep" in more)
