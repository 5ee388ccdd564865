"""Tell which versions of humming-kernels lay weights out alike, by the fingerprint of every layout of the GPU here.

    python scripts/layouts_by_version.py 0.1.15 0.1.16 0.1.17 0.1.18 0.1.19 [--wheels FOLDER]

Each version is downloaded from PyPI, or unpacked in FOLDER/VERSION already, and runs in a process of its own: Humming's
own classes and CUDA kernels lay out the small matrix of `kernel_layout/fingerprint`, without hqconv's changes. Layouts
that split e8m0 scales for float16 are left out: old versions have no function for it. Needs a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from hqconv.kernel_layout import fingerprint  # noqa: E402
from hqconv.kernel_layout.compatibility import PAD_K, PAD_N  # noqa: E402
from hqconv.schemas.dtypes import torch_dtype_of  # noqa: E402
from hqconv.schemas.gpu_target import GpuTarget  # noqa: E402
from hqconv.schemas.input_schema import INPUT_PRESETS, KernelSpec  # noqa: E402
from hqconv.schemas.weight_schema import PRESETS  # noqa: E402

N, K = 256, 512


def of_this_version() -> dict[str, str]:
    """Name of each layout → its digest by the imported Humming, or why it has none."""
    schemas, transform = (
        importlib.import_module(f"humming.{name}") for name in ("schema", "transform")
    )
    target = GpuTarget(torch.cuda.get_device_capability()[0] * 10, (13, 0))
    found = {}
    for schema in PRESETS.values():
        for inputs in INPUT_PRESETS.values():
            for dtype in ("bfloat16", "float16"):
                spec = KernelSpec(schema, dtype, target, inputs)
                if schema.bs_dtype != "float8e8m0" or dtype != "float16":  # hqconv splits these
                    try:
                        found[f"{schema.name}, {inputs.name}, {dtype}"] = digest(
                            spec, schemas, transform
                        )
                    except Exception as error:  # noqa: BLE001 - an old version knows fewer words
                        found[f"{schema.name}, {inputs.name}, {dtype}"] = (
                            f"{type(error).__name__}: {error}"[:100]
                        )
    return found


def digest(spec: KernelSpec, schemas: object, transform: object) -> str:
    """The fingerprint of a layout by Humming's own functions alone."""
    weights = schemas.HummingWeightSchema(**spec.schema.humming_fields())  # type: ignore[attr-defined]
    inputs = schemas.HummingInputSchema(**spec.inputs.humming_fields())  # type: ignore[attr-defined]
    dtype = torch_dtype_of(spec.param_dtype)
    attributes = weights.get_tensors_attrs(
        shape_n=N, shape_k=K, param_dtype=dtype, num_experts=1, has_bias=False
    )
    packed = {
        name: fingerprint.values(one["shape"], one["dtype"]).cuda()
        for name, one in attributes.items()
    }
    pads = {"pad_n_to_multiple": PAD_N, "pad_k_to_multiple": PAD_K}
    config = transform.prepare_layer_config(  # type: ignore[attr-defined]
        shape_n=N,
        shape_k=K,
        weight_schema=weights,
        input_schema=inputs,
        num_experts=1,
        torch_dtype=dtype,
        **pads,
    )
    return fingerprint.digest(transform.transform_humming_tensors(config, packed))  # type: ignore[attr-defined]


def run(version: str, wheels: Path) -> dict[str, str]:
    """`of_this_version` in a process whose `humming` is that version."""
    folder = wheels / version
    if not folder.is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
        ]
        subprocess.run([*command, f"humming-kernels=={version}"], check=True)
    paths = [str(folder), str(REPO), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, __file__, "--here"], env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print a row for each version, compared with the last one named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--wheels", type=Path, help="folder with a folder of each version")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(of_this_version()))
        return
    with tempfile.TemporaryDirectory() as temporary:
        found = {version: run(version, args.wheels or Path(temporary)) for version in args.versions}
    last = found[args.versions[-1]]
    print(
        f"| version | layouts as in {args.versions[-1]} | other layouts | none |\n| --- | --- | --- | --- |"
    )
    for version, layouts in found.items():
        kinds = Counter(
            "none" if ":" in own else "same" if own == last[name] else "other"
            for name, own in layouts.items()
        )
        print(f"| {version} | {kinds['same']} | {kinds['other']} | {kinds['none']} |")
        for kind in ("other", "none"):
            names = [
                n
                for n, own in layouts.items()
                if kind == ("none" if ":" in own else "other") and own != last[n]
            ]
            print(
                "".join(f"  {kind}: {name}: {layouts[name]}\n" for name in names[:6]),
                end="",
                file=sys.stderr,
            )
    print(
        hashlib.sha256(json.dumps(last, sort_keys=True).encode()).hexdigest()[:12], file=sys.stderr
    )


if __name__ == "__main__":
    main()
