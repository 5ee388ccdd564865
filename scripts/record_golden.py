"""Record what Humming's CUDA ops give on hard inputs, for `tests/kernel_layout/test_golden.py`.

    python scripts/record_golden.py tests/golden

Needs the GPU of the target architecture. `golden.json` holds a SHA-256 of every output tensor, and the float64
error sums; `<schema>.npz` holds the whole small outputs of one schema, to find the first differing place.
Inputs are made anew from their seeds, with their own digest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.make.golden import SHAPES, case_name, digest, outputs
from tests.make.matrices import SCHEMAS, SECOND_SCALES


def main() -> None:
    """Record every schema for every shape and both parameter dtypes."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    golden: dict[str, Any] = {"recorded_on": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    for name in (*SCHEMAS, *SECOND_SCALES):
        for param_dtype in ("bfloat16", "float16"):
            for shape in SHAPES:
                tensors, sums = outputs(name, param_dtype, shape, "cuda")
                digests = {key: digest(value) for key, value in tensors.items()}
                golden["cases"][case_name(name, param_dtype, shape)] = {"sha256": digests, "sums": sums}
        small, _ = outputs(name, "bfloat16", SHAPES[0], "cuda")
        arrays = {k: v.cpu().contiguous().flatten().view(torch.uint8).numpy() for k, v in small.items()}
        np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
