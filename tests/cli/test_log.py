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
    messages = [record.getMessage() for record in caplog.records]
    assert f"Reading {model / 'model.safetensors'}." in messages
    text = "\n".join(messages)
    for path in (tmp_path / "out").rglob("*.*"):
        assert f"Wrote {path}" in text
    assert f"Unit {LAYER} is done: 1 file in " in text
    assert re.search(r"<CheckResult files: pass, 0 findings> in \d", text)


def test_the_terminal_shows_the_work_and_the_file_has_every_step(
    model: Path, tmp_path: Path
) -> None:
    log, out, level = tmp_path / "log", tmp_path / "out", logging.getLogger("hqconv").level
    convert = ("convert", model, "-o", out, *OPTIONS, "--log-file", log)
    lines = call(*convert, "-v").stderr.splitlines()
    assert any(re.match(rf"\d\d:\d\d:\d\d Unit {LAYER} is done", line) for line in lines)
    assert not any("Wrote" in line for line in lines)  # in the file only
    first = log.read_text()
    assert f"Wrote {out / 'hqconv.json'}" in first
    assert "hqconv " + hqconv.__version__ in first.splitlines()[0]
    failed = call(*convert)
    assert (failed.exit_code, "is done" in failed.stderr) == (4, False)
    text = log.read_text()
    assert text.startswith(first)  # appended
    assert all(LINE.fullmatch(line) for line in text.splitlines())
    assert " ERROR " in text.splitlines()[-1]  # an error has many lines on stderr, and one here
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


def test_a_full_disk_is_no_reason_to_stop(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = lambda _: open("/dev/full", "w")  # noqa: SIM115, PTH123, E731
    monkeypatch.setattr(logging.FileHandler, "_open", full)
    done = call("inspect", model, "--log-file", tmp_path / "log")
    assert (done.exit_code, done.stderr) == (0, "")


def test_other_ranks_have_their_own_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    call("inspect", model, "--log-file", tmp_path / "log")
    assert [path.name for path in tmp_path.iterdir()] == ["log.rank1"]
