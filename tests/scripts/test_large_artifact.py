"""An artifact of scripts/large_artifact.py is a proper one, by the product's own checks."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import hqconv
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import open_artifact_view
from scripts.large_artifact import grow
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe


def test_a_grown_artifact_verifies(tmp_path: Path) -> None:
    """Two layers become five: files, headers, decoded weights' sums and copied tensors' sums are all the manifest's."""
    source = write_qwen3_moe(tmp_path / "source", num_layers=2, hidden_size=256, intermediate_size=128)
    run(source, tmp_path / "small", "mxfp4", tp=2)
    size = grow(tmp_path / "small", tmp_path / "large", 5)
    assert size > 2 * sum(path.stat().st_size for path in (tmp_path / "small" / "experts").rglob("*.safetensors"))
    report = hqconv.verify(tmp_path / "large", device="cpu")
    assert report.passed, report
    view = open_artifact_view(ArtifactLocation(str(tmp_path / "large")))
    assert [layer.index for layer in view.layers.values()] == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "large" / "config.json").read_text())["num_hidden_layers"] == 5
    small = hqconv.dequantize(tmp_path / "small", layer="model.layers.1.mlp.experts")
    large = hqconv.dequantize(tmp_path / "large", layer="model.layers.3.mlp.experts")
    assert torch.equal(small["w2"], large["w2"])
