"""Compiled loops on machines where nothing can be kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

# What numba finds where neither the installation nor a home can be written.
READ_ONLY = """
import sys
from numba.core import caching
caching.CacheImpl._locator_classes = []
sys.argv = ["hqconv", *sys.argv[1:]]
from hqconv.cli.app import main
main()
"""


@pytest.mark.full
def test_a_read_only_home_and_installation(tmp_path: Path) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=1, num_experts=2)
    words = ["convert", str(model), "-o", str(tmp_path / "out"), "--schema", "int4", "--target", "sm90", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, *words], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "hqconv.json").is_file()
