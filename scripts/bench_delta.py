"""Size of a delta, and times of `diff` and `apply` beside a plain copy, of an artifact in which some experts changed.

    python -m scripts.bench_delta FOLDER --share 0.01

Converts a model with random weights into FOLDER, or takes the artifact --old, changes a share of every
layer's experts in a copy, and prints a row for docs/artifact.md. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from pathlib import Path

import hqconv
from hqconv.artifact.manifest import read_manifest, sealed
from hqconv.artifact.sha256sums import sums_bytes
from hqconv.io.file_access import sha256_of
from hqconv.io.safetensors_header import read_header
from scripts.make_checkpoint import main as make_checkpoint


def change_experts(path: Path, experts: list[int], other: Path | None = None) -> None:
    """Replace the bytes of some experts in each tensor of a rank file: by random ones, or by those of another file."""
    tensors, _, _ = read_header(path)
    with path.open("r+b") as file, (other or path).open("rb") as found:
        for ref in tensors.values():
            size = ref.num_bytes // ref.shape[0]
            for expert in experts:
                begin = ref.offset_bytes + expert * size
                found.seek(begin)
                data = os.urandom(size) if other is None else found.read(size)
                file.seek(begin)
                file.write(data)


def reseal(root: Path) -> None:
    """Make the manifest and SHA256SUMS fit the changed files."""
    document = json.loads((root / "hqconv.json").read_bytes())
    for name, entry in document["files"].items():
        entry |= {"size_bytes": (root / name).stat().st_size, "sha256": sha256_of(root / name)}
    (root / "hqconv.json").write_bytes(sealed(document))
    manifest = read_manifest(root)
    (root / "SHA256SUMS").write_bytes(sums_bytes(manifest.files, manifest.sha256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.01, help="of the experts of every layer")
    parser.add_argument("--old", type=Path, help="an artifact to change; else a small model is converted")
    parser.add_argument("--schema", default="mxfp4")
    parser.add_argument("--experts", default="128", help="experts of the small model, for each layer")
    parser.add_argument("--layers", default="8")
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    old: Path = args.old or folder / "old"
    if args.old is None:
        shape = ("--layers", args.layers, "--experts", args.experts, "--hidden", "1024", "--intermediate", "512")
        make_checkpoint([str(folder / "model"), *shape])
        hqconv.convert(folder / "model", old, schema=args.schema, target="sm90", device="cpu")
    begun_s = time.perf_counter()
    new = Path(shutil.copytree(old, folder / "new"))
    copy_s = time.perf_counter() - begun_s
    manifest, chance = read_manifest(new), random.Random(0)
    for name, layer in manifest.blocks.items():
        chosen = chance.sample(range(layer.num_experts), max(1, round(layer.num_experts * args.share)))
        for path in new.glob(f"experts/*/{name}.safetensors"):
            change_experts(path, chosen)
    reseal(new)
    begun_s = time.perf_counter()
    words = hqconv.diff(old, new, folder / "delta")
    diff_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    hqconv.apply_delta(old, folder / "delta", folder / "applied")
    apply_s = time.perf_counter() - begun_s
    total = words["num_bytes_of_artifact"]
    row: list[object] = [f"{total / 1e9:.2f} GB", f"{args.share:.1%}", f"{words['num_bytes'] / 1e6:.1f} MB"]
    row += [f"{words['num_bytes'] / total:.2%}", words["num_ranges"], f"{diff_s:.1f} s", f"{apply_s:.1f} s"]
    row.append(f"{copy_s:.1f} s")
    print("| artifact | experts changed | delta | of the artifact | ranges | diff | apply | copy of the artifact |")
    print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
