"""Static activation scales: the source's, reduced to one per GEMM of a layer, written to every rank file."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from hqconv.errors import InputError
from hqconv.formats.encoding import usable_scales
from hqconv.formats.source_format import LAID_OUT
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.plan import ConversionPlan
from hqconv.schemas.tensors import TensorRef, torch_dtype

InputScales = Mapping[str, float]  # GEMM → scale, a float32

_REMEDY = "Calibrate the model again, or use an input schema whose scales are found while serving."
_NUM_THREADS = 16  # for many small reads at once


class _LayerScales(Mapping[str, InputScales]):
    """The scales of layers, read at the first access: files of the Hub are fetched one by one."""

    def __init__(self, source: Source, plan: ConversionPlan) -> None:
        self._source = source
        self._layers = {layer.name: layer for layer in plan.spec.static_layers(plan.experts)}
        self._scales: dict[str, InputScales] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> InputScales:
        layer = self._layers[name]
        with self._lock:
            if name not in self._scales:
                with ThreadPoolExecutor(_NUM_THREADS, "hqconv-scales") as pool:
                    self._scales[name] = reduce_scales(self._source, layer, pool)
            return self._scales[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def read_input_scales(source: Source, plan: ConversionPlan) -> Mapping[str, InputScales]:
    """Return layer → scales, of the layers that carry them. Raises InputError as `reduce_scales`.

    Of a source on the Hub they are read, and refused, at the first access.
    """
    scales = _LayerScales(source, plan)
    return scales if source.listing is not None else dict(scales)


def reduce_scales(source: Source, layer: MoeLayer, pool: ThreadPoolExecutor) -> InputScales:
    """Return each GEMM's scale as Humming reduces it: the maximum over all experts of the layer, gate and up together.

    Stored inverses are inverted before, in float32. So the scale is the same for every TP and EP. A scale of 0 is that
    of an expert that calibration never used. Raises InputError for a scale that is negative or not finite, where there
    are no others than 0, and where the ranks of an artifact have different scales.
    """
    reduced = {}
    read = partial(_read_scale, source, divides=layer.input_scales.divides)
    for gemm, refs in layer.input_scales.refs.items():
        scales = list(pool.map(read, refs))
        reduced[gemm] = max(scales)
        if layer.format.of("w2").encoding == LAID_OUT and min(scales) != reduced[gemm]:
            raise InputError(
                "The ranks of an artifact have different scales of activations.",
                where=f"{layer.name}: {gemm}",
                remedy="Verify the artifact.",
            )
        if not reduced[gemm]:
            raise InputError(
                "No static activation scale is above zero: calibration used no expert.",
                where=f"{layer.name}: {gemm}",
                remedy=_REMEDY,
            )
    return reduced


def _read_scale(source: Source, ref: TensorRef, *, divides: bool) -> float:
    """Read the largest scale of a tensor, which may hold inverses."""
    data = torch.empty(ref.num_bytes, dtype=torch.uint8)
    source.read_into(ref, data.numpy().data)
    stored = data.view(torch_dtype(ref.dtype)).float()
    scales: list[float] = (stored.reciprocal() if divides else stored).tolist()
    if not all(math.isfinite(scale) and scale >= 0 for scale in scales):
        raise InputError(
            "A static activation scale is not usable.",
            where=f"tensor {ref.name}",
            expected=usable_scales(divides=divides),
            found=stored.tolist(),
            remedy=_REMEDY,
        )
    return max(scales)
