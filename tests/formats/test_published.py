"""Published checkpoints' real headers: the formats of their experts, and the schema that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

import hqconv
from tests.make.published import DATA, load, write_sparse

MXFP4, MXFP8 = "mxfp4: float4e2m1, float8e8m0 scale per 1x32", "mxfp8: float8e4m3, float8e8m0 scale per 1x32"
# What inspect says of the experts, and how it says that `--schema source` keeps them.
CASES: dict[str, tuple[str, str]] = {
    "families/awq-gate-entry": (
        "awq int4: uint4, float16 scale per 1x128, zero point",
        "source (int4-g128-zp)",
    ),
    "families/mimo_v2-ling-routed-mxfp4": (MXFP4, "source (mxfp4)"),
    "families/gpt_oss-quark": ("not quantized", ""),
    "real/XiaomiMiMo--MiMo-V2.6": (MXFP4, "source (mxfp4)"),
    "real/Eco-Tech--GLM-5.1-w8a8": (
        "ascend w8a8_dynamic: uint8, float32 scale per 1xall",
        "source --round-scales (int8)",
    ),
    "real/MiniMaxAI--MiniMax-M3-MXFP8": (MXFP8, "source (mxfp8)"),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_of_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    model = load(DATA / f"{name}.json")
    seen = hqconv.inspect(write_sparse(model, tmp_path / "model"))
    (blocks,) = seen["blocks"]
    stored, source = CASES[name]
    assert blocks["source_format"] == stored
    assert [way for way in seen["direct_schemas"] if way.startswith("source")] == ([source] if source else [])
    assert blocks["num_blocks"] == model.expect.get("blocks", 2)
    assert blocks["num_experts"] == model.expect.get("experts", 8)
    for key in ("family", "activation"):
        assert {**seen, **blocks}[key] == model.expect.get(key, {**seen, **blocks}[key])
    total = sum(part["num_tensors"] for part in seen["tensors"].values())
    assert total == seen["num_tensors"] == sum(1 for _ in model.tensors())
