"""Cuts the power in conversions, at random moments, and finishes what is left: `python scripts/torture_power.py`.

`[--count 200] [--seed 0]`: how many cuts in each kind of conversion, and which. The conversions are small and run on
the CPU; what they ask of the disk is recorded, and a model of a disk says what a power cut may leave
(tests/make/disks.py).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.make.power import SCENARIOS, model, out_of_order, recorded
from tests.make.power_cuts import cuts


def run(count: int, seed: int) -> tuple[int, list[str]]:
    """`count` cuts in each kind of conversion: how many cases that was, and sentences on those that failed."""
    cases, failures = 0, list[str]()
    with tempfile.TemporaryDirectory(prefix="hqconv-power-") as folder:
        work = Path(folder)
        src = model(work / "src")
        for name in SCENARIOS:
            recording = recorded(work / "recorded", name, src, seed)
            cases += 1
            failures += [f"{name}: {one}" for one in out_of_order(recording)]
            for where, wrong in cuts(recording, work / "cuts", count, random.Random(f"{seed} {name}")):
                cases += 1
                failures += [f"{where}: {wrong}"] if wrong else []
    return cases, failures


def main() -> int:
    """Run as asked, and say what failed; 1 where anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="cuts in each kind of conversion")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases, failures = run(options.count, options.seed)
    print(f"{cases} cases, {len(failures)} failures (seed {options.seed})")
    for failure in failures[:20]:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
