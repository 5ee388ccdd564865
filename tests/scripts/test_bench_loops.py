"""The script that times the CPU's loops: a line for each number of threads, of a compiler that it was told to use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from llvmlite import binding

from scripts import bench_loops
from tests.make.places import REPO


@pytest.mark.full
def test_every_processor_and_number_of_threads_has_a_line() -> None:
    options = ["--schemas", "int4", "--threads", "1,2", "--runs", "1", "--processors", "host,x86-64-v3"]
    command = [sys.executable, str(REPO / "scripts/bench_loops.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    of = [(row.pop("processor"), row.pop("schema"), row.pop("threads")) for row in rows]
    assert of == [(processor, "int4", threads) for processor in ("host", "x86-64-v3") for threads in (1, 2)]
    assert all(value > 0 for row in rows for value in row.values())


def test_another_processor_gets_no_instruction_that_this_one_lacks() -> None:
    assert bench_loops.settings_of("host") == {}
    settings = bench_loops.settings_of("sapphirerapids")
    assert settings["NUMBA_CPU_NAME"] == "sapphirerapids"
    here = binding.get_host_cpu_features()
    assert set(settings["NUMBA_CPU_FEATURES"].split(",")) == {f"-{name}" for name, has in here.items() if not has}
