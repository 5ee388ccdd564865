"""Families as transformers saves them, converted and verified; on a GPU with the production kernel too.

`test_calibrated` converts and verifies every family that transformers runs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from hqconv import dequantize
from hqconv.schemas.grid import Grid
from hqconv.sources.opening import open_source
from tests.make import conversions
from tests.make.families import FAMILIES, SIZES, save_family

SCHEMA = "int4-g32"
ERROR = 0.15  # relative, of 4 bits in groups of 32
NOT_RUN = ("dbrx", "glm4v_moe", "diffusion_gemma", "inkling2_text", "inkling2_loop_text")
# One of each kind: swigluoai with biases, no gate, a clamped or bounded activation, gelu. Each compiles its kernels.
KERNELS = ("gpt_oss", "nemotron_h", "deepseek_v4", "step3p7", "gemma4")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model_type", [*NOT_RUN, *KERNELS])
def test_a_family_converts_and_verifies(model_type: str, tmp_path: Path) -> None:
    check_conversion(model_type, tmp_path, 64)


def test_a_latent_size_is_what_the_experts_see(tmp_path: Path) -> None:
    check_conversion("nemotron_h", tmp_path, 32, moe_latent_size=32)


def check_conversion(model_type: str, tmp_path: Path, hidden: int, **words: int) -> None:
    """The decoded artifact is near to what is read from the source, every expert and projection in its place."""
    src, out = tmp_path / "src", tmp_path / "out"
    save_family(src, model_type, torch.bfloat16, hidden=64, inner=64, **words)
    conversions.run(src, out, SCHEMA, Grid(tp=2, ep=2), dtype="bfloat16")
    conversions.assert_verified(out, src)
    spec, blocks = FAMILIES[model_type], conversions.manifest(out)["blocks"]
    with open_source(src) as source:
        experts = source.map_experts()
        assert experts.chosen_because.startswith(f"model_type {model_type}")
        assert len(experts.layers) == spec.num_blocks
        top_k = spec.words.get(spec.keys.top_k, SIZES["top_k"])
        for layer in experts.layers:
            assert (layer.num_experts, layer.top_k, layer.dtype) == (
                SIZES["experts"],
                top_k,
                "BF16",
            )
            assert (layer.hidden_size, layer.intermediate_size) == (hidden, 64)
            order = ["gate", "up"] if layer.gated else ["up"]
            assert blocks[layer.name]["w13_order"] == order
            found = dequantize(out, layer=layer.name)
            for e in range(layer.num_experts):
                matrices = source.read_expert(layer, e, layer.roles, torch.device("cpu"))
                for role, matrix in matrices.items():
                    expected = matrix.values().float()
                    error = (found[role][e] - expected).norm() / expected.norm()
                    assert error < ERROR, (layer.name, e, role, float(error))
                    if matrix.bias is not None:
                        assert torch.equal(found[f"b{role[1:]}"][e], matrix.bias.float())


@functools.cache
def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@pytest.mark.cuda
@pytest.mark.parametrize("model_type", KERNELS)
def test_the_kernel_serves_a_family(model_type: str, tmp_path: Path) -> None:
    """Activation, biases and routes of the production kernel against a plain layer with the source's weights."""
    if _capability() != (9, 0):
        pytest.skip("needs a CUDA device of the target architecture, sm90")
    src, out = tmp_path / "src", tmp_path / "out"
    try:
        save_family(src, model_type, torch.bfloat16, hidden=256, inner=256)
    except (
        AttributeError,
        KeyError,
        ValueError,
    ) as error:  # machines with GPUs bring versions of their own
        pytest.skip(f"this transformers does not make {model_type}: {error}")
    conversions.run(src, out, SCHEMA, Grid(tp=2, ep=2), dtype="bfloat16")
    report = conversions.check(out, src)
    assert report.passed, [f for result in report.results for f in result.findings]
    assert not any(result.skipped for result in report.results)
