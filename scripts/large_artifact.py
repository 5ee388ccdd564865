"""A large artifact from a small one: its layers again and again, as whole files, under the names of further layers.

    python scripts/large_artifact.py SMALL OUT --layers 48

The result is an artifact like any other: `hqconv inspect` and `verify` (without a source) take it, vLLM serves it. Its
bytes are written anew, nothing is linked, so a start reads all of them. For measurements of starts, where the model in
16 bits would not fit (check_serving.py split). SMALL: kernel layout, all layers of the same kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.artifact.manifest import FileEntry, read_manifest, sealed
from hqconv.artifact.sha256sums import sums_bytes
from hqconv.schemas import artifact_names as names

LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
CHUNK = 16 << 20
Json = dict[str, Any]


def grow(small: Path, out: Path, num_layers: int) -> int:
    """Write the artifact `out` with this many layers; returns its bytes."""
    manifest = read_manifest(small, is_sealed=True)
    assert manifest.is_kernel, "the kernel layout"
    old: Json = json.loads((small / names.MANIFEST).read_text(encoding="utf-8"))
    count = len(old["blocks"])
    assert [one["layer"] for one in old["blocks"].values()] == list(range(count)), "every layer has experts"
    out.mkdir(parents=True)
    writing = [(name, name_of) for name in old["files"] for name_of in _copies(name, num_layers, count)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        entries = list(pool.map(lambda one: _write(small / one[0], out / one[1], num_layers, count), writing))
    new = {**old, **{key: _repeated(old[key], num_layers, count) for key in ("blocks", "content_sums")}}
    accounting = old["tensors"]
    new["tensors"] = {
        "converted": _repeated(accounting["converted"], num_layers, count),
        "copied": sorted(_repeated(dict.fromkeys(accounting["copied"]), num_layers, count)),
        "dropped": _repeated(accounting["dropped"], num_layers, count),
    }
    for number, block in enumerate(new["blocks"].values()):
        block["layer"] = number
    files = {name: entry for (_, name), entry in zip(writing, entries, strict=True)}
    new["files"] = {name: files[name] for name in sorted(files)}
    (out / names.MANIFEST).write_bytes(text := sealed(new))
    typed = {name: FileEntry(**entry) for name, entry in files.items()}
    (out / names.SUMS).write_bytes(sums_bytes(typed, hashlib.sha256(text).hexdigest()))
    read_manifest(out, is_sealed=True)
    return sum(entry["size_bytes"] for entry in files.values())


def renamed(text: str, number: int) -> str:
    """The text with this number of layer."""
    return LAYER.sub(str(number), text)


def _copies(name: str, num_layers: int, count: int) -> Iterator[str]:
    """What becomes of a name: of one layer, those of all layers that are made of it; else the name."""
    match = LAYER.search(name)
    numbers = range(int(match[0]), num_layers, count) if match else ()
    yield from (renamed(name, n) for n in numbers) if match else (name,)


def _repeated(values: Json, num_layers: int, count: int) -> Json:
    """An object whose keys and values name layers, with those of all layers; layers in their order."""
    found = [
        (name, json.loads(renamed(json.dumps(value), int(match[0]))) if (match := LAYER.search(name)) else value)
        for key, value in values.items()
        for name in _copies(key, num_layers, count)
    ]
    return dict(sorted(found, key=lambda one: int(match[0]) if (match := LAYER.search(one[0])) else -1))


def _write(source: Path, out: Path, num_layers: int, count: int) -> Json:
    """Write one file, of one layer or of all; returns its entry in the manifest."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if source.name == names.INDEX:
        document = json.loads(source.read_text(encoding="utf-8"))
        sizes: dict[str, int] = {}
        for shard in {*document["weight_map"].values()}:
            header, _ = _parts(source.with_name(shard))
            sizes |= {
                name: one["data_offsets"][1] - one["data_offsets"][0]
                for name, one in header.items()
                if name[:2] != "__"
            }
        document["metadata"]["total_size"] = sum(_repeated(sizes, num_layers, count).values())
        document["weight_map"] = _repeated(document["weight_map"], num_layers, count)
        return _put(out, [json.dumps(document, indent=2).encode() + b"\n"])
    if source.name == "config.json":
        document = json.loads(source.read_text(encoding="utf-8"))
        document["num_hidden_layers"] = num_layers
        return _put(out, [json.dumps(document, indent=2).encode() + b"\n"])
    if source.suffix != ".safetensors":
        return _put(out, [source.read_bytes()])
    header, data = _parts(source)
    if match := LAYER.search(out.name):
        return _put(out, [_head({renamed(name, int(match[0])): one for name, one in header.items()}), data])
    return _put(out, _shard(header, data, num_layers, count))


def _parts(path: Path) -> tuple[Json, memoryview]:
    """Header and data of a safetensors file, mapped."""
    with path.open("rb") as file:
        raw = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(bytes(raw[8:start])), raw[start:]


def _shard(header: Json, data: memoryview, num_layers: int, count: int) -> list[bytes | memoryview]:
    """The pieces of a shard with the tensors of all layers."""
    new: Json = {"__metadata__": header.pop("__metadata__")} if "__metadata__" in header else {}
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        piece = data[slice(*one["data_offsets"])]
        for copy in _copies(name, num_layers, count):
            new[copy] = {**one, "data_offsets": [end, end := end + len(piece)]}
            pieces.append(piece)
    return [_head(new), *pieces]


def _head(header: Json) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _put(out: Path, pieces: Sequence[bytes | memoryview]) -> Json:
    digest, size = hashlib.sha256(), 0
    with out.open("wb", buffering=0) as file:
        for piece in pieces:
            for begin in range(0, len(piece), CHUNK):
                part = piece[begin : begin + CHUNK]
                digest.update(part)
                size += len(part)
                while len(part):
                    part = part[file.write(part) :]
    return {"size_bytes": size, "sha256": digest.hexdigest()}


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("small", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    a = parser.parse_args()
    print(f"{a.out}: {grow(a.small, a.out, a.layers) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
