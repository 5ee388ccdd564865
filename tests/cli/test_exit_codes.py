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
from tests.make import processes
from tests.make.command import call
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.stopping import environment

SIGNALS = {130: "INT", 143: "TERM", 129: "HUP"}
OPTIONS = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu")


# --- one way to each code ----------------------------------------------------------------------------------

Place = tuple[Path, Path, Path, pytest.MonkeyPatch]  # model, artifact, an empty folder


def converted(model: Path, out: Path, *more: object) -> int:
    return int(call("convert", model, "-o", out, *OPTIONS, *more).exit_code)


def done(place: Place) -> int:
    return converted(place[0], place[2] / "out")


def not_verified(place: Place) -> int:
    out = place[2] / "out"
    assert done(place) == 0
    with next(out.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    result = call("verify", out, "--device", "cpu")
    assert "FAIL" in result.stdout
    return int(result.exit_code)


def cut_off(place: Place) -> int:
    source = place[2] / "model"
    write_qwen3_moe(source)
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


def signalled(number: int) -> Callable[[Place], int]:
    def stop(_: Place) -> int:
        code = "import os, signal, time\nfrom hqconv.cli import interrupt\nfor n in (1, 2, 15):\n"
        code += "    signal.signal(n, signal.SIG_DFL)\ninterrupt.listen()\n"
        code += f"os.kill(os.getpid(), signal.SIG{SIGNALS[number]})\ntime.sleep(60)"
        return processes.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, check=False
        ).returncode

    return stop


WAYS: dict[int, Callable[[Place], int]] = {
    0: done,
    1: not_verified,
    2: lambda place: converted(place[0], place[2] / "out", "--tp", 3),
    3: cut_off,
    4: lambda place: converted(place[0], place[1]),
    5: no_network,
    70: our_bug,
    **{number: signalled(number) for number in SIGNALS},
}


@pytest.mark.parametrize("code", WAYS)
def test_exit_codes(
    code: int, model: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WAYS[code]((model, made, tmp_path, monkeypatch)) == code


def test_the_table_of_the_documents_is_this_one() -> None:
    text = (REPO / "docs/usage.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) ", text, re.MULTILINE)] == [*WAYS]
    kinds = (
        errors.VerificationError,
        errors.RequestError,
        errors.InputError,
        errors.OutputError,
        errors.NetworkError,
    )
    assert [kind.exit_code for kind in kinds] == [1, 2, 3, 4, 5]


# --- what becomes of stdout --------------------------------------------------------------------------------

# A name that no ASCII terminal knows is in the summary: that of the output.
STREAMS = {
    "ascii": ("", {"PYTHONIOENCODING": "ascii"}),
    "ascii, strictly": ("", {"PYTHONIOENCODING": "ascii:strict"}),
    "the C locale": ("", {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    "closed": (">&-", {}),
    "stderr closed": ("2>&-", {}),
    "all closed": ("<&- >&- 2>&-", {}),
    "full": (">/dev/full", {}),
    "nobody reads": ("| true", {}),
    "nobody reads JSON": ("--json | true", {}),
    "nobody reads either": ("2>&1 | true", {}),
}


# The command with a conversion that is done at once: what follows it is real.
DONE = """
import json, sys, types
from hqconv import api
from hqconv.cli import app
words = json.loads(sys.argv.pop(1))
words["out"] = sys.argv[4]
report = types.SimpleNamespace(
    to_dict=lambda: words, warnings=["The gr\\u00f6\\u00dfe of it."], profile={}, is_complete=True, over_max_kl=False
)
api.convert = lambda **_: report
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stream", STREAMS)
def test_a_finished_conversion_is_0_whatever_becomes_of_stdout(stream: str, summary: str) -> None:
    more, variables = STREAMS[stream]
    done = in_shell(
        "-c", DONE, summary, "convert", ".", "-o", "größe-日本", *OPTIONS, more=more, **variables
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    if more == "":
        assert stream == "the C locale" or b"\\u2192" in done.stdout
        assert b"model.layers.1" in done.stdout or b"quantized (2 layers)" in done.stdout
    if stream == "full":
        assert b"warning: The report could not be written to stdout: " in done.stderr


@pytest.mark.parametrize("more", ["", "2>&1 | true", "2>&-", "2>/dev/full"])
def test_a_wrong_command_line_is_2_whoever_reads(more: str) -> None:
    done = in_shell("-m", "hqconv", "convert", "--nonsense", more=more)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)


FAILURES = (
    BrokenPipeError(32, "Broken pipe"),
    OSError(28, "No space left on device"),
    OSError(5, "EIO"),
)


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_verdicts_stay_as_well(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `verify`, `check` and `warm`; what only shows has failed if it cannot."""

    def fail(*_: object, **__: object) -> None:
        raise error

    class Report:
        passed = False

        def to_dict(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("hqconv.cli.render.show", fail)
    monkeypatch.setattr("hqconv.api.verify", lambda *_, **__: Report())
    monkeypatch.setattr("hqconv.api.warm", lambda **_: {})
    monkeypatch.setattr("hqconv.api.check", lambda **_: {"passed": Report.passed})
    assert call("verify", "out").exit_code == 1
    assert call("check", "out").exit_code == 1
    assert call("warm", "out").exit_code == 0
    Report.passed = True
    assert call("verify", "out").exit_code == 0
    assert call("check", "out").exit_code == 0
    assert call("schemas").exit_code == (0 if isinstance(error, BrokenPipeError) else 4)


# stdout, and the exit code of a command that only prints. A reader that goes away has seen enough: `| head -1`.
PRINTED = {">&-": 4, ">/dev/full": 4, "| true": 0, "| head -1": 0}


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        *(("inspect {model}", more) for more in PRINTED),
        *(
            ("schemas --json", "| head -1"),
            ("verify --help", ">/dev/full"),
            ("--version", ">&-"),
            ("", ">/dev/full"),
        ),
    ],
)
def test_what_only_prints(arguments: str, more: str, model: Path) -> None:
    done = in_shell("-m", "hqconv", *arguments.format(model=model).split(), more=more)
    assert (done.returncode, b"Traceback" in done.stderr) == (PRINTED[more], False), done.stderr
    assert bool(done.stderr) == bool(PRINTED[more])


def test_a_verdict_stays_where_nobody_reads_on(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert in_shell("-m", "hqconv", "inspect", str(tmp_path / "out"), more="| true").returncode == 1


# --- what the system refuses -------------------------------------------------------------------------------


def test_a_source_that_cannot_be_looked_at_is_the_sources_fault(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, **words: Any) -> os.stat_result:
        if os.fspath(path) == str(model):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, **words)

    monkeypatch.setattr(os, "stat", stat)
    result = call("convert", model, "-o", tmp_path / "out", *OPTIONS)
    assert result.exit_code == 3, result.stderr
    assert "cannot be read" in result.stderr
