"""The kernel check with quantized activations: on the CPU with kernels that stand in, on a GPU with Humming's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.kernel_layout.fused_moe import Gemm, fused_moe, load_gemm
from hqconv.kernel_layout.transform import kernel_form, why_not
from hqconv.schemas.activation import Activation
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import GROUPS, Grid
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema, KernelSpec
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.verification import kernel as module
from hqconv.verification.kernel import LayerInputs, Rounding
from hqconv.verification.reference import Routing, moe_forwards
from hqconv.verification.result import CheckResult
from hqconv.verification.tolerances import KERNEL_ERROR, Tolerances, kind_of_inputs
from hqconv.verification.verify import _kernel_device
from scripts.check_gpu import SCHEMAS
from tests.make import standin
from tests.make.conversions import kernel_spec_of, run
from tests.make.models import save_model
from tests.make.standin import Damage

NUM_EXPERTS, HIDDEN, INNER = 4, 256, 128
LAYER = "model.layers.0.mlp.experts"
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": 2 * INNER, "num_experts": NUM_EXPERTS}
_STATIC = InputSchema("fp8-static", "float8e4m3", input_quant_mode="static_tensor")
QUANTIZED = {  # what a LayerConfig says of activations, on GPUs that run them
    name: kernel_form(
        256, 512, KernelSpec(resolve_schema(schema), "bfloat16", GpuTarget(sm_version), inputs)
    ).config
    for name, inputs, schema, sm_version in (
        *(
            (name, INPUT_PRESETS[name], "int4-c", 89)
            for name in ("fp8", "fp8-e5m2", "int8", "int4")
        ),
        ("fp8-g128", INPUT_PRESETS["fp8-g128"], "fp8-block", 90),
        ("fp8-static", _STATIC, "int4-c", 89),
        *((name, INPUT_PRESETS[name], name, 120) for name in ("mxfp8", "mxfp4", "nvfp4")),
    )
}


class Config:
    """What `backends/moe` and the stand-in ask of a LayerConfig, for activations of any target."""

    def __init__(self, words: dict[str, Any], n: int, k: int) -> None:
        from humming.config import InputQuantizationMode
        from humming.dtypes import DataType

        self.a_dtype, self.as_dtype = (
            DataType.from_str(words["a_dtype"]),
            DataType.from_str(words["as_dtype"]),
        )
        self.input_quant_mode = InputQuantizationMode(words["input_quant_mode"])
        self.input_scale_group_size = words.get("input_scale_group_size", 0)
        self.shape_n, self.shape_k, self.pad_shape_n, self.pad_shape_k = n, k, 0, 0
        self.num_experts = NUM_EXPERTS


def experts(inner: int = INNER) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"w1": (inner, HIDDEN), "w3": (inner, HIDDEN), "w2": (HIDDEN, inner)}
    return [
        {role: torch.randn(shape, generator=generator) * 0.05 for role, shape in shapes.items()}
        for _ in range(NUM_EXPERTS)
    ]


def errors(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> list[float]:
    return [float((f.double() - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", QUANTIZED)
def test_both_gemms_activations_are_quantized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to scale reaches the GEMMs as their launcher wants it, and the intermediate comes back decoded."""
    standin.use(monkeypatch)
    words, weights = QUANTIZED[name], experts()
    stacks = {
        "w13": torch.stack([torch.cat([e["w1"], e["w3"]]) for e in weights]),
        "w2": torch.stack([e["w2"] for e in weights]),
    }
    static = (
        {"w13": torch.tensor([0.012]), "w2": torch.tensor([0.012])} if name == "fp8-static" else {}
    )
    gemms = {
        g: Gemm(Config(words, *w.shape[1:]), {"weight": w}, static.get(g))
        for g, w in stacks.items()
    }
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(19, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(19)])
    routing = Routing(ids, torch.rand(19, 2, generator=generator))
    found = fused_moe(gemms, x, ids, routing.weights, Activation("silu"), True, 38)
    scheme = Rounding.of(words)
    assert scheme is not None
    plain = {"w13": 0, "w2": 0}
    inputs = LayerInputs(
        {"w13": scheme, "w2": scheme}, plain, static, ((0, INNER),), torch.bfloat16
    )
    exact, rounded = moe_forwards(
        x.double(),
        routing,
        lambda e: weights[e],
        Activation("silu"),
        [module.EXACT, inputs.reference()],
    )
    assert max(errors(found, rounded)) < 0.004  # bfloat16 outputs
    kind = name.removesuffix("-static")
    error = KERNEL_ERROR[kind, "bfloat16"].exact
    for found_error in errors(found, exact):
        assert 0.7 * error < found_error < 1.4 * error
    some = torch.where(ids < 2, -1, ids)  # the others are another rank's
    away = fused_moe(gemms, x, some, routing.weights, Activation("silu"), True, 38)
    assert not away[1][(ids < 2).reshape(-1)].any()


