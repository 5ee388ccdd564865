"""The command in a process of its own: what it loads, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.make.places import REPO

HEAVY = ("torch", "numba", "humming", "transformers", "huggingface_hub")

_SCRIPT = """
import json, sys, time
from hqconv.cli.app import main
heavy, sys.argv = json.loads(sys.argv[1]), ["hqconv", *sys.argv[2:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps([[name for name in heavy if name in sys.modules], time.process_time()]))
"""


def cold(*arguments: object, names: tuple[str, ...] = HEAVY) -> tuple[set[str], float]:
    """Run `hqconv ARGUMENTS`, which must succeed: the modules of `names` that it loaded, and its CPU seconds."""
    command = [sys.executable, "-c", _SCRIPT, json.dumps(names), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert done.returncode == 0, done.stderr
    loaded, seconds = json.loads(done.stdout.splitlines()[-1])
    return set(loaded), seconds
