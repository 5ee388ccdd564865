"""Sorts a checkpoint's tensors into blocks by their names, without matching every name by itself."""

from __future__ import annotations

from collections.abc import Mapping

from hqconv.experts.checks import Found, check_once
from hqconv.experts.names import looks_like_expert, name_pattern
from hqconv.schemas.families import Family
from hqconv.schemas.tensors import TensorRef


def group(family: Family, tensors: Mapping[str, TensorRef]) -> tuple[dict[str, Found], list[str]]:
    """block name → its tensors, and the names that look like an expert's and matched nothing."""
    groups = Groups(family)
    unmatched = []
    for name, ref in tensors.items():
        if groups.takes_known(name, ref):
            continue
        if "expert" not in name and "moe" not in name and not looks_like_expert(name, len(ref.shape)):
            continue
        if groups.takes(name, ref) or name.startswith(family.other_models):
            continue
        if looks_like_expert(name, len(ref.shape)):
            unmatched.append(name)
    return groups.found, unmatched


class Groups:
    """Blocks and their tensors so far.

    A name of a single expert is a block, an index and an ending, with dots between. Whether it matches depends on each
    of them alone: names made of three that have matched need no regular expression.

    found: block name → its tensors.
    """

    def __init__(self, family: Family) -> None:
        self.found: dict[str, Found] = {}
        self._match = name_pattern(family).fullmatch
        self._roles_of: dict[str, tuple[str, ...]] = {
            name: (role,) for role, name in family.projections.items()
        }
        self._roles_of |= {stack.name: stack.roles for stack in family.expert_stacks}
        self._indices: dict[str, int] = {}
        self._endings: dict[str, tuple[tuple[str, ...], str]] = {}  # → roles and part
        self._start = "\0"  # of the last block's names; no name begins like this
        self._experts: dict[int, dict[str, dict[str, TensorRef]]] = {}  # of the last block

    def takes_known(self, name: str, ref: TensorRef) -> bool:
        """Whether this is a tensor of the last block, with an index and an ending that are known; it is kept."""
        if not name.startswith(self._start):
            return False
        word, _, ending = name[len(self._start) :].partition(".")
        place, index = self._endings.get(ending), self._indices.get(word)
        if place is None or index is None:
            return False
        roles = self._experts.get(index)
        if roles is None:
            roles = self._experts[index] = {}
        for role in place[0]:
            parts = roles.get(role)
            if parts is None:
                parts = roles[role] = {}
            if (first := parts.setdefault(place[1], ref)) is not ref:
                check_once(self._start[:-1], ref, first)
        return True

    def takes(self, name: str, ref: TensorRef) -> bool:
        """Whether the name is one of the family's; the tensor is kept."""
        matched = self._match(name)
        if matched is None:
            return False
        block, word, projection, part, *stack = matched.groups()
        found = self.found.setdefault(block, Found())
        if word is None:
            found.stacks.setdefault(stack[0], {})[stack[1] or "weight"] = ref
            return True
        roles = found.experts.setdefault(int(word), {})
        for role in self._roles_of[projection]:
            check_once(block, ref, roles.setdefault(role, {}).setdefault(part, ref))
        self._start, self._experts = f"{block}.", found.experts
        self._indices[word] = int(word)
        self._endings[f"{projection}.{part}"] = (self._roles_of[projection], part)
        return True
