"""A source with some of its experts: every reader sees a checkpoint from which the others were pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from hqconv.io.fetch_folder import FetchFolder
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.pruning import APART, BEHIND, keep_experts
from hqconv.models.source_protocol import Source
from hqconv.schemas.kept_experts import Selection
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.decode_matrix import SourceMatrix


class SelectedSource:
    """A source with the kept experts only; see `source_protocol.Source`.

    Tensors keep the source's names, also those of experts, whose new numbers are only positions in a layer. Routers and
    other tensors with an entry for each expert have the entries of the kept ones.
    """

    def __init__(self, source: Source, selection: Selection) -> None:
        """Select the experts of an opened source. Raises RequestError as `keep_experts`."""
        self._source = source
        experts = source.map_experts()
        pruned = keep_experts(experts, source.tensors, source.config, selection)
        self._layers = {layer.name: layer for layer in experts.layers}
        self._experts = pruned.experts
        self.root, self.place, self.name = source.root, source.place, source.name
        self.repo_id, self.revision = source.repo_id, source.revision
        self.config, self.quantization = pruned.config, source.quantization
        self.files, self.metadata, self.index_sha256 = source.files, source.metadata, source.index_sha256
        self.loose, self.other_files = source.loose, source.other_files
        self.made = source.made
        self.total_bytes, self.guard, self.listing = source.total_bytes, source.guard, source.listing
        self.sorted_layers = source.sorted_layers
        self._cut = pruned.cut
        self.tensors = source.tensors | {one.ref.name: one.ref for one in pruned.cut}

    @property
    def reads_ahead(self) -> bool:
        """Return True if `read_raw` can fetch the bytes of experts before they are decoded."""
        return self._source.reads_ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def map_experts(self) -> ExpertMap:
        """Return the map of the kept experts."""
        return self._experts

    def make_files(self) -> tuple[dict[str, bytes], str]:
        """Make the source's files."""
        return self._source.make_files()

    def is_here(self, name: str) -> bool:
        """Return True if a file is on this machine."""
        return self._source.is_here(name)

    def fetch(
        self, names: Iterable[str], check: Callable[[], None] | None = None, into: FetchFolder | None = None
    ) -> None:
        """Download missing files of a repo."""
        self._source.fetch(names, check, into)

    def forget(self, name: str) -> None:
        """Read a file of a repo from the Hub again."""
        self._source.forget(name)

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill a buffer with a tensor's bytes from byte `start` on; of a cut tensor, with its kept entries."""
        if ref.offset_bytes < BEHIND:
            self._source.read_into(ref, buffer, start)
            return
        place, within = divmod(ref.offset_bytes - BEHIND, APART)
        whole, kept, _ = self._cut[place]
        view, size = memoryview(buffer).cast("B"), whole.num_bytes // kept.count
        begin = within + start
        entries = kept.experts[begin // size : -(-(begin + len(view)) // size)]
        first = min(entries, default=0)
        data = bytearray((max(entries, default=-1) + 1 - first) * size)  # at once: the entries may be on the Hub
        self._source.read_into(whole, data, first * size)
        chosen = b"".join(memoryview(data)[(one - first) * size : (one - first + 1) * size] for one in entries)
        view[:] = chosen[begin % size : begin % size + len(view)]

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor."""
        plain = []
        for ref, buffer in pieces:
            if ref.offset_bytes < BEHIND:
                plain.append((ref, buffer))
            else:
                self.read_into(ref, buffer)
        self._source.read_all_into(plain)

    def read_raw(self, raw: RawExperts, places: Iterable[tuple[TensorRef, int]]) -> None:
        """Read byte ranges of experts into the buffer."""
        self._source.read_raw(raw, places)

    def read_expert(
        self, layer: MoeLayer, expert: int, roles: Sequence[str], device: torch.device, raw: RawExperts | None = None
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one kept expert."""
        of_all = self._layers[layer.name]
        assert layer.kept is not None, "a layer of another source"
        return self._source.read_expert(of_all, layer.kept.experts[expert], roles, device, raw)


def select_experts(source: Source, selection: Selection | None) -> Source:
    """Return the source with some of its experts, or as it is. Raises RequestError as `keep_experts`."""
    return source if selection is None else SelectedSource(source, selection)
