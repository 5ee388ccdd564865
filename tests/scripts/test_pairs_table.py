"""The tables of docs/targets.md are those of the rules."""

from __future__ import annotations

import subprocess
import sys

from tests.make.places import REPO


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, "scripts/pairs_table.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
