"""The kernel check on a GPU: good artifacts pass, damaged ones are found. Without a GPU, its refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hqconv
from hqconv.errors import RequestError
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification import verify as module
from hqconv.verification.result import CheckResult, VerificationReport
from hqconv.verification.tolerances import ErrorStats, Tolerances, check_figures
from tests.make.conversions import run
from tests.make.models import save_model

LAYER = "model.layers.1.mlp.experts"
ROTATED = WeightSchema("rotated", "uint4", weight_scale_group_size=64, hadamard_block_size=64)
cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 6}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("kernel") / "source", "qwen3_moe", **SIZES)


def check(out: Path, source: Path, **options: Any) -> VerificationReport:
    return hqconv.verify(out, source, checks=["kernel"], **options)


def rewrite(path: Path, change: Any) -> None:
    """Load a rank file, let `change(tensors, metadata)` damage it, and write it back."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


@cuda
@needs_gpu
@pytest.mark.parametrize("schema", ["mxfp4", "int4-g64-zp", "nvfp4", "fp8", ROTATED], ids=str)
@pytest.mark.parametrize("grid", [Grid(), Grid(2, 2), Grid(1, 4, "round_robin", 2)], ids=str)
def test_good_artifacts_pass(source: Path, tmp_path: Path, schema: str | WeightSchema, grid: Grid) -> None:
    run(source, tmp_path / "out", schema, grid)
    report = check(tmp_path / "out", source, layers=[1])
    assert report.passed, report.to_dict()
    (measured,) = report.results[0].measured.values()
    assert 0 < measured["kernel"] < 0.0105
    assert measured["routed_by"] == "the checkpoint's router"


def swap_experts(tensors: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    for name, tensor in tensors.items():
        if ".w2_" in name:
            raw = tensor.view(torch.uint8)
            raw[[0, 1]] = raw[[1, 0]].clone()


def shift_rows(tensors: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    name = f"{LAYER}.w13_weight_scale"
    tensors[name] = tensors[name].view(torch.uint8).roll(1, -1).view(tensors[name].dtype)


def other_group_size(_: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    words = json.loads(metadata["w13"])
    metadata["w13"] = json.dumps({**words, "weight_scale_group_size": 64})


@cuda
@needs_gpu
@pytest.mark.parametrize("damage", [swap_experts, shift_rows, other_group_size])
def test_damage_is_found(source: Path, tmp_path: Path, damage: Any) -> None:
    out = tmp_path / "out"
    run(source, out, "mxfp4", Grid(2, 1))
    rewrite(out / "experts" / "tp1-ep0" / f"{LAYER}.safetensors", damage)
    report = check(out, source, layers=[1])
    assert not report.passed
    assert report.results[0].findings


@cuda
@needs_gpu
def test_exchanged_ranks_are_found(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out, "mxfp4", Grid(2, 1))
    first, second = (out / "experts" / f"tp{t}-ep0" / f"{LAYER}.safetensors" for t in (0, 1))
    shutil.move(first, out / "kept")
    shutil.move(second, first)
    shutil.move(out / "kept", second)
    assert not check(out, source, layers=[1]).passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_skipped_or_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out, "mxfp4")
    with pytest.raises(RequestError, match="cannot run here"):
        check(out, source)
    report = hqconv.verify(out)
    assert [r.status for r in report.results] == ["pass", "pass", "skipped"]
    assert "no CUDA device" in report.results[2].skipped
    assert report.passed


def test_on_the_cpu_no_kernel_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--device cpu means it, also on a machine with a GPU."""

    def none(*_: object) -> None:
        raise AssertionError("the kernel was run")

    out = tmp_path / "out"
    run(source, out, "mxfp4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "check_kernel", none)
    report = hqconv.verify(out, device="cpu")
    assert [r.status for r in report.results] == ["pass", "pass", "skipped"]
    assert report.results[2].skipped == "it needs a CUDA device, and --device cpu was asked for"
    with pytest.raises(RequestError, match="cannot run here"):
        hqconv.verify(out, device="cpu", checks=["kernel"])


def test_what_is_asked_for_must_exist(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out, "mxfp4")
    with pytest.raises(RequestError, match="no such check"):
        hqconv.verify(out, checks=["file"])
    with pytest.raises(RequestError, match="no MoE layer of this number"):
        hqconv.verify(out, layers=[9])
    assert not hqconv.verify(out, checks=["weights"], layers=[0]).results[0].findings


def test_what_is_no_number_never_passes() -> None:
    """NaN compares false with everything, so each comparison must be written the other way round."""
    tally = ErrorStats()
    wanted = torch.ones(32, 4, dtype=torch.float64)
    tally.add(wanted, wanted)
    assert (tally.error(), tally.worst_batch) == (0.0, 0.0)
    tally.add(torch.where(torch.eye(32, 4) > 0, torch.nan, wanted), wanted)
    good = {"kernel": 0.001, "channel": 0.001, "batch": 0.001, "worst_rank": "-", "worst_channel": "-"}
    source = {"against_source": 0.1, "weights_against_source": {"w2": 0.1}}
    bad = {"kernel": tally.error(), "channel": tally.worst_channel()[0], "batch": tally.worst_batch}
    limits, recorded = Tolerances.of(A16, "bfloat16"), {"w2": 0.1}

    def findings(**words: Any) -> int:
        result = CheckResult("kernel")
        check_figures(result, LAYER, {**good, **source, **words}, limits, recorded)
        return len(result.findings)

    assert findings() == 0
    for key, value in bad.items():
        assert findings(**{key: value}) == 1, key
    assert findings(against_source=float("nan")) == 1
    assert findings(weights_against_source={"w2": float("nan")}) == 1
    assert findings(weights_against_source={"w2": 1.41}) == 1  # gate and up swapped, say: not excused by itself
