"""The kernel check on a GPU: good artifacts pass, damaged ones are found. Without a GPU, its refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hqconv
from hqconv.artifact import load as experts_module
from hqconv.artifact.load import decoded_experts
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError, VerificationError
from hqconv.humming_ops.runtime import humming
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16
from hqconv.schemas.options import load_recipe
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.sources.opening import open_source
from hqconv.verification import verify as module
from hqconv.verification.kernel import (
    TokenBatch,
    _compare_source,
    _recorded,
    in_order,
    source_experts,
)
from hqconv.verification.reference import Routing, moe_forward
from hqconv.verification.result import CheckResult, VerificationReport
from hqconv.verification.tolerances import ErrorStats, Tolerances, check_figures
from hqconv.verification.verify import _kernel_device
from tests.make.artifacts import make_source
from tests.make.conversions import run
from tests.make.damage import Damaged
from tests.make.formats import write
from tests.make.models import save_model
from tests.make.qwen import write_qwen3_moe

CPU = torch.device("cpu")
LAYER, FIRST = "model.layers.1.mlp.experts", "model.layers.0.mlp.experts"
ROTATED = WeightSchema("rotated", "uint4", weight_scale_group_size=64, hadamard_block_size=64)
cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 6}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("kernel") / "source", "qwen3_moe", **SIZES)


def check(out: Path, source: Path, **options: Any) -> VerificationReport:
    return hqconv.verify(out, source, checks=["kernel"], **options)


@cuda
@needs_gpu
@pytest.mark.parametrize(
    ("schema", "grid"),
    [
        *((schema, Grid(2, 2)) for schema in ("mxfp4", "int4-g64-zp", "nvfp4", "fp8", ROTATED)),
        ("mxfp4", Grid(1, 4, "round_robin", 2)),
    ],
    ids=str,
)
def test_good_artifacts_pass(
    source: Path, tmp_path: Path, schema: str | WeightSchema, grid: Grid
) -> None:
    run(source, tmp_path / "out", schema, grid)
    report = check(tmp_path / "out", source, layers=[1])
    assert report.passed, report.to_dict()
    (measured,) = report.results[0].measured.values()
    assert 0 < measured["kernel"] < 0.0105
    assert measured["routed_by"] == "the checkpoint's router"


def other_group_size(copy: Damaged) -> None:
    def edit(header: dict[str, Any]) -> None:
        config = json.loads(header["__metadata__"]["w13"])
        header["__metadata__"]["w13"] = json.dumps({**config, "weight_scale_group_size": 64})

    copy.edit_header(copy.path, edit)


def shift_scales(copy: Damaged) -> None:
    for expert in range(SIZES["num_experts"] // 2):
        scales = copy.expert_bytes(copy.path, f"{FIRST}.w13_weight_scale", expert)
        scales[:] = np.roll(scales, 1)


DAMAGES: dict[str, Callable[[Damaged], object]] = {
    "experts": lambda copy: copy.swap_experts(copy.path, ("w2",)),
    "scales": shift_scales,
    "ranks": lambda copy: copy.swap_files(*(copy.rank_file(FIRST, t, 0) for t in (0, 1))),
    "group size": other_group_size,
}


@cuda
@needs_gpu
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(source: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    run(source, out, "mxfp4", Grid(2, 2))
    DAMAGES[damage](Damaged(out, source, "mxfp4"))
    assert check(out, source, layers=[0]).results[0].findings


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


def test_on_the_cpu_no_kernel_runs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_is_no_number_never_passes() -> None:
    """NaN compares false with everything, so each comparison must be written the other way round."""
    tally = ErrorStats()
    wanted = torch.ones(32, 4, dtype=torch.float64)
    tally.add(wanted, wanted)
    assert (tally.error(), tally.worst_batch) == (0.0, 0.0)
    tally.add(torch.where(torch.eye(32, 4) > 0, torch.nan, wanted), wanted)
    good = {
        "kernel": 0.001,
        "channel": 0.001,
        "batch": 0.001,
        "worst_rank": "-",
        "worst_channel": "-",
    }
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
    assert (
        findings(weights_against_source={"w2": 1.41}) == 1
    )  # gate and up swapped, say: not excused by itself


# --- around the kernel: experts read ahead and held to the source


def against_source(
    artifact: Artifact, source: Source, layer: MoeLayer, batch: TokenBatch
) -> dict[str, Any]:
    """Compare decoded weights with the source's, as the check does."""
    experts = partial(decoded_experts, artifact, artifact.moe_layer(layer.name), CPU, 2)
    found, _ = moe_forward(batch.x.double(), batch.routing, in_order(experts()), Activation("silu"))
    original = in_order(source_experts(source, layer, CPU, 2))
    return _compare_source(Activation("silu"), batch, found, in_order(experts()), original)


