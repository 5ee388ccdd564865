"""Static activation scales: the source's, reduced to one per GEMM of a layer, written to every rank file."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from hqconv.errors import InputError
from hqconv.formats.encoding import usable_scales
from hqconv.formats.source_format import LAID_OUT
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.plan import ConversionPlan
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef

InputScales = Mapping[str, float]  # GEMM → scale, a float32

_REMEDY = "Calibrate the model again, or use an input schema whose scales are found while serving."
_NUM_THREADS = 16  # for many small reads at once


class _LazyScales(Mapping[str, InputScales]):
    """The scales of layers whose files are fetched from the Hub one by one: read at the first access."""

    def __init__(self, source: Source, layers: Iterable[MoeLayer]) -> None:
        self._source, self._layers = source, {layer.name: layer for layer in layers}
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
    layers = plan.spec.static_layers(plan.experts)
    if source.listing is not None:
        return _LazyScales(source, layers)
    if not layers:
        return {}
    with ThreadPoolExecutor(_NUM_THREADS, "hqconv-scales") as pool:
        return {layer.name: reduce_scales(source, layer, pool) for layer in layers}


def reduce_scales(source: Source, layer: MoeLayer, pool: ThreadPoolExecutor) -> InputScales:
    """Return each GEMM's scale as Humming reduces it: the maximum over all experts of the layer, gate and up together.

    Stored inverses are inverted before, in float32. So the scale is the same for every TP and EP. A scale of 0 is that
    of an expert that calibration never used. Raises InputError for a scale that is negative or not finite, where there
    are no others than 0, and where the ranks of an artifact have different scales.
    """
    reduced = {}
    for gemm, refs in layer.input_scales.refs.items():
        scales = list(
            pool.map(lambda ref: _read_scale(source, ref, divides=layer.input_scales.divides), refs)
        )
        if layer.format.of("w2").encoding == LAID_OUT and len(set(scales)) > 1:
            what = "The ranks of an artifact have different scales of activations."
            where = f"{layer.name}: {gemm}"
            raise InputError(
                what, where=where, found=str(sorted(set(scales))), remedy="Verify the artifact."
            )
        reduced[gemm] = max(scales)
        if not reduced[gemm]:
            raise InputError(
                "No static activation scale is above zero: calibration used no expert.",
                where=f"{layer.name}: {gemm}",
                expected="a number above zero of one expert at least",
                found=f"{len(scales)} scales of 0, {refs[0].name} the first",
                remedy=_REMEDY,
            )
    return reduced


def _read_scale(source: Source, ref: TensorRef, *, divides: bool) -> float:
    """Read the largest scale of a tensor, which may hold inverses."""
    data = torch.empty(ref.num_bytes, dtype=torch.uint8)
    source.read_into(ref, data.numpy().data)
    stored = data.view(torch_dtype(ref.dtype)).float()
    values: list[float] = (stored.reciprocal() if divides else stored).tolist()
    pairs = zip(stored.tolist(), values, strict=True)
    wrong = next((one for one, value in pairs if not (math.isfinite(value) and value >= 0)), None)
    if wrong is not None:
        raise InputError(
            "A static activation scale is not usable.",
            where=f"tensor {ref.name}",
            expected=usable_scales(divides=divides),
            found=wrong,
            remedy=_REMEDY,
        )
    return max(values)
