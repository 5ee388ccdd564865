"""Findings and results of checks, and comparisons of JSON documents that several checks share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hqconv.errors import HqconvError, plural, value_texts

MAX_ERROR = "max_error"  # the check of the limit that the user gave
PASS = "pass"
FAIL = "fail"
SKIPPED = "skipped"
OTHER_SOURCE = "The source is another one than the artifact was converted from."
NO_EXPERT = "No expert has the source's weights: the source is probably another model, or another version of it."
OF_ANOTHER_SOURCE = (OTHER_SOURCE, NO_EXPERT)  # other findings of a check follow from these
ERRORS_OF_WEIGHTS = (
    "Errors are those of weights, which a calibration makes larger for smaller ones of outputs"
)
MAX_PER_KIND = 50  # listed findings of one kind; a damaged layer has as many as it has experts


@dataclass(frozen=True)
class Finding:
    """One fault: its location, and the expected and found values."""

    where: str
    what: str
    expected: str = ""
    found: str = ""


@dataclass
class CheckResult:
    """Result of one check. `measured`: layer → figures; `notes`: the extent of the check, and what it left out."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    _num_of_kind: dict[str, int] = field(default_factory=dict, repr=False)
    _place_of_rest: dict[str, int] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        """Name the check, its status and the number of findings."""
        return f"<CheckResult {self.name}: {self.status}, {plural(len(self.findings), 'finding')}>"

    @property
    def status(self) -> str:
        """Outcome of the check: pass, fail or skipped."""
        if self.findings:
            return FAIL
        return SKIPPED if self.skipped else PASS

    def add_error(self, error: HqconvError, prefix: str = "") -> None:
        """Add an error as a finding. prefix: what its location is of."""
        self.add(f"{prefix}{error.where}", error.what, error.expected, error.found)

    def put_first(self, finding: Finding) -> None:
        """Put a finding before all others, which follow from it."""
        self.findings.insert(0, finding)
        self._place_of_rest = {what: place + 1 for what, place in self._place_of_rest.items()}

    def add(self, where: str, what: str, expected: object = "", found: object = "") -> None:
        """Add one finding. Of one kind (`what`) MAX_PER_KIND are listed, then one line counts the rest."""
        num_found = self._num_of_kind[what] = self._num_of_kind.get(what, 0) + 1
        if num_found <= MAX_PER_KIND:
            self.findings.append(Finding(where, what, *value_texts(expected, found)))
            return
        rest = Finding("…", what, "", f"{num_found - MAX_PER_KIND} more of this kind")
        place = self._place_of_rest.setdefault(what, len(self.findings))
        self.findings[place : place + 1] = [rest]


def compare_dicts(
    where: str, what: str, expected: Mapping[str, Any], found: Any, result: CheckResult
) -> None:
    """Compare two JSON objects key by key; one finding for each key that differs."""
    if not isinstance(found, dict):
        result.add(where, what, "a JSON object", json.dumps(found))
        return
    for key in sorted(expected.keys() | found.keys()):
        values = expected.get(key), found.get(key)
        if values[0] != values[1] and all(isinstance(value, float) for value in values):
            result.add(f"{where}: {key}", what, *values)
            continue
        texts = [
            json.dumps(w[key], sort_keys=True) if key in w else "no such key"
            for w in (expected, found)
        ]
        if texts[0] != texts[1]:
            result.add(f"{where}: {key}", what, *texts)


@dataclass
class VerificationReport:
    """Report of a verification. `passed` is True only if no check has findings and at least one ran.

    source: name that the caller gave for the source. Of an artifact that could be opened: the commit of one on the
    Hub, the SHA-256 of its manifest, and its warnings.
    """

    root: Path
    source: str | None
    commit: str | None = None
    manifest_sha256: str | None = None
    warnings: tuple[str, ...] = ()
    results: list[CheckResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Name the artifact and the status of each check."""
        checks = (
            ", ".join(f"{result.name} {result.status}" for result in self.results) or "no check ran"
        )
        return f"<VerificationReport {str(self.root)!r}: {'passed' if self.passed else 'failed'} ({checks})>"

    @property
    def passed(self) -> bool:
        ran = [r for r in self.results if not r.skipped or r.findings]
        return bool(ran) and all(r.status != FAIL for r in ran)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        checks = {
            r.name: {
                "status": r.status,
                "seconds": round(self.seconds.get(r.name, 0.0), 3),
                "skipped_because": r.skipped,
                "notes": r.notes,
                "findings": [asdict(f) for f in r.findings],
                "measured": r.measured,
            }
            for r in self.results
        }
        return {
            "kind": "report",
            "source": self.source,
            "artifact": str(self.root),
            "commit": self.commit,
            "manifest_sha256": self.manifest_sha256,
            "warnings": list(self.warnings),
            "passed": self.passed,
            "checks": checks,
        }