@pytest.mark.parametrize("batch", [1, 1 << 30])
@pytest.mark.parametrize(
    ("source", "schema", "grid"),
    [("plain", "nvfp4", Grid(2, 2)), ("uneven/gpt_oss_floats", "mxfp4", Grid(4))],
)
def test_experts_are_those_of_dequantize(
    source: str,
    schema: str,
    grid: Grid,
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, and with experts left out."""
    monkeypatch.setitem(experts_module._BATCH_WEIGHTS, "cpu", batch)
    run(make_source(source, tmp_path), tmp_path / "out", schema, grid)
    with Artifact(tmp_path / "out") as artifact:
        name = next(iter(artifact.layers))
        expected = hqconv.dequantize(tmp_path / "out", layer=name)
        found = in_order(decoded_experts(artifact, artifact.moe_layer(name), CPU, 2))
        for expert in (0, 2, 3):
            one = found(expert)
            assert one.keys() == expected.keys()
            assert all(torch.equal(one[key], expected[key][expert]) for key in one)


def test_what_no_conversion_writes_is_refused(tmp_path: Path) -> None:
    """In the words of the weights check."""
    source = write_qwen3_moe(tmp_path / "src")
    run(source, tmp_path / "out", "mxfp4", Grid(2, 2))
    copy = Damaged(tmp_path / "out", source, "mxfp4")
    name = f"{FIRST}.w13_weight"
    copy.flip(copy.path, name, byte=copy.header(copy.path)[0][name]["shape"][2] * 4 - 1, mask=0x40)
    with Artifact(copy.root) as artifact:
        found = decoded_experts(artifact, artifact.moe_layer(FIRST), CPU, 2)
        with pytest.raises(
            VerificationError, match=r"no conversion writes[^$]*expert 2 \(local 0\)"
        ):
            list(found)


def test_errors_of_decoded_weights_are_plain_arithmetic(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src", intermediate_size=256)
    run(src, tmp_path / "out", "mxfp4", Grid(2, 1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(16)])
    batch = TokenBatch(
        torch.randn(16, 128, generator=generator).bfloat16(),
        Routing(ids, torch.rand(16, 2)),
        "seeded",
    )
    with Artifact(tmp_path / "out") as artifact, open_source(src) as source:
        layer = source.map_experts().layers[0]
        measured = against_source(artifact, source, layer, batch)
        exact = [source.read_expert(layer, e, layer.roles, CPU) for e in range(4)]
    values = hqconv.dequantize(tmp_path / "out", layer=FIRST)
    for role, error in measured["weights_against_source"].items():
        w = torch.stack([one[role].values().double() for one in exact])
        assert error == pytest.approx(
            float((values[role].double() - w).norm() / w.norm()), rel=1e-12
        )
    assert 0 < measured["against_source"] < 0.5


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_any_expert_whose_scales_were_rounded_may_be_hit(expert: int, tmp_path: Path) -> None:
    """One scale a matrix: the experts' errors differ, and a batch may see the worst one only."""
    src = write(tmp_path / "src", "ct-naive-int8").folder
    run(src, tmp_path / "out", "int8")
    generator = torch.Generator().manual_seed(expert)
    ids = torch.full((16, 1), expert)
    batch = TokenBatch(
        torch.randn(16, 384, generator=generator).bfloat16(), Routing(ids, torch.ones(16, 1)), ""
    )
    good = {"kernel": 0.0, "channel": 0.0, "batch": 0.0, "worst_rank": "-", "worst_channel": "-"}
    with Artifact(tmp_path / "out") as artifact, open_source(src) as source:
        layer = source.map_experts().layers[0]
        measured = good | against_source(artifact, source, layer, batch)
        errors = artifact.layers[layer.name].quantization_error
    recorded = {role: _recorded(error) for role, error in errors.items()}
    for role, error in errors.items():
        assert recorded[role] >= error.worst_relative_error * (1 - 1e-6)
        assert recorded[role] == error.largest_scale_change > 1.01 * error.relative_error
    for factor in (1.0, 1.3 * 2.0**-8 / max(measured["weights_against_source"].values())):
        worse = {role: factor * e for role, e in measured["weights_against_source"].items()}
        result = CheckResult("kernel")
        limits = Tolerances.of(A16, "bfloat16")
        check_figures(
            result, layer.name, {**measured, "weights_against_source": worse}, limits, recorded
        )
        assert bool(result.findings) == (factor > 1), result.findings


# --- another compiler than the artifact's

DEVICE = torch.device("cuda", 0)


def machine(monkeypatch: pytest.MonkeyPatch, sm_version: int, cuda: str) -> None:
    """What torch and Humming find: a GPU, and a compiler, or none of it for a text that is no version."""
    humming()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(sm_version, 10))
    compiler = type("Compiler", (), {"signature": staticmethod(lambda: f"nvrtc+{cuda}")})
    runtime = importlib.import_module("humming.jit.runtime").KernelRuntime
    monkeypatch.setattr(runtime, "_get_compiler", lambda: compiler)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("compiler") / "model")


