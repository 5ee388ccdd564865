"""The checks of `hqconv verify`: values that all of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"
MAX_PER_KIND = 50  # findings listed of one kind; a damaged block has as many as it has experts


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, and what was expected and found there."""

    where: str
    what: str
    expected: str = ""
    found: str = ""


@dataclass
class CheckResult:
    """What one check found. `measured` is block → figures; `notes` say what was looked at and what was not."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    _num_of_kind: dict[str, int] = field(default_factory=dict, repr=False)
    _place_of_rest: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def status(self) -> str:
        """pass, fail or skipped."""
        if self.findings:
            return FAIL
        return SKIPPED if self.skipped else PASS

    def add(self, where: str, what: str, expected: object = "", found: object = "") -> None:
        """Note one finding. Of one kind (`what`) MAX_PER_KIND are listed, then one line counts the rest."""
        num_found = self._num_of_kind[what] = self._num_of_kind.get(what, 0) + 1
        if num_found <= MAX_PER_KIND:
            self.findings.append(Finding(where, what, str(expected), str(found)))
            return
        rest = Finding("…", what, "", f"{num_found - MAX_PER_KIND} more of this kind")
        place = self._place_of_rest.setdefault(what, len(self.findings))
        self.findings[place : place + 1] = [rest]
