"""What every source is to a conversion, whatever its experts lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

import torch

from hqconv.checkpoint.described import Described
from hqconv.decode.matrix import SourceMatrix
from hqconv.experts.block import ExpertBlock
from hqconv.experts.map import ExpertMap
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Source(Described, Protocol):
    """A checkpoint, a folder with experts in GGUF files, or an artifact. A context manager that closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def map_experts(self) -> ExpertMap:
        """Its experts, and what becomes of every tensor. Raises RequestError or InputError for what is unclear."""
        ...

    def read_expert(
        self, block: ExpertBlock, expert: int, roles: Sequence[str], device: torch.device
    ) -> dict[str, SourceMatrix]:
        """Projections of one expert, decoded, on `device`; any thread may. Raises InputError for unusable values."""
        ...

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill all of `buffer` with a tensor's bytes from byte `start` on; any thread may. Raises InputError."""
        ...

    def close(self) -> None:
        """Close the files that were read."""
        ...
