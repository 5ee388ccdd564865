"""Artifacts for every activation and GPU: decoded, verified, damaged and converted again."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.schemas.grid import Grid
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.sources.opening import open_source
from tests.make.artifacts import make_source
from tests.make.conversions import assert_verified, check, open_plan, run
from tests.make.damage import LAYER, Damaged, check_both_ways
from tests.make.kernel_tensors import raw
from tests.make.qwen import write_qwen3_moe

HIDDEN, NUM_EXPERTS = 384, 4
GRIDS = (Grid(), Grid(tp=2, ep=2))
Make = Callable[..., Path]
Pair = tuple[str, ...]


def rows_of(table: str) -> tuple[Pair, ...]:
    return tuple(tuple(row.split()) for row in table.split(","))


# schema, input schema, target: every order of codes and of scales at least once
PAIRS = rows_of("""
    mxfp4 fp8 sm100, mxfp4 fp8 sm120, mxfp8 mxfp8 sm103, mxfp4 mxfp4 sm120, nvfp4 nvfp4 sm100,
    nvfp4 nvfp4 sm121, int4 fp8 sm90, fp6-e3m2 fp8 sm90, int4-g32 fp8 sm89, int4-g32-zp fp8 sm90,
    fp8 fp8 sm90, fp8-block fp8-g128 sm90, fp8-block fp8-g128 sm100, fp8-tensor fp8 sm100,
    fp8-e5m2 fp8-e5m2 sm90, fp8 fp8 sm120, int8 int8 sm80, int8 int8 sm100, int4 int8 sm90,
    int2-g64 int4 sm89, int4 int4 sm86, int3 int4 sm75, mxfp4 a16 sm121, mxfp8 a16 sm75,
    int4-g128-fpzp a16 sm80, mxfp8 fp8 sm89, int4-c fp8 sm120
""")
FUSED = rows_of("""
    mxfp4 fp8 sm90, mxfp4 fp8-g128 sm90, mxfp4 int8 sm80, mxfp4 int8 sm100
""")


def inner_of(schema: str) -> int:
    """An intermediate size of which a rank's rows are padded, if groups can be cut so."""
    return 256 if resolve_schema(schema).weight_scale_group_size > 32 else 192


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    @functools.cache
    def make(inner: int) -> Path:
        """Weights whose exponents lie further apart than fp8 or int8 can add, and all below the 1.0 of padding."""
        folder = tmp_path_factory.mktemp("pairs") / "src"
        sizes = {"hidden_size": HIDDEN, "intermediate_size": inner}
        write_qwen3_moe(folder, num_layers=1, num_experts=NUM_EXPERTS, **sizes)
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(7)
        for name, tensor in tensors.items():
            if name.startswith(LAYER):
                groups = torch.randint(
                    -20, -2, (tensor.size(0), tensor.size(1) // 32), generator=generator
                )
                tensors[name] = (tensor * 2.0 ** groups.repeat_interleave(32, 1)).bfloat16()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="module")
def make(source: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def out(pair: Pair, grid: Grid, dtype: str | None = None) -> Path:
        folder = tmp_path_factory.mktemp("out") / "out"
        schema, inputs, target = pair
        words = {"input_schema": inputs, "target": target, "dtype": dtype or dtype_of(pair)}
        if (target, inputs) == ("sm121", "a16"):
            words["cuda"] = "13.2"
        run(source(inner_of(schema)), folder, schema, grid, **words)
        return folder

    return out


def dtype_of(pair: Pair) -> str:
    return "float16" if pair[2] == "sm75" else "bfloat16"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("pair", "grid"), [(pair, GRIDS[n % 2]) for n, pair in enumerate(PAIRS)], ids=str
)
def test_artifacts_decode_to_the_weights_of_the_plain_layout(
    pair: Pair, grid: Grid, make: Make, source: Callable[[int], Path]
) -> None:
    """The layout for 16-bit activations: tests/layout_decoder compares it with Humming."""
    out, src, dtype = make(pair, grid), source(inner_of(pair[0])), dtype_of(pair)
    found = hqconv.dequantize(out, layer=LAYER)
    for role, values in plain_weights(pair[0], dtype, make).items():
        if (pair[0], dtype) == ("mxfp8", "float16"):  # its smallest scales are zeros there
            assert (found[role] != 0).float().mean() > 0.9
        assert torch.equal(found[role].view(torch.int32), values.view(torch.int32)), role
    report = check(out, src, "files", "weights")
    assert report.passed, [f for result in report.results for f in result.findings]
    with Artifact(out) as artifact, open_source(src) as opened:
        assert check_both_ways(artifact, opened).findings == []


def plain_weights(schema: str, dtype: str, make: Make) -> dict[str, torch.Tensor]:
    return hqconv.dequantize(make((schema, "a16", "sm90"), Grid(), dtype), layer=LAYER)


