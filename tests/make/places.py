"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parents[2]
GOLDEN = REPO / "tests" / "golden"
CONFIGS = REPO / "configs"
SCRIPTS = REPO / "scripts"
