"""Every exit code of the documents' table, and that what becomes of stdout changes none that was reached."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hqconv import errors
from hqconv.conversion import convert as conversion
from tests.make.command import call
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.stopping import environment

SIGNALS = (130, 143, 129)  # tests/cli/test_interrupt.py
OPTIONS = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu")


# --- one way to each code ----------------------------------------------------------------------------------

Place = tuple[Path, Path, Path, pytest.MonkeyPatch]  # model, artifact, an empty folder


def converted(model: Path, out: Path, *more: object) -> int:
    return int(call("convert", model, "-o", out, *OPTIONS, *more).exit_code)


def done(place: Place) -> int:
    return converted(place[0], place[2] / "out")


def not_verified(place: Place) -> int:
    out = shutil.copytree(place[1], place[2] / "out")
    with next(out.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    return int(call("verify", out, "--device", "cpu").exit_code)


def cut_off(place: Place) -> int:
    source = write_qwen3_moe(place[2] / "model")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-1])
    return converted(source, place[2] / "out")


def no_network(place: Place) -> int:
    def fail(*_: object, **__: object) -> None:
        raise errors.NetworkError("The Hub does not answer.")

    place[3].setattr("hqconv.io.hub._model_info", fail)
    return int(call("convert", "org/model", "-o", place[2] / "out", *OPTIONS).exit_code)


def our_bug(place: Place) -> int:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError

    place[3].setattr(conversion, "convert", fail)
    return done(place)


WAYS: dict[int, Callable[[Place], int]] = {
    0: done,
    1: not_verified,
    2: lambda place: converted(place[0], place[2] / "out", "--tp", 3),
    3: cut_off,
    4: lambda place: converted(place[0], place[1]),
    5: no_network,
    70: our_bug,
}


@pytest.mark.parametrize("code", WAYS)
def test_exit_codes(
    code: int, model: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WAYS[code]((model, made, tmp_path, monkeypatch)) == code


def test_the_table_of_the_documents_is_this_one() -> None:
    text = (REPO / "docs/usage.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    codes = [int(code) for code in re.findall(r"^\| (\d+) ", text, re.MULTILINE)]
    assert codes == [*WAYS, *SIGNALS]


# --- what becomes of stdout --------------------------------------------------------------------------------

# A name that no ASCII terminal knows is in the summary: that of the output.
STREAMS = {
    "ascii": ("", {"PYTHONIOENCODING": "ascii:strict"}),
    "the C locale": ("", {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    "closed": (">&-", {}),
    "all closed": ("<&- >&- 2>&-", {}),
    "full": (">/dev/full", {}),
    "nobody reads": ("2>&1 | true", {}),
    "nobody reads JSON": ("--json | true", {}),
}


# The command with a conversion that is done at once: what follows it is real.
DONE = """
import json, sys, types
from hqconv import api
document = json.loads(sys.argv.pop(1))
document["out"] = sys.argv[4]
report = types.SimpleNamespace(
    to_dict=lambda: document, warnings=["The gr\\u00f6\\u00dfe of it."], is_complete=True, errors={}, evaluation=None
)
api.convert = lambda *_, **__: report
from hqconv.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def summary(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("summary") / "out"
    return str(call("convert", model, "-o", out, *OPTIONS, "--json").stdout)


def in_shell(*words: str, more: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Python with these arguments, its streams led elsewhere by `more`; the exit code is that of Python."""
    shell = f"{shlex.join([sys.executable, *words])} {more}\nexit ${{PIPESTATUS[0]}}"
    environ = environment(**variables)
    return subprocess.run(
        ["bash", "-c", shell], env=environ, capture_output=True, check=False, cwd=REPO
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", STREAMS)
def test_a_finished_conversion_is_0_whatever_becomes_of_stdout(stream: str, summary: str) -> None:
    more, variables = STREAMS[stream]
    command = ("-c", DONE, summary, "convert", ".", "-o", "größe-日本", *OPTIONS)
    done = in_shell(*command, more=more, **variables)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    if more == "":
        assert b"quantized (2 layers)" in done.stdout
    if stream == "full":
        assert b"warning: The report could not be written to stdout: " in done.stderr


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "EIO")], ids=str)
def test_verdicts_stay_as_well(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only shows has failed if it cannot."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("hqconv.cli.render.show", fail)
    for passed in (True, False):
        monkeypatch.setattr("hqconv.api.check", lambda *_, passed=passed, **__: {"passed": passed})
        assert call("check", "out").exit_code == (0 if passed else 1)
    assert call("schemas").exit_code == (0 if isinstance(error, BrokenPipeError) else 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "more", "code"),
    [
        ("inspect {model}", ">/dev/full", 4),
        ("verify --help", ">/dev/full", 4),
        ("inspect {model}", ">&-", 0),
        ("inspect {model}", "| true", 0),  # a reader that goes away has seen enough
        ("schemas --json", "| head -1", 0),
        ("inspect {damaged}", "| true", 1),
        ("convert --nonsense", "2>&1 | true", 2),
        ("convert --nonsense", "2>&-", 2),
        ("convert --nonsense", "2>/dev/full", 2),
    ],
)
def test_what_only_prints(
    arguments: str, more: str, code: int, model: Path, made: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(made, tmp_path / "out")
    (damaged / "tokenizer.json").unlink()
    command = arguments.format(model=model, damaged=damaged).split()
    done = in_shell("-m", "hqconv", *command, more=more)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr
    assert bool(done.stderr) == (code == 4)


# --- what the system refuses -------------------------------------------------------------------------------


def test_a_source_that_cannot_be_looked_at_is_the_sources_fault(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(model):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    result = call("convert", model, "-o", tmp_path / "out", *OPTIONS)
    assert (result.exit_code, "cannot be read" in result.stderr) == (3, True), result.stderr
