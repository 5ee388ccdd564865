"""Damage done to artifacts of quantized and fused sources: verify finds every one, at the right place."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hqconv.schemas.grid import Grid
from hqconv.verification.result import CheckResult
from tests.make.conversions import run
from tests.make.damage import Damaged, found, raw_and_resealed
from tests.make.small import GOOD, INNER, LAYER, E, Source, save

BASES = {
    "fp8_blocks": "source",
    "fp8_tensors": "fp8-tensor",
    "gpt_oss_mxfp4": "source",
    "gpt_oss_floats": "int4",
}
FUSED = ["gpt_oss_mxfp4", "gpt_oss_floats"]
GRID = Grid(2, 2)
Make = Callable[..., Damaged]
Change = Callable[[Source], object]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A fresh copy of a good artifact; conversions are made once."""

    @functools.cache
    def good(base: str, grid: Grid) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(base)
        source = save(folder / "src", GOOD[base][0]())
        run(source, folder / "out", BASES[base], grid)
        return source, folder / "out"

    def copy(base: str, grid: Grid = GRID) -> Damaged:
        source, out = good(base, grid)
        root = tmp_path_factory.mktemp("copy") / "out"
        shutil.copytree(out, root)
        return Damaged(root, source, BASES[base])

    return copy


@pytest.fixture(params=BASES)
def copy(request: pytest.FixtureRequest, make: Make) -> Damaged:
    return make(request.param)


def graft(
    copy: Damaged, base: str, change: Change, tmp_path: Path, grid: Grid = GRID
) -> CheckResult:
    """Put in the rank files that a wrong source would have given. Returns `weights`, digests made good."""
    source = GOOD[base][0]()
    change(source)
    run(save(tmp_path / "src", source), tmp_path / "out", BASES[base], grid)
    paths = [
        f"{path.relative_to(copy.root)}"
        for path in sorted((copy.root / "experts").rglob("*.safetensors"))
        if path.read_bytes() != (tmp_path / "out" / path.relative_to(copy.root)).read_bytes()
    ]
    assert paths
    for path in paths:
        shutil.copy(tmp_path / "out" / path, copy.root / path)
    return raw_and_resealed(copy, paths)


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


@pytest.mark.parametrize("base", FUSED)
def test_experts_of_a_stack_in_another_order(base: str, make: Make, tmp_path: Path) -> None:
    def change(source: Source) -> None:
        for name, tensor in source[0].items():
            if name.startswith(f"{LAYER}.gate_up"):
                source[0][name] = tensor[[1, 0, 2, 3]]

    weights = graft(make(base), base, change, tmp_path)
    for role in ("w1", "w3"):
        found(
            weights,
            f"layer {LAYER}, {role} of expert 0",
            "experts are swapped",
            f"{role} of expert 1",
        )
    found(weights, "tensor " + f"{LAYER}.w13_bias", "w1 of expert 1", "bias of the source")
    assert not [f for f in weights.findings if "w2" in f.where]


def gate_up(source: Source) -> list[tuple[str, int]]:
    """The tensors of gate and up, and the dimension of their rows."""
    return [
        (name, 2 if name.endswith("gate_up_proj") else 1)
        for name in source[0]
        if name.startswith(f"{LAYER}.gate_up")
    ]


@pytest.mark.parametrize("base", FUSED)
def test_rows_left_in_turns(base: str, make: Make, tmp_path: Path) -> None:
    """Gate and up as the source's stack has them, cut in the middle instead of dealt out."""

    def change(source: Source) -> None:
        for name, dim in gate_up(source):
            halves = source[0][name].split(INNER, dim)
            source[0][name] = torch.stack(halves, dim + 1).flatten(dim, dim + 1)

    weights = graft(make(base, Grid()), base, change, tmp_path, Grid())
    for expert in range(E):
        found(weights, "w13_weight,", f"w1 of expert {expert}", "codes of the source")
    found(weights, "w13_bias", "w3 of expert 0", "bias of the source")


@pytest.mark.parametrize("base", FUSED)
@pytest.mark.parametrize(
    ("stack", "gemm", "role"), [("gate_up_proj", "w13", "w3"), ("down_proj", "w2", "w2")]
)
def test_another_bias(
    base: str, stack: str, gemm: str, role: str, make: Make, tmp_path: Path
) -> None:
    def change(source: Source) -> None:
        source[0][f"{LAYER}.{stack}_bias"][3, 5] += 1

    weights = graft(make(base), base, change, tmp_path)
    row = 2 if gemm == "w13" else 5  # gate and up in turns
    found(
        weights,
        f"{LAYER}.{gemm}_bias, {role} of expert 3",
        "bias of the source",
        f"at [{row}]",
        "1 of 256 differ",
    )
    assert len(weights.findings) == 1


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
