"""Damage done to artifacts of quantized and fused sources: verify finds every one, at the right place."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hqconv.schemas.grid import Grid
from tests.make.conversions import run
from tests.make.damage import Damaged, found, raw_and_resealed
from tests.make.small import GOOD, LAYER, save

BASES = {
    "fp8_blocks": "source",
    "fp8_tensors": "fp8-tensor",
    "gpt_oss_mxfp4": "source",
    "gpt_oss_floats": "int4",
}
Make = Callable[..., Damaged]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A fresh copy of a good artifact; conversions are made once."""

    @functools.cache
    def good(base: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(base)
        source = save(folder / "src", GOOD[base][0]())
        run(source, folder / "out", BASES[base], Grid(2, 2))
        return source, folder / "out"

    def copy(base: str) -> Damaged:
        source, out = good(base)
        root = tmp_path_factory.mktemp("copy") / "out"
        shutil.copytree(out, root)
        return Damaged(root, source, BASES[base])

    return copy


@pytest.fixture(params=BASES)
def copy(request: pytest.FixtureRequest, make: Make) -> Damaged:
    return make(request.param)


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gemm", ["w13", "w2"])
@pytest.mark.parametrize("tensor", ["weight", "weight_scale", "bias"])
def test_one_flipped_bit(copy: Damaged, gemm: str, tensor: str) -> None:
    name = f"{LAYER}.{gemm}_{tensor}"
    if name not in copy.tensor_names(copy.path):
        assert tensor == "bias"
        pytest.skip("no biases in this source")
    copy.flip(copy.path, name, local=1)
    weights = raw_and_resealed(copy, [copy.path])
    found(weights, copy.path, name, "expert 3 (local 1)")
    assert all("expert 3" in f.where or "quantization_error" in f.where for f in weights.findings)


def test_a_bias_on_every_rank(make: Make) -> None:
    """Ranks are summed: the w2 bias would count twice."""
    copy = make("gpt_oss_mxfp4")
    name = f"{LAYER}.w2_bias"
    copy.expert_bytes(copy.path, name, 1)[:] = copy.expert_bytes(
        copy.rank_file(LAYER, 0, 1), name, 1
    )
    weights = raw_and_resealed(copy, [copy.path])
    found(weights, f"{copy.path}, tensor {name}, expert 3", "more than TP rank 0")


def test_another_format_of_the_same_source(make: Make, tmp_path: Path) -> None:
    """The same tensors under a config that means something else: not the source that was converted."""
    copy = make("fp8_blocks")
    tensors, config = GOOD["fp8_blocks"][0]()
    config["quantization_config"]["fmt"] = "e5m2"
    copy.source = save(tmp_path / "src", (tensors, config))
    for result in copy.check():
        found(result, f"source: {LAYER}.0.", "F8_E4M3")
