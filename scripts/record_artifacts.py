"""Record digests of whole artifacts, for `tests/conversion/test_golden_artifacts.py`.

    python scripts/record_artifacts.py tests/golden/artifacts.json

Needs no GPU. Run it only where a change of bytes is meant: with the record, the change is in the commit.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.make.artifacts import SOURCES, conversions_of, make_source, record


def main() -> None:
    """Record every conversion of every source, and say which differ from what was on record."""
    place = Path(sys.argv[1])
    before = json.loads(place.read_text())["cases"] if place.exists() else {}
    cases: dict[str, list[str]] = {}
    for name in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            src = make_source(name, Path(folder) / "source")
            for conversion, options in conversions_of(name):
                case = f"{name}/{conversion}"
                cases[case] = list(record(src, Path(folder) / "out", options))
                if before.get(case, cases[case]) != cases[case]:
                    print("differs:", case)
    lines = ",\n".join(f"  {json.dumps(case)}: {json.dumps(digests)}" for case, digests in cases.items())
    made = json.dumps({"torch": torch.__version__, "machine": platform.machine()})[1:-1]
    place.write_text(f'{{\n {made},\n "cases": {{\n{lines}\n }}\n}}\n')
    print(len(cases), "conversions on record")


if __name__ == "__main__":
    main()
