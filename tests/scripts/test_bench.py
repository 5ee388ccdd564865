"""The benchmark's sink `null`: a conversion that writes no weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

CODE = """
import sys
from scripts.bench import convert
options = {"schema": "int4-g64", "target": "sm90", "device": "cpu", "threads": 1}
print(convert(sys.argv[1], sys.argv[2], options, "null")["bytes_out"])
"""


def test_the_null_sink_writes_no_weights(tmp_path: Path) -> None:
    model, out = write_qwen3_moe(tmp_path / "model", num_layers=1), tmp_path / "out"
    command = [sys.executable, "-c", CODE, str(model), str(out)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 0
    assert not list(out.rglob("*.safetensors"))
