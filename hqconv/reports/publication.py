"""The result of `hqconv publish`: a conversion, its verification, and the push of the artifact."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hqconv.conversion.convert import ConversionReport
    from hqconv.conversion.push import PushReport
    from hqconv.verification.result import VerificationReport


@dataclass(frozen=True, repr=False)
class PublishReport:
    """The result of a publication.

    source: name and commit. commit: of the branch that holds the artifact; None if nothing was published. converted,
    verified, pushed: the reports of the steps that ran. over_max_error: projections above the error limit, the worst
    first. was_published: the repo held the artifact of this request and source before, and no step ran.
    """

    source: dict[str, Any]
    repo: str
    branch: str | None
    commit: str | None
    manifest_sha256: str
    was_published: bool = False
    out: Path | None = None
    converted: ConversionReport | None = None
    verified: VerificationReport | None = None
    pushed: PushReport | None = None
    over_max_error: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if the repo holds the artifact, and no error is above the limit."""
        return self.commit is not None and not self.over_max_error

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        steps = {"converted": self.converted, "verified": self.verified, "pushed": self.pushed}
        return {
            "kind": "publication",
            "source": self.source,
            "out": None if self.out is None else str(self.out),
            "repo": self.repo,
            "branch": self.branch,
            "commit": self.commit,
            "manifest_sha256": self.manifest_sha256,
            "was_published": self.was_published,
            "passed": self.passed,
            "over_max_error": self.over_max_error,
            **{name: None if report is None else report.to_dict() for name, report in steps.items()},
        }

    def __repr__(self) -> str:
        state = "published before" if self.was_published else "published" if self.passed else "not published"
        return f"PublishReport({self.source['name']!r}, {self.repo!r}, commit {self.commit}, {state})"
