"""Many ranks, several groups under way at once, and few open files allowed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.make import processes
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

SCRIPT = """
import os, resource, sys, time
import hqconv
from hqconv.conversion.output_folder import UnitWriter

src, out = sys.argv[1:]
request = {"schema": "int4-c", "target": "sm90", "tp": 4, "ep": 32}
hqconv.plan(src, **request)  # everything is loaded
finish, most = UnitWriter.finish_file, []

def slow(self, file, *rest):  # so that as many groups as may be are open at once
    time.sleep(0.002)
    most.append(len(os.listdir("/proc/self/fd")))
    return finish(self, file)

UnitWriter.finish_file = slow
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
hqconv.convert(src, out, **request, device="cpu", threads=8)
print(max(most))
"""


def test_many_ranks_and_groups_with_128_open_files(tmp_path: Path) -> None:
    sizes = {"num_layers": 3, "num_experts": 32, "hidden_size": 128, "intermediate_size": 256}
    src = write_qwen3_moe(tmp_path / "src", **sizes)
    command = [sys.executable, "-c", SCRIPT, str(src), str(tmp_path / "out")]
    done = processes.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        int(done.stdout) < 96
    )  # the rest is for more source shards, and threads that need one more
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 3 * 4 * 32 + 1
