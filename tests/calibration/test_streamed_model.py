"""Decoded experts, loaded under the source's names: transformers' own loading of the source is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hqconv.calibration.streamed_model import StreamedModel, stored_tensors
from hqconv.calibration.transformers_model import folder_of, quiet_loading
from hqconv.evaluation.evaluate import _source_expert
from hqconv.sources.opening import open_source
from tests.make.decodable import QUANTIZED, write_quantized
from tests.make.families import FAMILIES, save_family

NOT_RUN = (
    "dbrx",
    "diffusion_gemma",
    "glm4v_moe",
    "step3p7",
)  # transformers makes no model, or one with two decoders


def assert_loads_the_same(src: Path) -> None:
    """The source's own experts in place of its tensors: every parameter of every stage has the same bits."""
    cpu = torch.device("cpu")
    with open_source(str(src)) as source, quiet_loading(transformers), folder_of(source) as folder:
        model = StreamedModel(transformers, source, folder, torch.float32, cpu)
        layers = source.map_experts().layers
        assert layers
        for layer in layers:
            path = model.experts[layer.index][0]
            stage = next(name for name in model.stages if path.startswith(f"{name}."))
            model.load(stage)
            expected = {
                name: value.clone() for name, value in model.stages[stage].state_dict().items()
            }
            model.drop(stage)
            experts = (_source_expert(source, layer, expert) for expert in range(layer.num_experts))
            model.load(stage, stored_tensors(layer, experts, torch.float32, cpu))
            for name, value in model.stages[stage].state_dict().items():
                assert torch.equal(value, expected[name]), f"{stage}: {name}"
            assert any(value.count_nonzero() for value in expected.values())
            model.drop(stage)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_RUN])
def test_experts_of_every_family(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family, inner=64)
    assert_loads_the_same(tmp_path)


@pytest.mark.parametrize("method", QUANTIZED)
def test_experts_of_quantized_sources(method: str, tmp_path: Path) -> None:
    assert_loads_the_same(write_quantized(tmp_path / "src", method, tmp_path / "plain"))
