"""Doubts about gate and up of each expert in families whose stacks alternate their rows.

A writer that did not know this cut the stack in halves, so that "gate" and "up" each hold rows of both in turns, as
llm-compressor did until its pull request 3100. Names and shapes are those of a right cut.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hqconv.formats.source_format import KNOWN_BY_SOURCE
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.tensors import TensorRef

ReadInto = Callable[[TensorRef, bytearray], None]  # fills a buffer with a tensor's bytes

_HALVED_BY = (
    "0.16.",
    "0.17.",
    "0.18.",
)  # compressed-tensors' versions beside llm-compressor's that cut in halves
_NUM_EXPERTS, _FAR = 8, 6.0  # experts that are looked at; standard errors that no chance explains
_CODES = {"F32": "f", "F16": "e", "BF16": "f"}


def is_in_doubt(layer: MoeLayer) -> bool:
    """Return True if a layer has gate and up apart in a family whose stacks alternate them."""
    row = BY_NAME.get(layer.family)
    if layer.format.of("w2").encoding in KNOWN_BY_SOURCE or row is None:
        return False
    is_apart = not any(
        part.is_stacked or part.view.count > 1 for part in layer.parts["w3"].values()
    )
    return is_apart and any(stack.interleaved for stack in row.stacks)


def halves_warnings(layers: Sequence[MoeLayer], quantization: Any) -> tuple[str, ...]:
    """Warn of gate and up that a writer may have cut in halves, by the config's version."""
    names = [layer.name for layer in layers if is_in_doubt(layer)]
    if not names:
        return ()
    version = str((quantization or {}).get("version", ""))
    known = (
        f" compressed-tensors {version}, which wrote it, came with such a writer."
        * version.startswith(_HALVED_BY)
    )
    return (
        f"gate and up of {names[0]} are tensors of their own, and in the family's stacks their rows alternate: a "
        f"writer that cut stacks in halves gave each of them rows of both, under the same names.{known} "
        "Compare with the original: hqconv verify --source ORIGINAL.",
    )


def halves_notices(read_into: ReadInto, layers: Sequence[MoeLayer]) -> list[str]:
    """Warn of a gate whose even and odd rows have biases of different kinds: then they are gate's and up's in turns."""
    for layer in [layer for layer in layers if is_in_doubt(layer) and layer.has_bias][:2]:
        even, odd = list[float](), list[float]()
        for expert in range(min(_NUM_EXPERTS, layer.num_experts)):
            values = _numbers(read_into, layer.sources[expert]["w1"]["bias"])
            even += values[0::2]
            odd += values[1::2]
        if max(_distance(even, odd), _distance([*map(abs, even)], [*map(abs, odd)])) > _FAR:
            return [
                f"even and odd rows of {layer.name}'s gate have biases of different kinds: a writer seems to have cut "
                "alternating rows of gate and up in halves. Convert the original checkpoint, or one that was written "
                "anew by a current llm-compressor."
            ]
    return []


def _numbers(read_into: ReadInto, ref: TensorRef) -> list[float]:
    data = bytearray(ref.num_bytes)
    read_into(ref, data)
    if ref.dtype == "BF16":
        data = bytearray(
            byte for pair in zip(data[0::2], data[1::2], strict=True) for byte in (0, 0, *pair)
        )
    code = _CODES[ref.dtype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far two means are apart, in standard errors."""
    from statistics import fmean, pvariance  # not needed for other families

    error = math.sqrt(pvariance(one) / len(one) + pvariance(other) / len(other))
    return abs(fmean(one) - fmean(other)) / error if error else 0.0
