"""Verify's own shift of mxfp4 weights, against the twin of Humming's op, and what it makes of hard weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.humming_ops import cpu_ops
from hqconv.schemas.grid import Grid
from hqconv.verification import fused_exponents
from tests.make.conversions import assert_verified, check, run
from tests.make.damage import LAYER
from tests.make.kernel_tensors import field_codes
from tests.make.qwen import write_qwen3_moe


def test_every_code_by_every_shift() -> None:
    """Halves go away from zero; minus zero becomes zero. From 128 on Humming's own factor is no power of two."""
    words = torch.from_numpy(np.array([0x76543210, 0xFEDCBA98, 0, 0], np.uint32).view(np.int32))
    for shift in range(128):
        theirs = cpu_ops.process_mxfp4_w4a8_weight(
            words.clone(), torch.tensor([shift], dtype=torch.uint8)
        )
        assert np.array_equal(
            fused_exponents._shifted()[shift], field_codes(theirs.numpy(), 4)[:16]
        )


@pytest.mark.parametrize(
    ("schema", "dtype"),
    [("mxfp4", "bfloat16"), ("mxfp4", "float16"), ("fp4-g32-e8m0-row", "bfloat16")],
)
@pytest.mark.parametrize(
    ("inputs", "target"), [("fp8", "sm89"), ("int8", "sm86"), ("fp8-g128", "sm90")]
)
def test_zeros_and_weights_that_are_lost_beside_others(
    inputs: str, target: str, schema: str, dtype: str, tmp_path: Path
) -> None:
    """Rows and groups of zeros, rows so small that float16 has no second scale for them, groups far below a row's."""
    source = write_qwen3_moe(
        tmp_path / "src", num_layers=1, num_experts=2, hidden_size=384, intermediate_size=192
    )
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.startswith(LAYER):
            weight[3], weight[5, :64] = 0, 0
            weight[7] *= 2.0**-60
            weight[9] *= 2.0**6
            weight[11, :32] *= 2.0**-100
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for grid in (Grid(), Grid(tp=2)):
        out = tmp_path / f"out{grid.tp}"
        run(source, out, schema, grid, input_schema=inputs, target=target, dtype=dtype)
        assert_verified(out, source)
        # One row lost in an expert of one of the projections is seen: the figures are of what was stored.
        weights = check(out, source, "weights").results[0]
        assert weights.measured[LAYER]["w3"]["relative_error"] > 0.1


@pytest.mark.parametrize(("inputs", "is_misread"), [("int8", True), ("fp8", False)])
@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2)])
def test_minus_zeros_are_counted_where_kernels_misread_them(
    grid: Grid, inputs: str, is_misread: bool, tmp_path: Path
) -> None:
    """Each is one nibble 8 of the stored words; by experts on the CPU and by batches, and in a warning beforehand."""
    source = write_qwen3_moe(
        tmp_path / "src", num_layers=1, num_experts=3, hidden_size=256, intermediate_size=128
    )
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.startswith(LAYER):
            weight[11, :32] *= 2.0**-20
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = run(source, tmp_path / "out", "mxfp4", grid, input_schema=inputs, target="sm90")
    assert any("misread" in warning for warning in report.warnings) == is_misread
    count = 0
    for path in (tmp_path / "out" / "experts").rglob("*.safetensors"):
        for name, words in load_file(path).items():
            if name.endswith("_weight"):
                count += int((field_codes(words.numpy(), 4) == 8).sum())
    assert count > 0  # of fp8 signs lie apart from their codes: any nibble
    for device in (None, torch.device("cpu")):
        result = check(
            tmp_path / "out", source, "weights", **({"device": device} if device else {})
        ).results[0]
        assert result.status == "pass"
        notes = [note for note in result.notes if "minus zero" in note]
        assert [note.partition(" ")[0] for note in notes] == ([str(count)] if is_misread else [])
