"""Where every expert's bytes are, kept so that a look at a million tensors needs little memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hqconv.experts.block import Parts, PartSource
from hqconv.schemas.tensors import TensorRef


@dataclass(frozen=True)
class OwnTensors:
    """`ExpertBlock.sources` of experts with tensors of their own.

    columns: role → part → every expert's tensor. Dicts for each expert would take more memory than the tensors.
    """

    columns: Mapping[str, Mapping[str, tuple[TensorRef, ...]]]

    def __len__(self) -> int:
        return len(next(iter(self.columns["w2"].values())))

    def __getitem__(self, expert: int, /) -> dict[str, Parts]:
        return {
            role: {part: refs[expert] for part, refs in of_role.items()}
            for role, of_role in self.columns.items()
        }

    def __iter__(self) -> Iterator[dict[str, Parts]]:
        return (self[expert] for expert in range(len(self)))

    def names(self) -> Iterator[str]:
        """Every tensor's name, expert by expert."""
        columns = [refs for of_role in self.columns.values() for refs in of_role.values()]
        return (ref.name for of_expert in zip(*columns, strict=True) for ref in of_expert)


@dataclass(frozen=True)
class StackShares:
    """`ExpertBlock.sources` of experts in stacks, each worked out when it is first asked for: a look asks for few.

    parts: role → part → the stack that holds it. tensors: by name. count: of experts.
    """

    parts: Mapping[str, Mapping[str, PartSource]]
    tensors: Mapping[str, TensorRef]
    count: int
    _known: dict[int, dict[str, Parts]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, expert: int, /) -> dict[str, Parts]:
        if expert not in self._known:
            place = range(self.count)[expert]
            self._known[expert] = {
                role: {
                    part: one.ref(self.tensors[one.template], place, self.count)
                    for part, one in of_role.items()
                }
                for role, of_role in self.parts.items()
            }
        return self._known[expert]

    def __iter__(self) -> Iterator[dict[str, Parts]]:
        return (self[expert] for expert in range(self.count))