# --- exponents fused into codes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "grid"), [*zip(("bfloat16", "float16"), GRIDS, strict=True)], ids=str
)
@pytest.mark.parametrize("pair", FUSED, ids="-".join)
def test_fused_artifacts_lose_little_and_verify(
    pair: Pair, grid: Grid, dtype: str, make: Make, source: Callable[[int], Path]
) -> None:
    """Their bits: tests/layout_decoder/test_kernel_specs.py."""
    src, out = source(inner_of(pair[0])), make(pair, grid, dtype)
    found = hqconv.dequantize(out, layer=LAYER)
    for role, values in plain_weights(pair[0], dtype, make).items():
        loss = float((found[role] - values).norm() / values.norm())
        assert 0 < loss < 0.02, role  # what is small beside its neighbours
    report = check(out, src, "files", "weights")
    assert report.passed, [f for result in report.results for f in result.findings]
    assert check(out, None, "files", "weights").passed
    with Artifact(out) as artifact, open_source(src) as opened:
        assert check_both_ways(artifact, opened).findings == []


@pytest.mark.parametrize("grid", GRIDS, ids=("one", "tp2-ep2"))
def test_fused_artifacts_cannot_be_sources(grid: Grid, make: Make, tmp_path: Path) -> None:
    for pair in FUSED:
        with pytest.raises(RequestError, match="exponents were folded into the codes") as caught:
            run(make(pair, grid), tmp_path / "again", "source")
        assert caught.value.remedy == "Convert the original again."
        with pytest.raises(RequestError, match="exponents were folded"):
            open_plan(make(pair, grid), "int4")


# --- faults ------------------------------------------------------------------------------------------------

DAMAGED = (*FUSED, *PAIRS[3:5])


def damaged(pair: Pair, make: Make, source: Callable[[int], Path], folder: Path) -> Damaged:
    """A copy of an artifact of experts 2 and 3 on rank (1, 1)."""
    shutil.copytree(make(pair, Grid(tp=2, ep=2)), folder)
    return Damaged(folder, source(inner_of(pair[0])), pair[0])


@pytest.mark.parametrize("pair", DAMAGED, ids="-".join)
def test_faults_are_found(
    pair: Pair, make: Make, source: Callable[[int], Path], tmp_path: Path
) -> None:
    """One bit of a weight, of a scale, and two experts exchanged: in batches and one by one."""
    for index, (gemm, tensor) in enumerate(
        (g, t) for g in ("w13", "w2") for t in ("weight", "weight_scale")
    ):
        copy = damaged(pair, make, source, tmp_path / str(index))
        copy.flip(copy.path, f"{LAYER}.{gemm}_{tensor}", local=1, byte=5, mask=2)
        weights = copy.check()[1]
        assert weights.findings
        assert any("expert 3" in f.where for f in weights.findings), weights.findings
        assert not any("expert 2" in f.where for f in weights.findings), weights.findings
        shutil.rmtree(copy.root)
    copy = damaged(pair, make, source, tmp_path / "swapped")
    copy.swap_experts(copy.path, ("w13", "w2"))
    assert copy.check()[1].findings


@pytest.mark.parametrize("inputs", ["fp8", "int8", "fp8-g128"])
def test_fused_artifacts_of_a_padded_last_rank(inputs: str, tmp_path: Path) -> None:
    """GPT-OSS, dealt unevenly: rows and columns that the last rank has not are no matter to the others."""
    source = make_source("uneven/gpt_oss_floats", tmp_path)
    run(source, tmp_path / "out", "mxfp4", Grid(4, 2, "round_robin", 2), input_schema=inputs)
    assert_verified(tmp_path / "out", source)
    with Artifact(tmp_path / "out") as artifact, open_source(source) as opened:
        assert check_both_ways(artifact, opened).findings == []


# --- as a source -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_pair_becomes_any_other(pair: Pair, make: Make, tmp_path: Path) -> None:
    """Back to 16-bit activations on sm90, and again to the pair: its own bytes."""
    if dtype_of(pair) == "float16":
        pytest.skip("scales are lost for float16")
    first, words = make(pair, Grid(tp=2, ep=2)), {"input_schema": pair[1], "target": pair[2]}
    if (pair[2], pair[1]) == ("sm121", "a16"):
        words["cuda"] = "13.2"
    run(first, tmp_path / "plain", "source", Grid())
    run(tmp_path / "plain", tmp_path / "again", "source", Grid(tp=2, ep=2), **words)
    for path in sorted((first / "experts").rglob("*.safetensors")):
        again = load_file(tmp_path / "again" / path.relative_to(first))
        for name, tensor in load_file(path).items():
            assert np.array_equal(raw(again[name]), raw(tensor)), (path, name)