# Artifact's target, compiler, schema and dtype; compilers with the same layout, and with another.
CASES = [
    (89, "12.8", "fp8", "float16", ("11.8", "13.0"), "11.7"),
    (89, "11.7", "fp8", "float16", ("11.5",), "12.8"),
    (100, "12.8", "mxfp4", "bfloat16", ("12.6", "13.1"), "13.2"),
    (120, "13.2", "fp8", "bfloat16", ("14.0",), "13.0"),
    (100, "12.7", "fp6-e3m2", "float16", ("13.2",), "12.6"),
]


def name_of(case: object) -> str:
    return " ".join(map(str, case)) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_only_a_compiler_of_the_same_layout_is_good(
    case: tuple[int, str, str, str, tuple[str, ...], str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sm_version, cuda, schema, dtype, alike, other = case
    run(model, tmp_path / "out", schema, target=f"sm{sm_version}", cuda=cuda, dtype=dtype)
    with Artifact(tmp_path / "out") as artifact:
        for version in (cuda, *alike):
            machine(monkeypatch, sm_version, version)
            assert _kernel_device(artifact, DEVICE) == (DEVICE, "")
        machine(monkeypatch, sm_version, other)
        device, why = _kernel_device(artifact, DEVICE)
        assert device is None
        for word in (f"sm{sm_version}, CUDA {cuda}", f"CUDA {other} here", "use_native_dequant"):
            assert word in why


def test_of_mixed_layers_one_is_enough(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text('[[override]]\nlayers = "-1"\nschema = "fp8"\n')
    overrides = load_recipe(tmp_path / "recipe.toml").overrides
    run(
        model,
        tmp_path / "out",
        "int4",
        target="sm89",
        cuda="12.8",
        dtype="float16",
        overrides=overrides,
    )
    with Artifact(tmp_path / "out") as artifact:
        machine(monkeypatch, 89, "12.0")
        assert _kernel_device(artifact, DEVICE) == (DEVICE, "")
        machine(monkeypatch, 89, "11.0")
        assert _kernel_device(artifact, DEVICE)[0] is None


def test_where_nothing_depends_on_it_no_compiler_is_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "out", "int4", target="sm89")
    run(model, tmp_path / "fp8", "fp8", target="sm89", dtype="float16", cuda="12.8")
    machine(monkeypatch, 89, "none")
    with Artifact(tmp_path / "out") as artifact:
        assert _kernel_device(artifact, DEVICE) == (DEVICE, "")
    with Artifact(tmp_path / "fp8") as artifact:
        device, why = _kernel_device(artifact, DEVICE)
        assert device is None
        assert "finds none here" in why
