"""Scaled-down twins of published models: their names, dtypes and config, small sizes, and bytes that are valid.

Legend: E experts, I intermediate size, H hidden size, of the experts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hqconv.models.families import FAMILIES
from hqconv.schemas.tensors import num_bits
from tests.make.published import Published, write_shard

NUM_EXPERTS = 4
_SMALL = 32  # of every dimension that is no expert's
_DIVISORS = (1, 2, 4, 8, 16, 32, 64, 128)
_LAYER = re.compile(r"(?:layers|blocks|mtp)\.([0-9]+)\.")
_EXPERT = re.compile(r"\.experts\.([0-9]+)\.")
_SIZE_KEYS = {
    key
    for family in FAMILIES
    for keys in (family.num_experts_keys, family.hidden_size_keys, family.intermediate_size_keys)
    for key in keys
}
_TOP_K_KEYS = {key for family in FAMILIES for key in family.top_k_keys}


@dataclass(frozen=True)
class Sizes:
    """Of a model's experts, old → new."""

    experts: tuple[int, int]
    hidden: tuple[int, int]
    inner: tuple[int, int]

    @classmethod
    def of(cls, num_experts: int, hidden: int, inner: int) -> Sizes:
        """Where H and I are the same, so are the new ones."""
        new = (256, 256) if hidden == inner else (512, 256)
        return cls((num_experts, min(num_experts, NUM_EXPERTS)), (hidden, new[0]), (inner, new[1]))


def write_twin(
    model: Published, folder: Path, sizes: Sizes | None, blocks: tuple[str, ...]
) -> Path:
    """A checkpoint with a few layers and experts of a model; without `sizes` of the sizes that it has.

    `blocks`: paths of the experts modules; two of them are kept, and the last.
    """
    folder.mkdir(parents=True)
    tensors = list(model.tensors())
    if sizes is not None:
        layers = {_layer_of(f"{name}.") for name in (*blocks[:2], blocks[-1])} | {None}
        tensors = [
            t for name, dtype, shape in tensors if (t := _scaled(name, dtype, shape, sizes, layers))
        ]
    config = model.config if sizes is None else _scaled_config(model.config, sizes)
    is_e8m0 = '"scale_fmt": "ue8m0"' in json.dumps(config)
    (folder / "config.json").write_text(json.dumps(config))
    if model.hf_quant_config:
        (folder / "hf_quant_config.json").write_text(json.dumps(model.hf_quant_config))
    write_shard(folder / "model.safetensors", tensors, _data(tensors, is_e8m0))
    return folder


def _layer_of(name: str) -> str | None:
    found = _LAYER.search(name)
    return found.group() if found else None


# --- names and sizes ---------------------------------------------------------------------------------------


def _scaled(
    name: str, dtype: str, shape: list[int], sizes: Sizes, layers: set[str | None]
) -> tuple[str, str, list[int]] | None:
    """The tensor as the twin has it; None where it has none such."""
    expert = _EXPERT.search(name)
    if _layer_of(name) not in layers or (expert and int(expert.group(1)) >= sizes.experts[1]):
        return None
    stacked = ".experts." in name or "moe" in name.split(".") or len(shape) >= 3
    is_expert = expert is not None or (
        stacked and "shared" not in name and not name.startswith("talker.")
    )
    if not is_expert:
        return name, dtype, [min(n, _SMALL) for n in shape]
    return name, dtype, _scaled_shape(name, shape, sizes)


def _scaled_shape(name: str, shape: list[int], sizes: Sizes) -> list[int]:
    """An expert's shape: each dimension the same part of I, H, 2 I or E as before."""
    lead: list[int] = []
    if len(shape) > 1 and shape[0] == sizes.experts[0] and ".experts." + "0" not in name:
        lead, shape = [sizes.experts[1]], shape[1:]
    order = (
        (sizes.hidden, sizes.inner)
        if re.search(r"down|w2|output_linear", name)
        else (sizes.inner, sizes.hidden)
    )
    for first, second in (order, order[::-1]):
        found = [_part(n, of) for n, of in zip(shape[:2], (first, second), strict=False)]
        if all(found):
            return [*lead, *(n for n in found if n), *shape[2:]]
    return [*lead, *shape]


def _part(n: int, of: tuple[int, int]) -> int | None:
    """What of the new size is the part that n is of the old one; a dimension of 1 stays."""
    old, new = of
    if n == 1:
        return 1
    whole = {2 * old: 2 * new} | {-(-old // d): -(-new // d) for d in reversed(_DIVISORS)}
    return whole.get(n) or {2 * old // d: 2 * new // d for d in _DIVISORS}.get(n)


def _scaled_config(value: Any, sizes: Sizes, key: str = "") -> Any:
    """config.json with the twin's sizes; lists hold one number per layer."""
    if isinstance(value, dict):
        return {k: _scaled_config(v, sizes, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_scaled_config(v, sizes, key) for v in value]
    if key in _TOP_K_KEYS and isinstance(value, int):
        return min(value, 2)
    if key in _SIZE_KEYS:
        return dict((sizes.hidden, sizes.inner, sizes.experts)).get(value, value)
    return value


# --- bytes -------------------------------------------------------------------------------------------------


def _data(tensors: list[tuple[str, str, list[int]]], is_e8m0: bool) -> Iterator[bytes]:
    """Random weights: floats of about 0.02, scales of some 2^-8, any codes; of the name and no seed.

    is_e8m0: float scales are powers of two.
    """
    shapes = {name: shape for name, _, shape in tensors}
    for name, dtype, shape in tensors:
        random = np.random.default_rng(sum(map(ord, name)))
        part = re.split(r"[._]proj[._]|\.", name)[-1]
        if dtype in ("BF16", "F16", "F32"):
            yield _floats(part, dtype, shape, random, is_e8m0)
        elif part.endswith("weight_shape"):
            packed = shapes[name.replace("weight_shape", "weight_packed")]
            rows, columns = packed[0], packed[1] * 8
            yield np.array([rows, columns], np.int64 if dtype == "I64" else np.int32).tobytes()
        elif part.endswith("g_idx"):
            yield (np.arange(shape[0]) // 128).astype(np.int32).tobytes()
        elif dtype == "F8_E8M0" or (dtype == "U8" and "scale" in part):
            yield random.integers(115, 124, shape, np.uint8).tobytes()
        elif dtype == "F8_E4M3" and "scale" in part:
            yield random.integers(0x20, 0x50, shape, np.uint8).tobytes()
        elif dtype == "F8_E4M3":
            magnitude, sign = (
                random.integers(0, 0x7F, shape, np.uint8),
                random.integers(0, 2, shape, np.uint8),
            )
            yield (magnitude | sign << 7).tobytes()
        else:
            yield random.bytes(math.prod(shape) * num_bits(dtype) // 8)


def _floats(
    part: str, dtype: str, shape: list[int], random: np.random.Generator, is_e8m0: bool
) -> bytes:
    values = random.standard_normal(shape, np.float32) * np.float32(0.02)
    if part.endswith(
        ("scale_2", "global_scale")
    ):  # gate's and up's are one, as calibration gives them
        values = np.full(shape, 2.0**-8, np.float32)
    elif "scale" in part:
        values = np.abs(values) / 4 + np.float32(2.0**-10)
        values = np.exp2(np.floor(np.log2(values))) if is_e8m0 else values
    elif "offset" in part:
        values = np.zeros(shape, np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if dtype == "F16" else np.float32).tobytes()
