"""What only looks at names and headers loads no torch, no numba and no Humming."""

from __future__ import annotations

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
