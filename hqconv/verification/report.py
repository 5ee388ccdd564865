"""What a verification found, as values and as JSON words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hqconv.verification.result import FAIL, CheckResult


@dataclass
class VerificationReport:
    """The outcome. `passed` is True only if no check found anything and at least one ran. `source`: what it was held
    against, as the caller named it. Of an artifact that could be opened: the commit of one on the Hub, the SHA-256 of
    its manifest, and its warnings.
    """

    root: Path
    source: str | None = None
    commit: str | None = None
    manifest_sha256: str | None = None
    warnings: tuple[str, ...] = ()
    results: list[CheckResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        ran = [r for r in self.results if not r.skipped or r.findings]
        return bool(ran) and all(r.status != FAIL for r in ran)

    def words(self) -> dict[str, Any]:
        """The report as JSON words."""
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
