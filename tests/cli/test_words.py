"""What people type that is almost right, what they are shown while they wait, and the help."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.conversion.stages import Progress
from hqconv.errors import HqconvError, RequestError
from hqconv.sources.opening import open_source, own_target, parse_source_name
from tests.make import processes
from tests.make.command import call
from tests.make.conversions import manifest, run
from tests.make.qwen import write_qwen3_moe
from tests.make.stopping import environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("words") / "model", num_layers=1)


# --- names and files ---------------------------------------------------------------------------------------


WRONG = {  # a command line: the command that is named, and a part of the message
    "convert": ("hqconv convert", "Missing argument 'SRC'"),
    "convrt x": ("hqconv", "No such command 'convrt'. Did you mean 'convert'?"),
    "convert x --schmea y": (
        "hqconv convert",
        "(Possible options: --input-schema, --resume, --schema)",
    ),
    "convert x --tp": ("hqconv convert", "requires an argument"),
    "convert x --tp 0": ("hqconv convert", "greater than or equal to 1"),
    "convert x --layout up": ("hqconv convert", "'up' is not one of 'kernel', 'checkpoint'"),
    "convert x --tp two": ("hqconv convert", "--tp"),
    "evaluate x": ("hqconv evaluate", "Missing option: --text."),
    "inspect x y": ("hqconv inspect", "unexpected extra argument"),
    "convert x y": ("hqconv convert", "The output is an option: -o y."),
    "--nonsense": ("hqconv", "No such option: --nonsense"),
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_command_line_is_a_message_like_others(typed: str) -> None:
    where, text = WRONG[typed]
    done = call(*typed.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: The command line is wrong.\n  where: {where}\n  found: ")
    assert "what to do: " in done.stderr
    assert not {"Usage:", "Value error"} & {*done.stderr.split()}
    command, *rest = typed.split()
    as_json = call(command, "--json", *rest)
    document = json.loads(as_json.stdout)
    assert (as_json.exit_code, document["exit_code"], document["where"]) == (2, 2, where)
    assert text in document["found"] + document["remedy"]


def test_files_that_are_almost_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "nightly.toml").write_text('schema = "mxfp4"\n')
    for command, meant in {
        f"convert {model} --config ends-in-8bits": "Did you mean ends-in-8-bits?",
        f"convert {model} --config recipes/nigthly.toml": "Did you mean recipes/nightly.toml?",
        f"convert {model} --config zzz": "what to do: `hqconv schemas --recipes` lists",
        f"convert {model} --schema w3-g46.toml": "Did you mean w3-g64.toml?",
        f"inspect {model}l": f"Did you mean {model}?",
        f"verify {model}l": f"Did you mean {model}?",
    }.items():
        done = call(*command.split())
        assert (done.exit_code, meant in done.stderr) == (2, True), command


def test_names_of_repos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revision and GGUF model that are named with a repo."""
    names: dict[str, tuple[str | None, str | None]] = {
        "org/name": (None, None),
        "org/name@v1": ("v1", None),
        "org/name@refs/pr/7": ("refs/pr/7", None),
        "org/name:Q4_K_M": (None, "Q4_K_M"),
        "org/name:Q4_K_M@v1": ("v1", "Q4_K_M"),
        "org/name/sub/x.gguf@v1": ("v1", "sub/x.gguf"),
    }
    for typed, parts in names.items():
        assert parse_source_name(typed) == ("org/name", *parts)
    for typed in ("/no/such", "", "./org/name", "org/name/x.bin", "org/name:a:b"):
        assert parse_source_name(typed) == (typed, None, None)
    with pytest.raises(RequestError, match="Two revisions"):
        parse_source_name("org/name@a", "b")
    (tmp_path / "org" / "name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_source_name("org/name@v1") == ("org/name@v1", None, None)


def test_what_is_no_model_gets_its_own_words(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    pointer = write_qwen3_moe(tmp_path / "pointer", num_layers=1) / "model.safetensors"
    oid = f"oid sha256:{'0' * 64}"
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 9\n")
    for path, text in {
        model / "model.safetensors": f"Give the folder of the model, such as {model}",
        tmp_path / "x.gguf": "The file ends inside its header",
        tmp_path / "lora": "This is an adapter (LoRA)",
        tmp_path / "models--org--name": "Name the repo, org/name",
        pointer.parent: "git lfs pull",
    }.items():
        with pytest.raises(HqconvError) as error:
            open_source(path)
        assert text in str(error.value)
        assert error.value.exit_code in (2, 3)


def test_a_recut_takes_the_artifacts_own_target(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "sm80", "mxfp4", target="sm80")
    again = ("convert", tmp_path / "sm80", "--schema", "source", "--tp", 2, "-o", tmp_path / "tp2")
    done = call(*again)
    assert (done.exit_code, "Target" in done.stderr) == (0, False)
    assert manifest(tmp_path / "tp2")["target"] == "sm80"
    run(model, tmp_path / "checkpoint", "mxfp4", layout="checkpoint")
    for path in (model, tmp_path / "checkpoint"):
        with open_source(path) as source:
            assert own_target(source) is None


# --- what is shown -----------------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar_and_stdout_stays_clean(model: Path, tmp_path: Path) -> None:
    primary, secondary = pty.openpty()
    command = f"convert {model} -o {tmp_path}/out --schema int4 --target sm90 --json"
    process = processes.Process(
        [sys.executable, "-m", "hqconv", *command.split()],
        env={**environment(), "TERM": "xterm", "COLUMNS": "60"},
        stderr=secondary,
        stdout=subprocess.PIPE,
    )
    os.close(secondary)
    seen = b""
    with suppress(OSError):  # EIO: the other side is closed and everything was read
        while chunk := os.read(primary, 65536):
            seen += chunk
    stdout, _ = process.communicate(timeout=60)
    os.close(primary)
    assert json.loads(stdout)["num_blocks"] == 1
    assert re.search(rb"[\d.]+/[\d.]+ [kM]B", seen)
    lines = [re.sub(rb"\x1b\[[^m]*m", b"", line) for line in re.split(rb"\n|\x1b\[2K", seen)]
    assert max(len(line.decode().strip()) for line in lines) <= 60
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor is there again


def test_verify_shows_how_far_it_is(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", "mxfp4")
    last: dict[str, Progress] = {}
    hqconv.verify(tmp_path / "out", model, device="cpu", progress=last.__setitem__)
    files = manifest(tmp_path / "out")["files"]
    sizes = [entry["size_bytes"] for name, entry in files.items() if name != "README.md"]
    assert last["files"].done_bytes == sum(sizes)
    counts = {check: (done.num_units_done, done.num_units) for check, done in last.items()}
    assert counts == {"files": (len(sizes), len(sizes)), "weights": (1, 1)}


# --- help --------------------------------------------------------------------------------------------------

COMMANDS = sorted(vars(typer.main.get_command(app))["commands"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["", "convert", *COMMANDS])
def test_help_at_80_columns_is_whole(name: str) -> None:
    """Every word of every help text is there; `[default: …]` is text, not markup."""
    group: Any = typer.main.get_command(app)
    runner = CliRunner()
    flags = (
        set() if not name else {flag for one in group.commands[name].params for flag in one.opts}
    )
    command = [*name.split(), "--help-all" if "--help-all" in flags else "--help"]
    shown = runner.invoke(app, command, env={"COLUMNS": "80"}, terminal_width=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    described = group.commands[name].params if name else group.commands.values()
    assert len(described) > 4
    plain = re.sub(r"[│\s]", "", shown)
    words = {word for each in described for word in each.help.replace("\\", "").split()}
    assert {word for word in words if word not in plain} == set()
    if name:
        texts = re.sub("`[^`]+`", "", " ".join(each.help for each in described))
        assert {*re.findall(r"--[a-z][\w-]+", texts)} <= flags
    if name == "convert":
        headings = re.findall(r"^╭─ ([\w ]+) ─", shown, re.MULTILINE)
        assert headings[:2] == ["Arguments", "Options"]
        assert len(headings) == 7


def test_quiet_commands_say_nothing(model: Path, tmp_path: Path) -> None:
    """But what is all that a command makes, and what is wrong."""
    out = tmp_path / "out"
    convert = ("convert", model, "-o", out, "--schema", "mxfp4", "--target", "sm90")
    verify = ("verify", out, "--device", "cpu")
    for command in (convert, verify, ("check", model)):
        done = call(*command, "-q")
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", ""), command
    assert "mxfp4" in call("inspect", out, "-q").stdout
    (out / "tokenizer.json").unlink()
    bad = call(*verify, "-q")
    assert (bad.exit_code, "tokenizer.json" in bad.stdout) == (1, True)
