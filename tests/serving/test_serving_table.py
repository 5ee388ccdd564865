"""docs/serving.md says what the plugin does in vLLM's classes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.make.places import REPO


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not here: `make test-vllm` runs these")
def test_the_tables_are_what_is_found() -> None:
    command = [sys.executable, "scripts/serving_table.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
