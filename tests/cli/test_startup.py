"""What only looks at names and headers loads no torch, no numba and no Humming."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe
from tests.make.small import fp8_blocks, save
from tests.make.startup import HEAVY, cold


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `quantized`, and `artifact`."""
    root = tmp_path_factory.mktemp("start")
    run(write_qwen3_moe(root / "model"), root / "artifact", "mxfp4")
    save(root / "quantized", fp8_blocks())
    return root


LOOKS = (
    "schemas",
    "schemas --recipes",
    "inspect {}/model",
    "inspect {}/quantized",
    "inspect {}/artifact",
    "report {}/artifact -o {}/page.html",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", LOOKS)
def test_a_look_loads_nothing_heavy(command: str, folder: Path) -> None:
    names = (*HEAVY, "hqconv.cli.app")
    found, *_ = cold(*command.replace("{}", str(folder)).split(), names=names)
    assert found == {"hqconv.cli.app"}


@pytest.mark.parametrize("command", ["--help", "convert --help"])
def test_help_needs_options_alone(command: str) -> None:
    names = ("hqconv.planning.plan", "hqconv.sources.opening", "hqconv.artifact.manifest")
    assert cold(*command.split(), names=(*HEAVY, *names))[0] == set()


COUNT = """
import sys, threading
seen = set()
def count(frame, event, _):
    code = frame.f_code
    if event == "call" and "/hqconv/" in code.co_filename and code.co_flags & 1 and code.co_name[0] != "<":
        seen.add(code)
threading.setprofile(count)
sys.setprofile(count)
from hqconv.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code
sys.setprofile(None)
print(len(seen))
"""


def test_a_conversion_executes_few_functions(folder: Path, tmp_path: Path) -> None:
    """So that a reader can follow one; in all threads, class bodies and comprehensions apart."""
    command = (
        f"convert {folder}/model -o {tmp_path}/out --schema mxfp4 --target sm90 --device cpu -q"
    )
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *command.split()], capture_output=True, text=True, check=True
    )
    assert 500 < int(done.stdout.split()[-1]) <= 850
