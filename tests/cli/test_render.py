"""What is shown: JSON that every parser reads, and text that cannot change a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hqconv.cli.output import print_json
from hqconv.cli.render import ShownProgress
from hqconv.conversion.stages import Progress
from tests.make.command import call
from tests.make.conversions import run
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"


def strictly(text: str) -> Any:
    """JSON by the letter: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_no_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(
        {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": ({"d": math.nan},), "e": "NaN"}
    )
    expected = {"a": None, "b": [None, None, 1.5], "c": [{"d": None}], "e": "NaN"}
    words = strictly(capsys.readouterr().out)
    assert {key: words[key] for key in expected} == expected


@pytest.mark.parametrize("schema", ["int4", "fp8-block", "nvfp4"])
def test_scales_that_are_no_numbers_are_shown_as_findings(schema: str, tmp_path: Path) -> None:
    """In text, in JSON and on the page; the projection without a figure is the first of the table."""
    model = write_qwen3_moe(tmp_path / "model", num_layers=1)
    run(model, tmp_path / "out", schema)
    path = next((tmp_path / "out/experts").rglob("*.safetensors"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    kernel = load_file(path)
    name = f"{LAYER}.w2_weight_scale"
    kernel[name] = kernel[name].float().fill_(math.nan).to(kernel[name].dtype)
    save_file(kernel, path, metadata)
    page = tmp_path / "page.html"
    words = ("verify", tmp_path / "out", "--source", model, "--device", "cpu")
    done = call(*words, "--report", page)
    assert done.exit_code == 1, done.output
    assert re.search(r"down \(w2\)\s.*\s–\s.*\n.*(gate|up) \(w", done.stdout), done.stdout
    assert strictly(call(*words, "--json").stdout)["passed"] is False
    _, _, table = page.read_text().partition("Decoded weights against the source")
    assert "down (w2)" in table.splitlines()[2]  # after the headers


def hostile(model: Path) -> Path:
    """A checkpoint with terminal commands in a tensor's name, a file's and the config."""
    tensors = load_file(model / "model.safetensors")
    for name in ("evil\x1b[2J.weight", "[red]\u202e\x9b1m.weight", "n" * 5000):
        tensors[name] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model / "x\x1b]0;pwned\x07.txt").write_text("")
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_act": "silu\x1b[31m", "model_type": "qwen3_moe\x1b]8;;\u2067\n" + "y" * 500}
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]})
    )
    return model


def test_names_with_escapes_reach_no_terminal(tmp_path: Path) -> None:
    model = hostile(write_qwen3_moe(tmp_path / "mod\x1b[5mel", num_layers=1))
    convert = ("convert", model, "--schema", "int4", "--target", "sm90")
    for arguments in (
        ("inspect", model),
        (*convert, "--dry-run"),
        (*convert, "-o", tmp_path / "o"),
        (*convert, "-o", model / "in\x1b[0m"),
        ("verify", tmp_path / "o", "--source", model, "--device", "cpu"),
        ("verify", model),
    ):
        done = call(*arguments)
        assert "\x1b" not in done.stdout + done.stderr, (arguments, done.stdout, done.stderr)
        shown = done.stdout + done.stderr
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown), (
            arguments
        )
        assert "n" * 200 not in shown
        assert "y" * 200 not in shown


def test_the_bar_takes_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with ShownProgress(quiet=False) as progress:
        progress.update(Progress("[red]a[/red] \x1b]0;x\x07 :smile: [/]", 1, 2, 0, 1, 2))
    shown = terminal.getvalue()
    assert "[red]a[/red] \\x1b]0;x\\x07 :smile: [/]" in shown
    assert "\x1b]" not in shown


def test_80_columns_lose_no_word(tmp_path: Path) -> None:
    """On a narrow terminal long names are folded, not cut."""
    model = write_qwen3_moe(
        tmp_path / "a-model-with-quite-a-long-name-as-they-are-on-the-hub", num_layers=2
    )
    command = [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"]
    command += [sys.executable, "-m", "hqconv", "inspect", str(model)]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    done = subprocess.run(
        command,
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in done.stdout
    assert model.name in "".join(line.strip() for line in lines)
