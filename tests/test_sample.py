"""The sample of `make test`: few cases of each function, evenly spread; every test for a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make.places import REPO

CASES = """
import pytest

@pytest.mark.parametrize("number", range(7))
def test_number(number): pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(9))
def test_one_in_three(number): pass

@pytest.mark.cuda
@pytest.mark.parametrize("number", range(9))
def test_on_a_gpu(number): pass

@pytest.mark.full
def test_slow(): pass
"""
ALL = {"test_number": range(7), "test_one_in_three": range(9), "test_on_a_gpu": range(9)}
SAMPLE = {"test_number": (0, 1, 3, 5), "test_one_in_three": (0, 3, 6), "test_on_a_gpu": range(9)}


@pytest.mark.parametrize("effort", ["", "rest"])
def test_sample_and_rest_are_all(effort: str, tmp_path: Path) -> None:
    cases = tmp_path / "test_cases.py"
    cases.write_text(CASES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-p",
        "tests.conftest",
        "-c",
        "pyproject.toml",
        cases,
    ]
    environment = {**os.environ, "HQCONV_TESTS": effort}
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=True
    )
    found = {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    sampled = {f"{name}[{number}]" for name, numbers in SAMPLE.items() for number in numbers}
    rest = {
        f"{name}[{number}]" for name, numbers in ALL.items() for number in numbers
    } - sampled | {"test_slow"}
    assert found == (rest if effort else sampled)