def small(tmp_path: Path, inputs: str, schema: str, grid: Grid, inner: int = 2 * INNER) -> Artifact:
    source = save_model(
        tmp_path / "source", "qwen3_moe", **{**SIZES, "moe_intermediate_size": inner}
    )
    run(source, tmp_path / "out", schema, grid, input_schema=inputs)
    return Artifact(tmp_path / "out")


def checked(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, damage: Damage = lambda gemms: gemms
) -> CheckResult:
    weights = experts(artifact.layers[LAYER].intermediate_size)
    return standin.check_kernel(artifact, monkeypatch, weights, [LAYER], damage)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grid", [Grid(), Grid(2, 2)], ids=str)
@pytest.mark.parametrize(
    ("inputs", "schema"),
    [("fp8", "mxfp4"), ("fp8-g128", "fp8-block"), ("int8", "int4"), ("fp8", "int4-g64-h64")],
)
def test_the_check_knows_the_rounding(
    inputs: str, schema: str, grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TP ranks each of which rounds its own columns, and with parts of the experts."""
    with small(tmp_path, inputs, schema, grid) as artifact:
        result = checked(artifact, monkeypatch)
    assert not result.findings, result.findings
    measured = result.measured[LAYER]
    error = KERNEL_ERROR[inputs, "bfloat16"].exact
    assert 0.7 * error < measured["kernel"] < 1.4 * error
    assert measured["rounded_kernel"] < 0.005
    assert "rounded activations" in result.notes[0]


@pytest.mark.parametrize(
    ("inputs", "schema", "inner"),
    [("fp8-g128", "fp8-block", 288), ("int8", "int4-g64", 96), ("fp8", "int4-g64", 160)],
)
def test_ranks_of_whole_groups(
    inputs: str, schema: str, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last group that is smaller, and a last rank that holds a group less."""
    with small(tmp_path, inputs, schema, Grid(2, split=GROUPS), inner) as artifact:
        result = checked(artifact, monkeypatch)
        assert not result.findings, result.findings
        assert result.measured[LAYER]["rounded_kernel"] < 0.005
        shifted = checked(artifact, monkeypatch, lambda gemms: {**gemms, "w2": rolled(gemms["w2"])})
    assert shifted.findings


def rolled(gemm: Gemm) -> Gemm:
    """Columns that were cut at another place."""
    return replace(gemm, tensors={"weight": gemm.tensors["weight"].roll(32, -1)})


def exchanged(gemms: dict[str, Gemm]) -> dict[str, Gemm]:
    """Two experts' weights changed places."""
    return {
        g: replace(one, tensors={"weight": one.tensors["weight"].roll(1, 0)})
        for g, one in gemms.items()
    }


def slightly_larger(gemms: dict[str, Gemm]) -> dict[str, Gemm]:
    """A scale is off by less than the activations' own rounding."""
    return {
        **gemms,
        "w2": replace(gemms["w2"], tensors={"weight": gemms["w2"].tensors["weight"] * 1.06}),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", [exchanged, slightly_larger])
def test_the_check_finds_less_than_the_rounding_hides(
    damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(tmp_path, "fp8", "mxfp4", Grid()) as artifact:
        result = checked(artifact, monkeypatch, damage)
    assert any("rounded activations" in finding.what for finding in result.findings)


def test_a_kernel_that_rounds_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales per group where they should be per token, say: as near to the exact activations as a good kernel."""

    def other(gemms: dict[str, Gemm]) -> dict[str, Gemm]:
        words = {**QUANTIZED["fp8-g128"]}
        return {
            g: replace(one, config=Config(words, one.config.shape_n, one.config.shape_k))
            for g, one in gemms.items()
        }

    with small(tmp_path, "fp8", "mxfp4", Grid()) as artifact:
        result = checked(artifact, monkeypatch, other)
    assert result.measured[LAYER]["kernel"] < 1.4 * KERNEL_ERROR["fp8", "bfloat16"].exact
    assert [f.what for f in result.findings if "rounded activations" in f.what]


def test_static_scales_are_read_and_what_they_cut_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that were measured beforehand lie in every rank's file; nothing is said of exact activations then."""
    with small(tmp_path, "fp8", "mxfp4", Grid()) as artifact:
        path = artifact.root / "experts" / "tp0-ep0" / f"{LAYER}.safetensors"
        with safe_open(path, "pt") as file:
            metadata, names = file.metadata(), list(file.keys())
        static = {"w13": torch.tensor([2 / 448]), "w2": torch.tensor([0.04])}
        scales = {f"{LAYER}.{gemm}_input_scale": scale for gemm, scale in static.items()}
        save_file({**load_file(path), **scales}, path, metadata)
        assert not set(scales) & set(names)
        configs = artifact.rank_file(LAYER, 0, 0).configs
        for config in configs.values():
            config["input_quant_mode"] = "static_tensor"

        def with_scales(gemms: dict[str, Gemm]) -> dict[str, Gemm]:
            return {gemm: replace(one, input_scale=static[gemm]) for gemm, one in gemms.items()}

        inputs = replace(artifact.spec.inputs, input_quant_mode="static_tensor")
        monkeypatch.setattr(artifact, "spec", replace(artifact.spec, inputs=inputs))
        found = LayerInputs.of(artifact, LAYER, torch.device("cpu"))
        assert found is not None
        assert {gemm: scale.tolist() for gemm, scale in found.static.items()} == {
            gemm: scale.tolist() for gemm, scale in static.items()
        }
        result = checked(artifact, monkeypatch, with_scales)
    assert not result.findings, result.findings
    clipped = result.measured[LAYER]["clipped"]
    assert clipped["w13"] == pytest.approx(0.0455, rel=0.1)  # beyond two standard deviations
    assert clipped["w2"] == 0.0
    assert any("w13: its scale cuts off 4." in note for note in result.notes)
    loaded = load_gemm(configs["w13"], {"input_scale": static["w13"]})
    assert loaded.input_scale is static["w13"]
    assert not loaded.tensors


def test_activations_without_a_reference_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encodings that are documented nowhere, on a GPU that runs them."""
    with small(tmp_path, "fp8", "mxfp4", Grid()) as artifact:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        device = torch.device("cuda", 0)
        assert _kernel_device(artifact, device) == (device, "")
        inputs = InputSchema("x", "float8e3m4")
        monkeypatch.setattr(artifact, "spec", replace(artifact.spec, inputs=inputs))
        assert _kernel_device(artifact, device) == (
            None,
            "there is no reference for float8e3m4 activations",
        )


def test_every_preset_has_limits() -> None:
    for name, inputs in INPUT_PRESETS.items():
        assert kind_of_inputs(inputs) == name
        limits = Tolerances.of(inputs, "bfloat16")
        assert (limits.rounded is None) == (name == "a16")
        assert limits.rounded is None or limits.rounded < limits.kernel
    static = Tolerances.of(InputSchema("x", "int8", input_quant_mode="static_tensor"), "float16")
    assert static.kernel == float("inf")
    assert static.rounded == Tolerances.of(INPUT_PRESETS["int8"], "float16").rounded
    with pytest.raises(KeyError):
        Tolerances.of(InputSchema("x", "float8e3m4"), "bfloat16")


# On sm90: every kind of weights under narrow activations, every kind of activations under kinds of weights that its
# kernel reads in another way. Each pair compiles kernels of its own.
PAIRS = {
    "fp8": "mxfp4 mxfp8 fp8 fp8-tensor fp6-e3m2 int4 int4-g64-zp int3-g64 int4-c int4-g32-e4m3-row fp4-g32-e8m0-row",
    "fp8-g128": "mxfp4 fp8-block int4-g128-zp",
    "fp8-e5m2": "fp8-e5m2 fp6-e2m3 int5 fp4-g32-e4m3",
    "int8": "mxfp4 int8 int4 int4-g64-zp int7-c int2 int4-g32-e4m3",
}
RUN = [(inputs, schema) for inputs, schemas in PAIRS.items() for schema in schemas.split()]
ROTATED = [("fp8", "int4-g32-e4m3-h32"), ("fp8-g128", "mxfp4-h32"), ("int8", "int4-g64-h64")]
needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm90",
)


def test_every_kind_of_weights_is_run_under_narrow_activations() -> None:
    named = {
        name
        for name in SCHEMAS
        for inputs in PAIRS
        if not why_not(kernel_spec_of(name, inputs=inputs))
    }
    assert named == {schema for _, schema in RUN}


@pytest.mark.cuda
@needs_sm90
@pytest.mark.parametrize(
    ("schema", "inner", "tp"),
    [
        *(
            (name, 288, 2)
            for name in ("int4-g64", "int4-g64-zp", "mxfp4", "nvfp4", "fp8-block", "int8")
        ),
        *(("int4-g64", 96, 2), ("int4-g64", 320, 3)),
    ],
)
def test_the_production_kernel_on_ranks_of_whole_groups(
    schema: str, inner: int, tp: int, tmp_path: Path
) -> None:
    """Groups of 64 in 96 columns, and other sizes that leave the last rank less."""
    source = save_model(
        tmp_path / "source", "qwen3_moe", **{**SIZES, "moe_intermediate_size": inner}
    )
    run(source, tmp_path / "out", schema, Grid(tp, split=GROUPS))
    report = hqconv.verify(tmp_path / "out", source, layers=[1])
    assert report.passed, report.to_dict()


@pytest.mark.cuda
@needs_sm90
@pytest.mark.parametrize(("inputs", "schema"), [*RUN, *ROTATED])
def test_the_production_kernel(inputs: str, schema: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "qwen3_moe", **SIZES)
    run(source, tmp_path / "out", schema, Grid(2, 2), input_schema=inputs)
    report = hqconv.verify(tmp_path / "out", source, checks=["kernel"], layers=[1])
    assert report.passed, report.to_dict()
    (measured,) = report.results[0].measured.values()
    assert 0 < measured["rounded_kernel"] < measured["kernel"]
