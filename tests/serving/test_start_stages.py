"""The functions that scripts/start_stages.py times are in this vLLM, under these names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs this")

pytestmark = pytest.mark.vllm

REPO = Path(__file__).resolve().parents[2]


def test_every_function_is_there() -> None:
    """In a process of its own, whose functions are replaced."""
    text = "from scripts.start_stages import StageTimer; print('missing:', StageTimer().watch_all())"
    done = subprocess.run([sys.executable, "-c", text], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("missing: []\n")
