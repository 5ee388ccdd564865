"""The log: of the library, and of the commands with -v and --log-file."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hqconv
from tests.make.command import call
from tests.make.conversions import run
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
OPTIONS = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu")
LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) hqconv[\w.]*: \S.*"
)


def test_a_library_configures_no_logging() -> None:
    """A program that says nothing sees nothing, not even the last resort of logging."""
    code = "import hqconv, logging\nlogging.getLogger('hqconv.io.hub').warning('told')\n"
    code += "log = logging.getLogger('hqconv')\n"
    code += "print(log.level, [type(h).__name__ for h in log.handlers], logging.root.handlers)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    assert (done.stdout, done.stderr) == ("0 ['NullHandler'] []\n", "")


def test_a_program_gets_the_records(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="hqconv")
    run(model, tmp_path / "out", "mxfp4")
    hqconv.verify(tmp_path / "out", model, checks=["files"])
    told = [record.getMessage() for record in caplog.records]
    text = "\n".join(told)
    assert f"Opened the source {model}" in text
    assert "Device cpu, 2 threads" in text
    assert f"Unit {LAYER} is done: 1 file in " in text
    assert f"Reading {model / 'model.safetensors'}." in told
    for path in (tmp_path / "out").rglob("*.*"):
        assert any(message.startswith(f"Wrote {path}") for message in told), path
    assert re.search(r"<CheckResult files: pass, 0 findings> in \d", text)


def test_the_terminal_shows_the_work_of_a_verbose_command(model: Path, tmp_path: Path) -> None:
    done = call("convert", model, "-o", tmp_path / "out", *OPTIONS, "-v")
    assert done.exit_code == 0
    told = [line for line in done.stderr.splitlines() if re.match(r"\d\d:\d\d:\d\d \S", line)]
    assert any(f"Unit {LAYER} is done" in line for line in told)
    assert not any("Wrote" in line for line in told)  # in the file only
    silent = call("convert", model, "-o", tmp_path / "out", *OPTIONS, "--overwrite")
    assert "is done" not in silent.stderr


def test_the_file_has_every_step_on_a_line(model: Path, tmp_path: Path) -> None:
    log, out, level = tmp_path / "log", tmp_path / "out", logging.getLogger("hqconv").level
    assert call("convert", model, "-o", out, *OPTIONS, "-q", "--log-file", log).stderr == ""
    first = log.read_text()
    assert all(LINE.fullmatch(line) for line in first.splitlines())
    assert f"Wrote {out / 'hqconv.json'}" in first
    assert "hqconv " + hqconv.__version__ in first.splitlines()[0]
    (out / "tokenizer.json").unlink()
    assert call("inspect", out, "--log-file", log).exit_code == 1
    assert call("convert", model, "-o", out, *OPTIONS, "--log-file", log).exit_code == 4
    text = log.read_text()
    assert text.startswith(first)  # appended
    last = text.splitlines()[-1]
    assert LINE.fullmatch(last)
    assert " ERROR " in last  # an error has many lines on stderr, and one here
    assert logging.getLogger("hqconv").level == level
    assert [type(h) for h in logging.getLogger("hqconv").handlers] == [logging.NullHandler]


def test_names_of_a_checkpoint_stay_on_their_line(tmp_path: Path) -> None:
    model = write_qwen3_moe(tmp_path / "a\nb\x1b[31m", num_layers=1)
    call("convert", model, "-o", tmp_path / "out", *OPTIONS, "-q", "--log-file", tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert all(LINE.fullmatch(line) for line in text.splitlines())
    assert "a\\nb\\x1b[31m" in text


def test_a_token_is_not_logged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    done = call("inspect", "org/name", "-v", "--log-file", tmp_path / "log")
    assert done.exit_code == 5
    assert "secret" not in done.stderr + (tmp_path / "log").read_text()


def test_a_file_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    done = call("inspect", model, "--log-file", tmp_path / "no" / "log")
    assert done.exit_code == 4
    assert done.stderr.startswith(
        "error: The file of --log-file cannot be written there.\n  where: "
    )
    both = call("inspect", model, "-v", "-q")
    assert (both.exit_code, "exclude each other" in both.stderr) == (2, True)
    with pytest.MonkeyPatch.context() as patch:  # a full disk
        patch.setattr(logging.FileHandler, "_open", lambda _: open("/dev/full", "w"))  # noqa: SIM115, PTH123
        full = call("inspect", model, "--log-file", tmp_path / "log")
    assert (full.exit_code, full.stderr) == (0, "")


@pytest.mark.parametrize(
    "command", [("inspect",), ("convert", "--schema", "mxfp4", "--target", "sm90")]
)
def test_other_ranks_have_their_own_file(
    command: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    more = ("--dry-run",) if command[0] == "convert" else ()
    call(command[0], model, *command[1:], *more, "--log-file", tmp_path / "log")
    assert [path.name for path in tmp_path.iterdir()] == ["log.rank1"]
