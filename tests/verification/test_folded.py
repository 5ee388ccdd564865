"""Verify's own shift of mxfp4 weights, against the twin of Humming's op, and what it makes of hard weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.backends import twins
from hqconv.schemas.grid import Grid
from hqconv.verification import folded
from tests.make.conversions import assert_verified, check, run
from tests.make.damage import BLOCK
from tests.make.kernel_tensors import field_codes
from tests.make.qwen import write_qwen3_moe


def test_every_code_by_every_shift() -> None:
    """Halves go away from zero; minus zero becomes zero. From 128 on Humming's own factor is no power of two."""
    words = torch.from_numpy(np.array([0x76543210, 0xFEDCBA98, 0, 0], np.uint32).view(np.int32))
    for shift in range(128):
        theirs = twins.process_mxfp4_w4a8_weight(words.clone(), torch.tensor([shift], dtype=torch.uint8))
        assert np.array_equal(folded._shifted()[shift], field_codes(theirs.numpy(), 4)[:16])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("inputs", "target"), [("fp8", "sm89"), ("int8", "sm86"), ("fp8-g128", "sm90")])
def test_zeros_and_weights_that_are_lost_beside_others(
    inputs: str, target: str, dtype: str, tmp_path: Path
) -> None:
    """Rows and groups of zeros, rows so small that float16 has no second scale for them, groups far below a row's."""
    source = write_qwen3_moe(
        tmp_path / "src", num_layers=1, num_experts=2, hidden_size=384, intermediate_size=192
    )
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.startswith(BLOCK):
            weight[3], weight[5, :64] = 0, 0
            weight[7] *= 2.0**-60
            weight[9] *= 2.0**6
            weight[11, :32] *= 2.0**-100
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for grid in (Grid(), Grid(tp=2)):
        out = tmp_path / f"out{grid.tp}"
        run(source, out, "mxfp4", grid, input_schema=inputs, target=target, dtype=dtype)
        assert_verified(out, source)
        # One row lost in an expert of one of the projections is seen: the figures are of what was stored.
        weights = check(out, source, "weights").results[0]
        assert weights.measured[BLOCK]["w3"]["relative_error"] > 0.1
