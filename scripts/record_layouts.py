"""Record every kernel layout as Humming's ops give it on a GPU, for `tests/kernel_layout/test_transform.py`.

    python scripts/record_layouts.py [tests/golden/layouts.json]

Laying out is moving data: any GPU gives the layout of any target. Each case is done on the CPU as well, and a case
whose bytes differ is named and fails the script. The file holds a SHA-256 of every tensor.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.make.golden import digest
from tests.make.layout_cases import cases, laid_out


def main() -> None:
    """Record all cases."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/layouts.json")
    begun, wrong = time.monotonic(), []
    golden: dict[str, Any] = {"recorded_on": torch.cuda.get_device_name(), "cases": {}}
    for seed, (name, kind) in enumerate(cases().items()):
        on_gpu, here = ({k: digest(t) for k, t in laid_out(kind, seed, d).items()} for d in ("cuda", "cpu"))
        golden["cases"][name] = on_gpu
        wrong += [f"{name}: {key}" for key in on_gpu if on_gpu[key] != here.get(key)]
    out.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - begun
    print(f"{len(golden['cases'])} cases in {seconds:.0f} s; different on the CPU: {wrong or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
