"""What every source is to a plan and to a conversion, whatever its experts lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from hqconv.io.protocols import CheckpointHeaders
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.decode_matrix import SourceMatrix


class SourceHeaders(CheckpointHeaders, Protocol):
    """A checkpoint, a folder with experts in GGUF files, or an artifact. A context manager that closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def map_experts(self) -> ExpertMap:
        """Its experts, and what becomes of every tensor. Raises RequestError or InputError for what is unclear."""
        ...

    def close(self) -> None:
        """Close the files that were read."""
        ...


class Source(SourceHeaders, Protocol):
    """One whose weights can be read."""

    reads_ahead: ClassVar[
        bool
    ]  # whether an expert is a number of byte ranges, which `read_raw` can fetch before

    def read_raw(self, raw: RawExperts, places: Iterable[tuple[TensorRef, int]]) -> None:
        """Read some of the buffer's ranges, each to its start; any thread may. Raises InputError.

        Only where `reads_ahead`.
        """
        ...

    def read_expert(
        self,
        block: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Projections of one expert, decoded, on `device`; any thread may. Raises InputError for unusable values.

        With `raw` nothing is read; what comes back may be views of it.
        """
        ...

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill a buffer with all of each tensor's bytes; what adjoins is read at once. Raises InputError."""
        ...

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill all of `buffer` with a tensor's bytes from byte `start` on; any thread may. Raises InputError."""
        ...
