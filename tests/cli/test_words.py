"""What people type that is almost right, what they are shown while they wait, and the help."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.cli.options import _GROUPS, OPTIONS, at_home
from hqconv.cli.progress_bar import human_rate
from hqconv.conversion.stages import Progress
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.weight_schema import PRESETS, resolve_schema
from hqconv.sources.opening import open_source, own_target, parse_source_name
from tests.make import processes
from tests.make.command import call
from tests.make.conversions import manifest, run
from tests.make.qwen import write_qwen3_moe
from tests.make.stopping import environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("words") / "model", num_layers=1)


# --- schemas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(
            ("MXFP4", "mxfp4"),
            ("mxpf4", "mxfp4"),
            ("w4a16", "int4"),
            ("W8A16", "int8"),
            ("int-4", "int4"),
        ),
        *(("INT4_G64_ZP", "int4-g64-zp"), ("fp-8", "fp8"), ("Source", "source"), ("gptq", "int4")),
        ("w4a8", "int4 with --input-schema int8 or fp8"),
    ],
)
def test_a_schema_that_is_almost_named(typed: str, meant: str) -> None:
    with pytest.raises(RequestError) as error:
        resolve_schema(typed)
    assert error.value.remedy.startswith(f"Did you mean {meant}? ")


def test_nothing_is_guessed() -> None:
    explains = "`hqconv schemas` explains each."
    guesses = {
        "zzz": explains,
        "": explains,
        "\x1b[31m": explains,
        "int9": f"Did you mean int8? {explains}",
    }
    for typed, remedy in guesses.items():
        with pytest.raises(RequestError) as error:
            resolve_schema(typed)
        assert error.value.remedy == remedy
    with pytest.raises(RequestError, match=r"Did you mean fp8-static\?"):
        resolve_inputs("FP8_static")


def test_names_of_others_lead_to_schemas() -> None:
    from hqconv.schemas import suggestions

    for name in suggestions._ALSO.values():
        resolve_schema(name)
    for words in suggestions._WITH_ACTIVATIONS.values():
        assert words.split(" ")[0] in PRESETS


# --- command lines, names and files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "where", "text"),
    [
        ("convert", "hqconv convert", "Missing argument 'SRC'"),
        ("convrt x", "hqconv", "No such command 'convrt'. Did you mean 'convert'?"),
        (
            "convert x --schmea y",
            "hqconv convert",
            "(Possible options: --input-schema, --resume, --schema)",
        ),
        ("warm x --gpus y", "hqconv warm", "No such option: --gpus"),
        ("convert x --tp", "hqconv convert", "requires an argument"),
        ("convert x --tp 0", "hqconv convert", "greater than or equal to 1"),
        (
            "convert x --layout up",
            "hqconv convert",
            "Invalid value for '--layout': 'up' is not one of 'kernel', 'checkpoint'",
        ),
        ("inspect x y", "hqconv inspect", "unexpected extra argument"),
        ("convert x --tp two", "hqconv convert", "--tp"),
        ("--nonsense", "hqconv", "No such option: --nonsense"),
    ],
)
def test_a_wrong_command_line_is_a_message_like_others(typed: str, where: str, text: str) -> None:
    done = call(*typed.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: The command line is wrong.\n  where: {where}\n  found: ")
    assert text in done.stderr
    assert "what to do: " in done.stderr
    assert "Usage:" not in done.stderr
    assert "Value error" not in done.stderr
    command, *rest = typed.split()
    as_json = call(command, "--json", *rest)
    words = json.loads(as_json.stdout)
    assert (as_json.exit_code, words["kind"], words["exit_code"], words["where"]) == (
        2,
        "error",
        2,
        where,
    )
    assert text in words["found"]


def test_files_that_are_almost_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "nightly.toml").write_text('schema = "mxfp4"\n')
    for typed, meant in (
        (["--config", "ends-in-8bits"], "Did you mean ends-in-8-bits?"),
        (["--config", "recipes/nigthly.toml"], "Did you mean recipes/nightly.toml?"),
        (["--config", "zzz"], "what to do: `hqconv schemas --recipes` lists"),
        (["--schema", "w3-g46.toml"], "Did you mean w3-g64.toml?"),
    ):
        done = call("convert", model, *typed)
        assert done.exit_code == 2
        assert meant in done.stderr
    for command in (["inspect", f"{model}l"], ["verify", f"{model}l"]):
        done = call(*command)
        assert (done.exit_code, f"Did you mean {model}?" in done.stderr) == (2, True)


# --- sources -----------------------------------------------------------------------------------------------


def test_other_ways_to_name_a_repo() -> None:
    names: dict[str, tuple[str | None, str | None]] = {
        "org/name": (None, None),
        "org/name@v1": ("v1", None),
        "org/name@refs/pr/7": ("refs/pr/7", None),
        "org/name:Q4_K_M": (None, "Q4_K_M"),
        "org/name:Q4_K_M@v1": ("v1", "Q4_K_M"),
        "org/name/sub/x.gguf@v1": ("v1", "sub/x.gguf"),
    }
    assert {typed: parse_source_name(typed) for typed in names} == {
        typed: ("org/name", *named) for typed, named in names.items()
    }
    for typed in (
        "org/name/tree/x",
        "/no/such",
        "",
        "./org/name",
        "https://huggingface.co/org/name",
        "org/name/x.bin",
        "org/name:a:b",
        "org/name@v1:Q4_K_M",
    ):
        assert parse_source_name(typed) == (typed, None, None)
    assert parse_source_name("org/name", "a/b") == ("org/name", "a/b", None)
    with pytest.raises(RequestError, match="Two revisions"):
        parse_source_name("org/name@a", "b")


def test_a_folder_with_such_a_name_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_source_name("org/name@v1") == ("org/name@v1", None, None)


def opening(path: Path) -> str:
    with pytest.raises(HqconvError) as error:
        open_source(path)
    assert isinstance(error.value, RequestError | InputError)
    return error.value.message()


def test_what_is_no_model_gets_its_own_words(model: Path, tmp_path: Path) -> None:
    assert f"Give the folder of the model, such as {model}" in opening(model / "model.safetensors")
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    assert "The file ends inside its header" in opening(gguf)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    assert "This is an adapter (LoRA)" in opening(tmp_path / "lora")
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    assert "Name the repo, org/name" in opening(tmp_path / "models--org--name")
    pointer = write_qwen3_moe(tmp_path / "model", num_layers=1)
    oid = f"oid sha256:{'0' * 64}"
    (pointer / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 9\n"
    )
    assert "git lfs pull" in opening(pointer)


# --- targets and places ------------------------------------------------------------------------------------


def test_a_recut_takes_the_artifacts_own_target(model: Path, tmp_path: Path) -> None:
    first = ("--schema", "mxfp4", "--target", "sm80", "-o", tmp_path / "sm80")
    assert call("convert", model, *first).exit_code == 0
    again = ("convert", tmp_path / "sm80", "--schema", "source", "--tp", 2, "-o", tmp_path / "tp2")
    assert call(*again).exit_code == 0
    assert manifest(tmp_path / "tp2")["target"] == "sm80"
    assert hqconv.plan(tmp_path / "sm80", schema="source").spec.target == GpuTarget(80)
    done = call("convert", tmp_path / "sm80", "--schema", "int4", "-o", tmp_path / "x")
    assert done.exit_code == 2
    assert "--target" in done.stderr


def test_a_checkpoint_has_no_target(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", "mxfp4", layout="checkpoint")
    for path in (model, tmp_path / "out"):
        with open_source(path) as source:
            assert own_target(source) is None


def test_home_is_found_where_shells_do_not_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert at_home(Path("~/x")) == tmp_path / "x"
    assert (at_home("~/m"), at_home("a~"), at_home(3), at_home(None)) == (
        f"{tmp_path}/m",
        "a~",
        3,
        None,
    )
    (tmp_path / "~here").mkdir()
    assert at_home("~here") == "~here"


# --- what is shown -----------------------------------------------------------------------------------------


def test_small_speeds_have_small_units() -> None:
    speeds = {
        3.21e9: "3.21 GB/s",
        361_230_000: "361 MB/s",
        42e6: "42.0 MB/s",
        1500: "1.50 kB/s",
        0.0: "0.00 B/s",
    }
    assert {speed: human_rate(speed) for speed in speeds} == speeds


def terminal(*arguments: object, columns: int) -> tuple[str, str]:
    """What a command writes to a terminal, as its stderr, and to stdout."""
    primary, secondary = pty.openpty()
    process = processes.Process(
        [sys.executable, "-m", "hqconv", *map(str, arguments)],
        env={**environment(), "TERM": "xterm", "COLUMNS": str(columns)},
        stderr=secondary,
        stdout=subprocess.PIPE,
    )
    os.close(secondary)
    seen = b""
    try:
        while chunk := os.read(primary, 65536):
            seen += chunk
    except OSError:  # EIO: the other side is closed and everything was read
        pass
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    os.close(primary)
    return seen.decode(), stdout.decode()


def test_a_terminal_gets_a_bar_and_stdout_stays_clean(model: Path, tmp_path: Path) -> None:
    arguments = (
        "convert",
        model,
        "-o",
        tmp_path / "out",
        "--schema",
        "int4",
        "--target",
        "sm90",
        "--json",
    )
    seen, stdout = terminal(*arguments, columns=160)
    assert json.loads(stdout)["num_blocks"] == 1
    assert re.search(r"[\d.]+/[\d.]+ [kM]B", seen)
    assert "\x1b[" in seen


@pytest.mark.full
def test_verify_shows_how_far_it_is(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", "mxfp4")
    seen, _ = terminal("verify", tmp_path / "out", "--source", model, "--device", "cpu", columns=80)
    assert (
        "weights (" in seen
    )  # a check that ends before the bar is drawn again, as files may, is not shown
    for line in seen.replace("\x1b[2K", "\n").splitlines():
        plain = "".join(
            part.partition("m")[2] if i else part for i, part in enumerate(line.split("\x1b["))
        )
        assert len(plain.strip()) <= 80, plain
    told: list[tuple[str, int, tuple[int, int]]] = []

    def tell(check: str, done: Progress) -> None:
        told.append((check, done.done_bytes, (done.num_groups_done, done.num_groups)))

    hqconv.verify(tmp_path / "out", model, device="cpu", progress=tell)
    assert {check for check, _, _ in told} == {"files", "weights"}
    files = manifest(tmp_path / "out")["files"]
    sizes = [words["size_bytes"] for name, words in files.items() if name != "README.md"]
    assert max(done for check, done, _ in told if check == "files") == sum(sizes)
    counts = {check: count for check, _, count in told}  # the last of each
    assert counts == {"files": (len(sizes), len(sizes)), "weights": (1, 1)}


def test_a_first_run_says_that_it_compiles(model: Path, tmp_path: Path) -> None:
    code = "import hqconv.jit as c\nfrom hqconv.cli.progress_bar import ShownProgress\n"
    code += "with ShownProgress(quiet=False):\n    c.compiled(eval('lambda x: x + 1'))(1)"
    done = processes.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stderr.count("Compiling loops for this processor") == 1


# --- help --------------------------------------------------------------------------------------------------


def test_options_stand_under_headings() -> None:
    shown = call("convert", "--help").stdout
    headings = [line.strip("╭╮─ ") for line in shown.splitlines() if line.startswith("╭")]
    assert headings[:2] == ["Arguments", "Options"]
    assert set(headings[2:]) == {*_GROUPS} - {"Budget"}
    for name in ("tp", "schema", "resume", "json", "device", "config"):
        assert f"--{name}" in shown


@pytest.mark.parametrize(
    ("typed", "completed"), [("mxf", ["mxfp4", "mxfp8"]), ("sou", ["source"]), ("zz", [])]
)
def test_a_shell_completes_schemas(typed: str, completed: list[str]) -> None:
    asked = {
        "_HQCONV_COMPLETE": "complete_bash",
        "COMP_WORDS": f"hqconv convert --schema {typed}",
        "COMP_CWORD": "3",
    }
    done = processes.run(
        [sys.executable, "-m", "hqconv"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), **asked},
    )
    assert done.stdout.split() == completed


def test_a_list_of_checks_is_completed() -> None:
    complete = OPTIONS["checks"].settings["autocompletion"]
    assert complete("") == ["files", "weights", "kernel"]
    assert complete("w") == ["weights"]
    assert complete("files,") == ["files,weights", "files,kernel"]
    assert complete("files,weights,k") == ["files,weights,kernel"]
    assert complete("files,f") == []


COMMANDS = sorted(vars(typer.main.get_command(app))["commands"])


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_at_80_columns_is_whole(name: str) -> None:
    """Every word of every help text is there; `[default: …]` is text, not markup."""
    group: Any = typer.main.get_command(app)
    shown = (
        CliRunner()
        .invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}, terminal_width=80)
        .stdout
    )
    assert max(map(len, shown.splitlines())) <= 80
    texts = [param.help for param in group.commands[name].params] if name else []
    texts += [one.help for one in group.commands.values()] if not name else []
    assert len(texts) > 4
    plain = re.sub(r"[│\s]", "", shown)
    words = {word for text in texts for word in text.replace("\\", "").split()}
    assert {word for word in words if word not in plain} == set()


def test_help_texts_are_true_for_their_command() -> None:
    def text(command: str, option: str) -> str:
        group: Any = typer.main.get_command(app)
        return next(
            str(param.help) for param in group.commands[command].params if param.name == option
        )

    assert "Hub repo id" in text("verify", "out")
    assert all("Hub" not in text(command, "out") for command in ("report", "push"))
    for command in COMMANDS:
        options = {
            param.name for param in vars(typer.main.get_command(app))["commands"][command].params
        }
        assert "dry_run" in options or "--dry-run" not in text(command, "quiet"), command
        if "revision" in options:
            assert ("source" in options) == ("--source" in text(command, "revision")), command
        if "threads" in options:
            assert ("encode" in text(command, "threads")) == (command in ("allocate", "convert")), (
                command
            )
    assert "findings" in text("verify", "quiet")
    assert "identical" not in text("verify", "device")


def test_quiet_commands_say_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "out", "mxfp4")
    told: list[Any] = []
    monkeypatch.setattr(
        "hqconv.api.warm", lambda **options: told.append(options["announce"]) or {"kind": "warm"}
    )
    inspected = [("inspect", model), ("inspect", tmp_path / "out")]
    verified = ("verify", tmp_path / "out", "--device", "cpu")
    for arguments in (*inspected, ("schemas",), ("warm", tmp_path / "out"), verified):
        done = call(*arguments, "-q")
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", ""), arguments
    assert told == [None]
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert call("inspect", tmp_path / "out", "-q").exit_code == 1
    bad = call(*verified, "-q")
    assert (bad.exit_code, "tokenizer.json" in bad.stdout) == (1, True)
