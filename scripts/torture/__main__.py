"""Torture: kills, faults, full disks, rivals and hostile files, until something is lost or everything has passed.

    python -m scripts.torture [SUITE ...] [--count N] [--seed 0] [--jobs 1] [--write FILE.md]

Runs the suites, all of them where none is named, at their full counts; prints each one's counts as JSON, in the end a
table. `--write` puts the rows into the table of docs/reliability.md. Exit code 1 on a failure. Takes Linux, a C
compiler, and `unshare -rm` for the small disks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.torture import configs, disks, faults, headers, kills, limits, manifests, several
from scripts.torture.place import Place
from scripts.torture.tally import Tally

BEGIN, END = "<!-- torture: begin -->", "<!-- torture: end -->"
HEAD = (
    "| suite | cases | what they were | failures | seed | date | seconds |",
    "| --- | ---: | --- | ---: | ---: | --- | ---: |",
)


class Suite(NamedTuple):
    """run(work, count, tally); a `Place` instead of the folder `work` as it needs, `mounts`: one that can mount.

    full: the count of `make torture`; small: of `make test`, 0 where other tests are its small form.
    """

    run: Callable[[Any, int, Tally], None]
    full: int
    small: int
    unit: str
    needs: str = "place"


SUITES = {
    "kills": Suite(kills.run, 1200, 8, "kills"),
    "faults": Suite(faults.run, 1900, 8, "failing calls"),
    "disks": Suite(disks.run, 200, 0, "conversions", "mounts"),
    "several": Suite(several.run, 150, 3, "places"),
    "limits": Suite(limits.run, 200, 5, "conversions"),
    "headers": Suite(headers.run, 1_000_000, 10_000, "mutants", "work"),
    "configs": Suite(configs.run, 40_000, 100, "mutants", "work"),
    "manifests": Suite(manifests.run, 2500, 40, "mutants", "work"),
}


def torture(name: str, count: int, seed: int) -> Tally:
    """Run one suite."""
    tally, suite = Tally(name, seed), SUITES[name]
    with tempfile.TemporaryDirectory(prefix=f"torture-{name}-") as folder:
        if suite.needs == "work":
            suite.run(Path(folder).resolve(), count, tally)
        else:
            with closing(Place(Path(folder).resolve(), in_mounts=suite.needs == "mounts")) as place:
                suite.run(place, count, tally)
    return tally


def rows(tallies: list[Tally]) -> list[str]:
    """A line of the table for each."""
    found = []
    for tally in tallies:
        counts = ", ".join(f"{kind}: {number}" for kind, number in sorted(tally.counts.items()))
        cases, failures = f"{tally.cases} {SUITES[tally.suite].unit}", len(tally.problems)
        day = date.today().isoformat()
        words = (tally.suite, cases, counts, failures, tally.seed, day, f"{tally.seconds:.0f}")
        found.append(f"| {' | '.join(map(str, words))} |")
    return found


def write(document: Path, lines: list[str]) -> None:
    """Put rows into the table between the marks of a document, in place of those of the same suites."""
    before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    of_suite = {
        line.split("|")[1].strip(): line
        for line in [*old.splitlines(), *lines]
        if line.startswith("|")
    }
    table = [*HEAD, *(of_suite[name] for name in SUITES if name in of_suite)]
    document.write_text("\n".join((before + BEGIN, *table, END + after)), encoding="utf-8")


def main() -> int:
    """Run, count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--count", type=int, help="cases of each suite (default: its full count)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="suites at the same time")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.md", help="put the rows into a document's table"
    )
    options = parser.parse_args()
    if unknown := {*options.suites} - SUITES.keys():
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")

    def one(name: str) -> Tally:
        count = SUITES[name].full if options.count is None else options.count
        tally = torture(name, count, options.seed)
        print(tally, flush=True)
        return tally

    with ThreadPoolExecutor(options.jobs) as pool:
        tallies = list(pool.map(one, options.suites or SUITES))
    lines = rows(tallies)
    print("\n".join((*HEAD, *lines)))
    if options.write is not None:
        write(options.write, lines)
    return 1 if any(tally.problems for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
