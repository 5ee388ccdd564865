"""One small model, and an artifact of it, for all tests of the command line; do not change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.make.command import call
from tests.make.qwen import write_qwen3_moe


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="package")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    done = call(
        "convert", model, "-o", out, "--schema=mxfp4", "--target=sm90", "--device=cpu", "--tp=2"
    )
    assert done.exit_code == 0, done.stderr
    return out
