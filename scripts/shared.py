"""What the scripts share: which schemas are checked, and the checkpoint that they are checked on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hqconv.schemas.weight_schema import PRESETS

SCHEMAS = (*PRESETS, "int4-g64-zp", "int3-g64", "int4-g128-fpzp", "int7-c", "int8-g128-zp")


def make_source(folder: Path, **options: object) -> Path:
    """A checkpoint of scripts/make_checkpoint.py; `hidden=512` is its option `--hidden 512`."""
    words = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    script = Path(__file__).with_name("make_checkpoint.py")
    subprocess.run([sys.executable, str(script), str(folder), *words], check=True, stdout=subprocess.DEVNULL)
    return folder
