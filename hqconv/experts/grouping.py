"""Sorts a checkpoint's tensors into blocks by their names, without matching every name by itself."""

from __future__ import annotations

from collections.abc import Mapping

from hqconv.experts.checks import Found
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
        might_be = "expert" in name or "moe" in name or looks_like_expert(name, len(ref.shape))
        if might_be and not groups.takes(name, ref) and looks_like_expert(name, len(ref.shape)):
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
        self._role_of = {name: role for role, name in family.projections.items()}
        self._indices: dict[str, int] = {}
        self._endings: dict[str, tuple[str, str]] = {}  # → role and part
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
        role, part = place
        roles = self._experts.get(index)
        if roles is None:
            roles = self._experts[index] = {}
        parts = roles.get(role)
        if parts is None:
            parts = roles[role] = {}
        parts[part] = ref
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
        role = self._role_of[projection]
        found.experts.setdefault(int(word), {}).setdefault(role, {})[part] = ref
        self._start, self._experts = f"{block}.", found.experts
        self._indices[word] = int(word)
        self._endings[f"{projection}.{part}"] = (role, part)
        return True
