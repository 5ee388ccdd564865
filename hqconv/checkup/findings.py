"""Findings of a check, and their grouping by layer and kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hqconv.errors import first_few


@dataclass(frozen=True)
class Finding:
    """One observation. kind: its name in docs/check.md. where: a tensor, or what else; "" for the expert's projection.

    is_damage: the checkpoint is surely wrong; else it is a notice. layer, role, expert: the matrix, if it is one's.
    """

    kind: str
    what: str
    expected: str = ""
    found: str = ""
    is_damage: bool = True
    where: str = ""
    layer: str = ""
    role: str = ""
    expert: int = -1


def grouped(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return JSON documents; findings of one kind in a projection of a layer, or beside the experts, are one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.kind, one.what, one.layer, one.role), []).append(one)
    documents = []
    for several in groups.values():
        first, experts = several[0], sorted({one.expert for one in several if one.expert >= 0})
        where = first_few([one.where for one in several if one.where])
        if len(experts) > 1 or (first.layer and not where):
            named = (
                f", expert{'s' * (len(experts) > 1)} {first_few([*map(str, experts)])}"
                if experts
                else ""
            )
            where = f"{first.layer}{named}{f', {first.role}' * bool(first.role)}"
        found = (
            first.found
            if len(experts) < 2 or not first.found
            else f"{first.found} (expert {first.expert})"
        )
        documents.append(
            {
                "kind": first.kind,
                "where": where,
                "what": first.what,
                "expected": first.expected,
                "found": found,
                "layer": first.layer,
                "projection": first.role,
                "experts": experts,
            }
        )
    return documents
