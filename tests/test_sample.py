"""The sample of `make test`: few cases of each function, evenly spread; every test for a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.make.effort import NUM_CASES, sample
from tests.make.places import REPO


class Case:
    """A stand-in for a collected case: its number and its marks."""

    def __init__(self, number: int, *marks: pytest.MarkDecorator) -> None:
        self.number = number
        self.marks = {one.name: one.mark for one in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def numbers(count: int, *marks: pytest.MarkDecorator) -> list[int]:
    cases: Any = [Case(number, *marks) for number in range(count)]
    chosen: Any = sample(cases)
    return [case.number for case in chosen]


def test_cases_of_a_function_are_spread_evenly() -> None:
    assert numbers(1) == [0]
    assert numbers(NUM_CASES) == list(range(NUM_CASES))
    assert numbers(10 * NUM_CASES) == [10 * number for number in range(NUM_CASES)]


def test_marks_of_slow_functions() -> None:
    """`sampled(n)`: one in n, rounded up, and NUM_CASES at most. `full`: none."""
    assert numbers(3, pytest.mark.sampled(8)) == [0]
    assert numbers(9, pytest.mark.sampled(3)) == [0, 3, 6]
    assert len(numbers(100, pytest.mark.sampled(3))) == NUM_CASES
    assert numbers(5, pytest.mark.full) == []


def test_tests_for_a_gpu_are_not_cut() -> None:
    """On a GPU they are the reason for the run, and elsewhere they skip at once."""
    assert numbers(100, pytest.mark.cuda) == list(range(100))
    assert len(numbers(100, pytest.mark.cuda, pytest.mark.sampled(4))) == 25


@pytest.mark.parametrize("effort", ["", "rest", "all"])
def test_sample_and_rest_are_all(effort: str, tmp_path: Path) -> None:
    cases = tmp_path / "test_cases.py"
    cases.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(7))\n"
        "def test_number(number): pass\n"
        "@pytest.mark.full\n"
        "def test_slow(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "tests.conftest", "-c", "pyproject.toml", cases]
    environment = {**os.environ, "HQCONV_TESTS": effort}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    found = {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    numbers = {0, 1, 3, 5} if not effort else {2, 4, 6} if effort == "rest" else set(range(7))
    assert found == {f"test_number[{number}]" for number in numbers} | ({"test_slow"} if effort else set())
