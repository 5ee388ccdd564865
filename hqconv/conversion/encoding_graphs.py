"""CUDA graphs of encodings: all kernels of a batch in one launch.

Torch gives up Python's lock at every operation and has to get it back, beside threads that read and write; a batch has
over a hundred operations. Only encodings that depend on the bytes of the batch alone are captured
(`encode_batch.is_pure`), and only if a replay gives the bytes of the operations themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.conversion.encode_batch import Batch, EncodedTensors
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.moe_layer import MoeLayer, TensorSlice
from hqconv.planning.output_units import MoeLayerPlan

_LOG = logging.getLogger(__name__)
_MAX_GRAPHS = 8  # of a lane; batches of further shapes are encoded without one

EncodeOnDevice = Callable[[Batch, RawExperts], EncodedTensors]


@dataclass(frozen=True, eq=False)
class EncodingGraph:
    """A captured encoding. raw: its input; results: the bytes of all outputs, one after the other; both stay in place.

    encoded: of the batch that was captured, for the shapes and names of the outputs.
    """

    graph: torch.cuda.CUDAGraph
    raw: torch.Tensor
    results: torch.Tensor
    sizes: list[int]
    encoded: EncodedTensors

    def copy_in(self, raw: RawExperts) -> None:
        """Start to copy the bytes of a batch of the same shapes."""
        self.raw.copy_(raw.buffer[: len(self.raw)], non_blocking=True)

    def replay(self, batch: Batch) -> EncodedTensors:
        """Start to encode the batch whose bytes were copied last; its outputs come in `results`."""
        self.graph.replay()
        done = replace(self.encoded.done, layer=batch.planned.layer, experts=batch.experts)
        return self.encoded._replace(done=done)


class EncodingGraphs:
    """The graphs of one lane, by all that decides an encoding but the bytes. All calls come on the lane's stream."""

    def __init__(self, encode: EncodeOnDevice) -> None:
        self._encode = encode
        self._seen: set[str] = set()
        self._graphs: dict[str, EncodingGraph | None] = {}  # None where there can be none
        self._keys: dict[int, tuple[MoeLayerPlan, str]] = {}  # by the id of a plan, which is kept
        self._pool: Any = None

    def find(self, batch: Batch, raw: RawExperts) -> EncodingGraph | None:
        """Return the graph for a batch; None where the batch must be encoded by the operations themselves.

        That is so for the first batch of its shapes, which compiles kernels and copies tables. The second one is
        captured, and encoded both ways: the graph is kept if their bytes are equal.
        """
        key = self._key(batch)
        if key not in self._seen:
            self._seen.add(key)
            return None
        if key not in self._graphs:
            is_full = len(self._graphs) >= _MAX_GRAPHS
            self._graphs[key] = None if is_full else self._captured(batch, raw)
        return self._graphs[key]

    def _key(self, batch: Batch) -> str:
        planned, layer, layout = batch.planned, batch.planned.layer, batch.layout
        if id(planned) not in self._keys:
            stored = [(part.dtype, part.shape, part.view, part.is_flat, part.is_stacked) for part in _weights(layer)]
            decided = (planned.encoding, planned.forms, planned.slices, layer.roles, stored, layer.format)
            self._keys[id(planned)] = planned, repr(decided)
        refs = {role: layer.sources[batch.experts[0]][role]["weight"] for role in layer.roles}
        places = [(ref.dtype, ref.shape, layout.start_of_stack(role, "weight")) for role, ref in refs.items()]
        return f"{len(batch.experts)} {layout.num_bytes} {places} {self._keys[id(planned)][1]}"

    def _captured(self, batch: Batch, raw: RawExperts) -> EncodingGraph | None:
        """Capture the encoding of a batch, and compare a replay with it. None where CUDA refuses or bytes differ."""
        try:
            found = self._capture(batch, raw)
            found.copy_in(raw)
            found.replay(batch)
            expected = self._encode(batch, RawExperts(raw.layout, found.raw))
            is_same = torch.equal(found.results, _joined(expected.outputs))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            _LOG.info("Batches of this shape are encoded without a CUDA graph: %s", str(error).partition("\n")[0])
            return None
        if not is_same:
            _LOG.warning("A CUDA graph gave other bytes than its operations; it is not used.")
        return found if is_same else None

    def _capture(self, batch: Batch, raw: RawExperts) -> EncodingGraph:
        torch.cuda.empty_cache()  # a capture takes new memory, and cannot free any
        here = torch.empty(raw.layout.num_bytes, dtype=torch.uint8, device=torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # its graphs never run at the same time
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads pin memory
        try:
            encoded = self._encode(batch, RawExperts(raw.layout, here))
            results = _joined(encoded.outputs)
        finally:
            graph.capture_end()
        sizes = [one.numel() * one.element_size() for one in encoded.outputs]
        # Only shapes are needed from now on: the memory of the outputs is for the next graph of the pool.
        shapes = [torch.empty_like(one, device="meta") for one in encoded.outputs]
        measured = shapes[1 : len(encoded.done.measured) + 1]
        return EncodingGraph(
            graph, here, results, sizes, encoded._replace(done=replace(encoded.done, measured=measured), outputs=shapes)
        )


def _weights(layer: MoeLayer) -> list[TensorSlice]:
    return [layer.parts[role]["weight"] for role in layer.roles]


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of the tensors, one after the other."""
    flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    joined = flat[0].new_empty(sum(map(len, flat)))
    end = 0
    for one in flat:
        joined[end : end + len(one)].copy_(one)
        end += len(one)
    return joined
