"""The README: its commands are there, and its example is what comes out."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from hqconv.cli.app import app
from hqconv.schemas.gpu_target import GPU_CLASSES
from tests.make import processes
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tokenizer import write_tokenizer

TEXT = (REPO / "README.md").read_text(encoding="utf-8")
# Of any page: lines of its layers that are a command of ours, with what follows it left out.
COMMAND = re.compile(r"^    (?:\$ )?(hqconv [^#\n]+)", re.MULTILINE)
MEASURED = REPO / "docs/measured"  # by scripts/record.py
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md")))]


def options_of(name: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {flag for one in group.commands[name].params for flag in one.opts} | {"--help"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_as_they_are_shown(page: str) -> None:
    for command in COMMAND.findall((REPO / page).read_text(encoding="utf-8")):
        words = shlex.split(command.replace("…", "").replace("|", " "))
        flags = {
            word.partition("=")[0].strip("[]") for word in words if word.strip("[").startswith("-")
        }
        unknown = flags - (
            options_of(words[1]) if not words[1].startswith("-") else {"--install-completion"}
        )
        assert not unknown, command


TARGETS = re.findall(
    r"^\| ([^|]+) \| `(hqconv convert SRC [^`]+)` \| (\S+) \|$", TEXT, re.MULTILINE
)


@pytest.mark.parametrize(("gpus", "command", "fp8"), TARGETS)
def test_every_gpu_of_the_table_has_a_command_that_works(
    gpus: str, command: str, fp8: str, tmp_path: Path
) -> None:
    model = write_qwen3_moe(
        tmp_path / "model", num_layers=1, hidden_size=256, intermediate_size=256
    )
    write_tokenizer(model)
    (tmp_path / "text.txt").write_text("1 2 3 4")
    places = {"SRC": model, "OUT": tmp_path / "out", "TEXT": tmp_path / "text.txt"}
    words = [str(places.get(word, word)) for word in shlex.split(command)[1:]]
    done = CliRunner().invoke(app, [*words, "--dry-run", "--device", "cpu"])
    assert done.exit_code == 0, (gpus, done.output)
    assert "warning" not in done.stderr
    if fp8 != "–":
        words[words.index("--schema") + 1] = fp8.strip("`")
        done = CliRunner().invoke(
            app, [*words, "--input-schema", "fp8", "--dry-run", "--device", "cpu"]
        )
        assert done.exit_code == 0, (gpus, done.output)


def test_the_table_has_a_row_for_each_class_of_gpus() -> None:
    assert [
        (row.gpus, row.command(row.target), f"`{row.fp8_schema}`" if row.fp8_schema else "–")
        for row in GPU_CLASSES
    ] == TARGETS


def test_the_figures_of_the_real_model_are_the_measured_ones() -> None:
    """In README and docs/quality.md; its times, too."""
    divergence = json.loads((MEASURED / "divergence.json").read_bytes())["schemas"]
    (run,) = json.loads((MEASURED / "speeds.json").read_bytes())["runs"]
    times = {
        (row["schema"], row["input_schema"], row["num_tokens"]): row["microseconds"]
        for row in run["rows"]
    }
    rows = re.findall(r"^\| `(\S+)` \| [\d.]+ \| (\S+) → \*\*(\S+)\*\* \|", TEXT, re.MULTILINE)
    assert len(rows) > 3
    for name, *shown in rows:
        measured = [divergence[name][how]["kl"] for how in ("rtn", "calibrated")]
        assert shown == [f"{kl:.3f}" for kl in measured], name
    quality = (REPO / "docs/quality.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\S+)` \| [\d.]+ " + r"\| (\S+) " * 8 + r"\|$", quality, re.MULTILINE)
    assert {row[0] for row in table} >= divergence.keys()
    for name, *cells in table:
        for text, how in zip(cells[:2], ("rtn", "calibrated"), strict=True):
            kl = divergence.get(name, {}).get(how, {}).get("kl")
            assert (text == "–") if kl is None else abs(float(text) - kl) <= 0.005 * kl, name
        keys = [(name, inputs, count) for inputs in ("a16", "fp8") for count in (64, 8192)]
        expected = ["–" if times.get(key) is None else f"{times[key]:.0f}" for key in keys]
        assert cells[4:] == expected, name


def test_the_table_and_the_set_up_are_there() -> None:
    assert len(TARGETS) >= 8
    assert {command.split("--target ")[1].split()[0] for _, command, _ in TARGETS} >= {
        "a100",
        "l40s",
        "h100",
        "b200",
    }
    assert re.search(r"^    make demo .*\n    make test ", TEXT, re.MULTILINE)


def test_the_readme_shows_some() -> None:
    assert len(COMMAND.findall(TEXT)) > 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="the example is of a machine without a GPU")
def test_the_example_is_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but times, which are another machine's."""
    layers = re.findall(r"^    \$ (.+)\n((?:    [^$\n].*\n|\n(?=    [^$]))*)", TEXT, re.MULTILINE)
    made, converted, verified = (shlex.split(command) for command, _ in layers)
    made[1] = str(REPO / made[1])
    monkeypatch.chdir(tmp_path)
    processes.run([sys.executable, *made[1:]], check=True, capture_output=True)
    for command, (_, shown) in ((converted, layers[1]), (verified, layers[2])):
        done = CliRunner().invoke(app, command[1:])
        assert done.exit_code == 0, done.output
        told = [plain(line) for line in done.stdout.splitlines()]
        expected = [plain(line) for line in shown.splitlines() if line.strip() not in ("", "…")]
        assert [line for line in expected if line not in told] == []
        assert len(expected) > 5


def plain(line: str) -> str:
    """A line without its spaces and times."""
    line = re.sub(r"[\d.]+ s\b(, [\d.]+ \w?B/s)?(, \d+ workers?)?", "", line)
    return " ".join(line.split())
