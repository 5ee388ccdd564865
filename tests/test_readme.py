"""The commands of the README and of docs run, in this process and without a GPU; the example is what comes out."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from hqconv.cli.app import app
from hqconv.reports.documents import describe_gpu
from scripts import make_checkpoint
from tests.make import processes
from tests.make.command import call
from tests.make.places import REPO
from tests.make.tokenizer import write_tokenizer

TEXT = (REPO / "README.md").read_text(encoding="utf-8")
# Of any page: lines of its blocks that are commands. After `$` stands a transcript, which is not run here.
LINE = re.compile(
    r"^    (\$ )?((?:git|hqconv|make|pip|python3?|srun|torchrun|vllm) .+)$", re.MULTILINE
)
MARK = re.compile(r"# \[(GPU|network|hours)\]")  # of lines that are not run: they need what it says
SET_UP = "python3 -m venv .venv && . .venv/bin/activate"
MEASURED = REPO / "docs/measured"  # by scripts/record.py
PAGES = ["README.md", *sorted(str(p.relative_to(REPO)) for p in (REPO / "docs").rglob("*.md"))]


def options_of(name: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {flag for one in group.commands[name].params for flag in one.opts} | {"--help"}


def lines_of(page: str) -> list[tuple[str, ...]]:
    """The sign of a transcript, and the line."""
    return LINE.findall((REPO / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_as_they_are_shown(page: str) -> None:
    """Also those that are not run: their options exist."""
    for _, line in lines_of(page):
        program, *words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        if program == "python":
            known = set(re.findall(r"--[\w-]+", (REPO / words[0]).read_text(encoding="utf-8")))
        elif program == "hqconv":
            known = options_of(words[0]) if words[0][0] != "-" else {"--install-completion"}
        else:
            continue
        assert flags <= known, line


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: models, an artifact, texts."""
    root = tmp_path_factory.mktemp("pages")
    sizes = "--hidden 128 --intermediate 512 --layers 2 --experts 8 --top-k 2 --vocab 64"
    make_checkpoint.main([str(root / "MODEL"), *sizes.split()])
    write_tokenizer(root / "MODEL")
    for name in ("ORIGINAL", "org/model", "real"):
        shutil.copytree(root / "MODEL", root / name)
    for seed, name in enumerate(("TEXT", "FILE", "calib.txt", "held-out.txt")):
        words = random.Random(seed)
        lines = [" ".join(str(words.randint(1, 63)) for _ in range(64)) for _ in range(80)]
        (root / name).write_text("\n".join(lines))
    assert call("convert", root / "MODEL", "-o", root / "OUT", "--schema", "mxfp4").exit_code == 0
    return root


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(
    page: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, in one folder. What is not hqconv's own command has a mark."""
    lines = [line for sign, line in lines_of(page) if not sign and line != SET_UP]
    commands = [line for line in lines if not MARK.search(line)]
    if not commands:
        return
    monkeypatch.chdir(shutil.copytree(models, tmp_path / "pages"))
    for line in commands:
        program, *words = shlex.split(line, comments=True)
        assert program == "hqconv", line
        words = ["l40s" if word == "GPU" else word for word in words]
        if "-o" in words and words[0] == "convert":
            shutil.rmtree(words[words.index("-o") + 1], ignore_errors=True)
        elif words[0] == "convert":
            words.append("--overwrite")
        done = call(*words)
        assert done.exit_code == 0, (line, done.output)


def test_the_command_works_for_every_gpu_that_is_named(models: Path) -> None:
    """With the schema that `schemas --for` recommends; with fp8 activations, too."""
    section = TEXT.partition("## Choose the GPU\n")[2].partition("\n## ")[0]
    named, with_mxfp4 = re.findall(
        r"`GPU` is .*?\. |`--schema mxfp4` on .*?\. ", section, re.DOTALL
    )
    gpus, fast = (re.findall(r"`([a-z]\S+)`", text) for text in (named, with_mxfp4))
    assert {*fast} < {*gpus} > {"a100", "b300", "rtx-pro-6000", "t4"}
    for gpu in gpus:
        found = describe_gpu(gpu)
        assert (found["schema"], gpu in fast) == ("int4-g32-e4m3", found["fp8_schema"] == "mxfp4")
        options = ["--dtype", "float16"] if gpu == "t4" else []
        inputs = ["--schema", found["fp8_schema"], "--input-schema", "fp8"]
        for more in [[], inputs] if found["fp8_schema"] else [[]]:
            done = call(
                *("convert", models / "MODEL", "-o", models / "none", "--target", gpu, "--dry-run"),
                *(*options, *more),
            )
            assert done.exit_code == 0, (gpu, done.output)


def test_the_figures_of_the_real_model_are_the_measured_ones() -> None:
    """In README and docs/quality.md; its times, too."""
    divergence = json.loads((MEASURED / "divergence.json").read_bytes())["schemas"]
    (run,) = json.loads((MEASURED / "speeds.json").read_bytes())["runs"]
    times = {
        (row["schema"], row["input_schema"], row["num_tokens"]): row["microseconds"]
        for row in run["rows"]
    }
    figures = divergence["int4-g32-e4m3"]
    assert "{:.3f} rounded to nearest and {:.3f} calibrated".format(
        *(figures[how]["kl"] for how in ("rtn", "calibrated"))
    ) in " ".join(TEXT.split())
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


@pytest.mark.parametrize(
    ("said", "page", "measured"),
    [
        ("from 454 GB to 121 GB", "examples/models.md", "| 454 GB | 121 GB |"),
        ("6 minutes for Qwen3-30B-A3B, 22", "examples/models.md", "| 85, 4.8 GB | 22 |"),
        ("0.0086 and 0.0046", "quality.md", "| `int4-g32-e4m3` | 4.25 | 0.0086 | 0.0046 |"),
        (
            "and 21,694 for 64; in 16 bits 444 and 27,141",
            "quality.md",
            "444 and 27,141, 556 and 21,694",
        ),
        (
            "after 18 s with",
            "serving.md",
            "| kernel layout, after `hqconv warm` (12.3 s) | 18.4 s |",
        ),
        ("stock vLLM after 25 s", "serving.md", "after `hqconv warm` (22.6 s) | 25.2 s |"),
        ("without them after 38 s", "serving.md", "| checkpoint layout, stock vLLM | 37.5 s |"),
        ("1,739 rightly, 99.6 %", "check.md", "1,739 of 1,746"),
        ("951 sound checkpoints", "check.md", "False alarms: 0 in 951 checks"),
    ],
)
def test_a_figure_of_the_readme_stands_where_it_was_measured(
    said: str, page: str, measured: str
) -> None:
    assert said in " ".join(TEXT.split())
    assert measured in " ".join((REPO / "docs" / page).read_text(encoding="utf-8").split())


def test_the_readme_shows_some() -> None:
    assert len(lines_of("README.md")) > 15
    assert re.search(r"^    make demo .*\n    make test ", TEXT, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the example is of a machine without a GPU")
def test_the_example_is_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but times, which are another machine's."""
    layers = re.findall(r"^    \$ (.+)\n((?:    [^$\n].*\n|\n(?=    [^$]))*)", TEXT, re.MULTILINE)
    made, converted, verified = (shlex.split(command) for command, _ in layers)
    made[1] = str(REPO / made[1])
    monkeypatch.chdir(tmp_path)
    processes.run([sys.executable, *made[1:]], check=True, capture_output=True)
    for command, (_, shown) in ((converted, layers[1]), (verified, layers[2])):
        done = call(*command[1:])
        assert done.exit_code == 0, done.output
        told = [plain(line) for line in done.stdout.splitlines()]
        expected = [plain(line) for line in shown.splitlines() if line.strip() not in ("", "…")]
        assert [line for line in expected if line not in told] == []
        assert len(expected) > 4
    failing = re.findall(
        r"^    \$ hqconv (convert .+)\n((?:    .*\n)+)",
        (REPO / "docs/ci.md").read_text(),
        re.MULTILINE,
    )
    for command, document in failing:
        assert json.loads(call(*shlex.split(command)).stdout) == json.loads(document)


def plain(line: str) -> str:
    """A line without its spaces and times."""
    line = re.sub(r"[\d.]+ s\b(, [\d.]+ \w?B/s)?(, \d+ workers?)?", "", line)
    return " ".join(line.split())
