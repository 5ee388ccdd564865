"""How long a conversion takes that copies very many small tensors: `python scripts/bench_copies.py`.

`[--tensors 1000000] [--runs 1] [--work /dev/shm]`. The model is DeepSeek-V3's by its names, with one small MoE layer;
all other tensors are small ones of the ordinary kind, with data, of 2 to 512 bytes, in shards of at most 250,000. It is
converted by a whole `hqconv convert`, planned by `--dry-run` for comparison, and what was copied is compared with the
source.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hqconv.io.file_access import sha256_of
from scripts.bench_headers import apart, config

PER_SHARD = 250_000
SIZES = (1, 3, 16, 64, 129, 256)  # numbers in a tensor
EXPERTS, HIDDEN, INNER = 8, 256, 128
CONVERT = ("convert", "--json", "--device=cpu", "--target=sm90", "--schema=mxfp4")


def names(count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The experts of one layer, and as many other tensors as make `count`."""
    at = "model.layers.0.mlp"
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    for expert in range(EXPERTS):
        for word, shape in shapes.items():
            yield f"{at}.experts.{expert}.{word}.weight", shape
    for number in range(count - EXPERTS * len(shapes)):
        name = f"model.layers.{number // 1000}.adapters.{number % 1000}.weight"
        yield name, (SIZES[number % len(SIZES)],)


def make(folder: Path, count: int) -> None:
    """Write the model, with data that differ from tensor to tensor."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    entries = list(names(count))
    for number, start in enumerate(range(0, count, PER_SHARD)):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end, path = 0, folder / f"model-{number:05d}.safetensors"
        for name, shape in entries[start : start + PER_SHARD]:
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            weight_map[name] = path.name
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        pattern = bytes(byte for n in range(127) for byte in (2 * n, 0x3C + n % 4))  # from 0.0078 to 2
        data = (pattern * (end // len(pattern) + 1))[:end]
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    layers = count // 1000 + 1
    words = {**config(layers, EXPERTS, "bf16"), "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    (folder / "config.json").write_text(json.dumps(words) + "\n", encoding="utf-8")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")


def data_of(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes, read by other means than hqconv's."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    ends = ((name, entry["data_offsets"]) for name, entry in header.items())
    return {name: raw[start + first : start + end] for name, (first, end) in ends}


def compare(source: Path, out: Path) -> int:
    """How many tensors were copied. Raises SystemExit where one has other bytes, or a file is not what is listed."""
    words = json.loads((out / "hqconv.json").read_bytes())
    wrong = [name for name, file in words["files"].items() if sha256_of(out / name) != file["sha256"]]
    theirs = {name: data for path in source.glob("*.safetensors") for name, data in data_of(path).items()}
    ours = {name: data for path in out.glob("*.safetensors") for name, data in data_of(path).items()}
    wrong += [name for name in theirs if ".experts." not in name and ours.get(name) != theirs[name]]
    if wrong:
        raise SystemExit(f"copied wrongly: {wrong[:5]}")
    return len(ours)


def measure_copies(work: Path, count: int, num_runs: int) -> Iterator[dict[str, Any]]:
    """What planning and converting take; the source is made below `work` and removed."""
    source, out = work / "copies", work / "copies-out"
    make(source, count)
    words = [*CONVERT, "-o", str(out)]
    for name, more in {"dry-run": ["--dry-run"], "convert": ["--overwrite"]}.items():
        runs = [apart("look", source, *words, *more) for _ in range(num_runs)]
        least = {key: min(run[key] for run in runs) for key in runs[0]}
        yield {
            "look": name,
            "tensors": count,
            "wall_seconds": round(least["wall"], 1),
            "cpu_seconds": round(least["cpu"], 1),
            "peak_mb": round(least["peak"] / 1e6),
        }
    yield {"look": "compared", "copied": compare(source, out)}
    shutil.rmtree(source)
    shutil.rmtree(out)


def main() -> None:
    """Measure as asked, one line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--work", default=None, help="a folder for the models, such as /dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hqconv-copies-", dir=options.work) as folder:
        for found in measure_copies(Path(folder), options.tensors, options.runs):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
