"""Output safetensors files: their headers, and where in them every tensor goes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.schemas.dtypes import num_bits
from hqconv.schemas.tensors import TensorRef, TensorSpec


@dataclass(frozen=True)
class OutFile:
    """One output file: its path in the artifact, its header, ready to write, and the places of its tensors."""

    path: str
    header: bytes
    size_bytes: int
    tensors: dict[str, TensorRef]


def build_file(
    path: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str], number: int = 0
) -> OutFile:
    """Lay out a safetensors file: widest dtypes first, so that every tensor is aligned; header padded to 8.

    `number` is the file's place among those that are finished together, which its refs have.
    """
    ordered = sorted(specs, key=lambda spec: -num_bits(spec.dtype))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    places: list[tuple[int, int]] = []
    end = 0
    for spec in ordered:
        begin, end = end, end + spec.num_bytes
        places.append((begin, end))
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors = {
        spec.name: TensorRef(
            spec.name, spec.dtype, tuple(spec.shape), number, len(header) + begin, end - begin
        )
        for spec, (begin, end) in zip(ordered, places, strict=True)
    }
    return OutFile(path, header, len(header) + end, tensors)
