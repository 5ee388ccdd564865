"""What docs/ci.md promises to other programs: documents, their keys, and exit codes."""

from __future__ import annotations

import io
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hqconv
from hqconv import errors
from hqconv.checkpoint.digest import sha256_of
from hqconv.cli import documents
from hqconv.cli.app import app
from hqconv.pipeline import run as conversion
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

OPTIONS = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu")
ERROR_KEYS = {"json_version", "tool", "kind", "exit_code", "what", "where", "expected", "found", "remedy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", num_layers=1)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    assert call("convert", model, "-o", out, *OPTIONS).exit_code == 0
    return out


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


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
    keys = documented_keys()
    assert {words["kind"] for words in found} == keys.keys() - {"push", "warm", "unfinished"}
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


# --- errors ------------------------------------------------------------------------------------------------


def test_an_error_is_a_document_with_the_parts_of_the_message(model: Path, tmp_path: Path) -> None:
    request = ("convert", model, "-o", tmp_path / "out", *OPTIONS, "--tp", 3)
    words = refused(*request, code=2)
    said = call(*request).stderr
    for key in ("what", "where", "expected", "found", "remedy"):
        assert words[key] in said
    assert words["where"]
    assert words["remedy"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("convert", "--nonsense"), "No such option"),
        (("convert",), "Missing argument"),
        (("convert", ".", "--tp", "two"), "--tp"),
        (("convrt",), "No such command 'convrt'"),
        (("--nonsense",), "No such option"),
    ],
)
def test_a_wrong_command_line_is_a_document(arguments: tuple[str, ...], what: str) -> None:
    assert what in refused(*arguments, code=2)["found"]
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")  # without --json there is none
    assert what in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "parts"),
    [
        (errors.NetworkError("The Hub does not answer."), 5, ("The Hub does not answer.", "", "")),
        (
            OSError(5, "Input/output error", "/x"),
            4,
            ("The operating system refused.", "/x", "Input/output error"),
        ),
        (MemoryError(), 2, ("The system gives no more memory, or no more threads.", "", "MemoryError")),
        (ZeroDivisionError("a\nb"), 70, ("This is a bug of hqconv.", "", "ZeroDivisionError: a\nb")),
        (KeyboardInterrupt(), 130, ("Interrupted. Nothing was written.", "", "")),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_other_ends_are_documents_as_well(
    error: BaseException,
    code: int,
    parts: tuple[str, str, str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(conversion, "convert", fail)
    words = refused("convert", model, "-o", tmp_path / "out", *OPTIONS, code=code)
    assert (words["what"], words["where"], words["found"]) == parts


def test_of_several_processes_the_first_speaks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqconv.cli.messages.is_first", lambda: False)
    done = call("convert", model, "-o", "out", *OPTIONS, "--tp", 3, "--json")
    assert (done.exit_code, done.stdout) == (2, "")


def test_no_document_follows_half_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full under stdout may have room a moment later."""
    led: list[bool] = []
    monkeypatch.setattr("hqconv.cli.documents.lead_nowhere", lambda: led.append(True))

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        documents.print_json({})
    documents.print_error(errors.RequestError("No such thing."), 2)  # fails in silence
    assert led == [True, True]
