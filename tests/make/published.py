"""Published models by their real names (tests/data/models): as sparse checkpoints, headers real and data holes."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hqconv.schemas.tensors import num_bits

DATA = Path(__file__).resolve().parents[1] / "data" / "models"
_SHARD_TENSORS = 30_000


@dataclass(frozen=True)
class Published:
    """One file: config.json's words, and rows [name template, dtype, shape, axes]; `expect` what hqconv should see."""

    name: str
    config: dict[str, Any]
    rows: list[list[Any]]
    expect: dict[str, Any] = field(default_factory=dict)
    hf_quant_config: dict[str, Any] | None = None

    def tensors(self) -> Iterator[tuple[str, str, list[int]]]:
        """Name, dtype and shape of every tensor."""
        for template, dtype, shape, *axes in self.rows:
            spans = {key: span(text) for key, text in (axes[0] if axes else {}).items()}
            for numbers in itertools.product(*spans.values()):
                yield template.format(**dict(zip(spans, numbers, strict=True))), dtype, shape


def span(text: str) -> list[int]:
    """The numbers of "0-3,7"."""
    bounds = [[int(x) for x in part.split("-")] for part in str(text).split(",")]
    return [n for one in bounds for n in range(one[0], one[-1] + 1)]


@functools.cache
def paths() -> tuple[Path, ...]:
    """All files: models of `real`, cases of `families`."""
    return tuple(sorted(DATA.rglob("*.json")))


def load(path: Path) -> Published:
    """A model's file."""
    words = json.loads(path.read_bytes())
    return Published(
        path.stem,
        words["config"],
        words["tensors"],
        words.get("expect") or {},
        words.get("hf_quant_config"),
    )


def write_sparse(model: Published, folder: Path) -> Path:
    """A checkpoint whose shards have the real headers, and no data."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    if model.hf_quant_config:
        (folder / "hf_quant_config.json").write_text(json.dumps(model.hf_quant_config))
    tensors = iter(model.tensors())
    weight_map: dict[str, str] = {}
    for number in itertools.count(1):
        part = list(itertools.islice(tensors, _SHARD_TENSORS))
        if not part:
            break
        shard = f"model-{number:05}.safetensors"
        write_shard(folder / shard, part)
        weight_map |= dict.fromkeys((name for name, *_ in part), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_shard(
    path: Path, tensors: list[tuple[str, str, list[int]]], data: Iterable[bytes] = ()
) -> None:
    """Write a safetensors file; where there is no data, a hole stands for it."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * num_bits(dtype) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data)
        file.truncate(8 + len(text) + end)
