"""The plugin in vLLM's own classes, rank by rank on the CPU; judges: vLLM's own processing and safetensors' reader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make import vllm_cpu  # isort: skip  - before vLLM

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils.humming import (
    convert_to_humming_moe_kernel_format,
)
from vllm.model_executor.layers.quantization.utils.humming.moe import get_humming_moe_quant_config
from vllm.model_executor.model_loader.reload import layerwise
from vllm.utils import humming

from hqconv.errors import RequestError
from hqconv.kernel_layout.transform import why_not
from hqconv.schemas.grid import GROUPS, Grid, stored_size, tp_share
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.options import load_recipe
from hqconv.schemas.weight_schema import WeightSchema, pair, resolve_schema
from hqconv.serving.vllm.plugin import register
from tests.make import input_scales, small
from tests.make.conversions import kernel_spec_of, run
from tests.make.filled import write_filled
from tests.make.matrices import SCHEMAS as MATRIX_SCHEMAS
from tests.make.qwen import write_qwen3_moe
from tests.make.vllm_cpu import as_bytes, assert_holds_its_file, build_layer, open_config, parallel

pytestmark = pytest.mark.vllm

LAYER = "model.layers.0.mlp.experts"
SIZES = {"num_experts": 5, "hidden": 256, "inter": 512}
GEMMS = ("w13", "w2")
Options = dict[str, Any]
KIMI: Options = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
}
SCHEMAS = (
    *MATRIX_SCHEMAS,
    "int2-g64",
    "int5-g128",
    "int4-g32-e4m3",
    "int4-g16-e4m3-row",
    "fp4-g32-e8m0-row",
)


def has_split_scales(schema: str, dtype: str) -> bool:
    """Return whether hqconv splits e8m0 scales for float16."""
    weights = resolve_schema(schema)
    is_e8m0 = weights.bs_dtype == "float8e8m0" and not weights.has_row_scale
    return is_e8m0 and dtype == "float16"


GRIDS = {
    "tp1": (Grid(), [parallel()]),
    "tp2": (Grid(tp=2), [parallel(tp=2, tp_rank=r) for r in range(2)]),
    "ep2": (Grid(ep=2), [parallel(ep=2, ep_rank=r) for r in range(2)]),
    "ep2-round-robin": (
        Grid(ep=2, placement="round_robin"),
        [parallel(ep=2, ep_rank=r) for r in range(2)],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def vllm_config() -> Iterator[Any]:
    register()
    register()  # vLLM may call it more than once
    with vllm_cpu.config() as config:
        yield config


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_experts": 5}
    return {
        "bfloat16": write_qwen3_moe(folder / "bf16", **sizes),
        "gpt_oss": small.save(folder / "gpt-oss", small.gpt_oss_mxfp4(320)),
    }


def load(out: Path, name: str = LAYER, **options: Any) -> Any:
    """One layer, loaded."""
    layer = build_layer(open_config(out), name, **{**SIZES, **options})
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_is_like(layer: Any, expected: Any, configs: Any, gemms: tuple[str, ...] = GEMMS) -> None:
    """The same parameters of some GEMMs, LayerConfigs and schemas as a layer that vLLM processed."""
    found, wanted = (
        {name: x for name, x in module.named_parameters() if name.startswith(gemms)}
        for module in (layer, expected)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert torch.equal(as_bytes(found[name]), as_bytes(value)), name
    for gemm in gemms:
        assert layer.humming_configs[gemm].to_str() == configs[gemm].to_str()
        assert layer.weight_schemas[gemm] == expected.weight_schemas[gemm]


def cut(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """One rank's part along a dimension; tensor-level scales have none."""
    if ranks == 1 or tensor.dim() <= dim or tensor.size(dim) == 1:
        return tensor
    return tensor.chunk(ranks, dim)[rank]


def input_schema(name: str) -> Any:
    """vLLM's options for one of ours."""
    fields = resolve_inputs(name).humming_fields()
    return humming.HummingInputSchema(
        **{key: value for key, value in fields.items() if value is not None}
    )


def processed_by_vllm(
    folder: Path,
    schema: str,
    dtype: torch.dtype,
    grid: Any,
    inputs: str = "a16",
    inter: int | None = None,
) -> tuple[Any, Any]:
    """What vLLM makes of the packed experts of one TP rank: its layer and Humming's LayerConfigs.

    Its loader, which refuses some schemas, is left out: the packed tensors are cut and stacked here.
    """
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    layer = torch.nn.Module()
    for gemm, projections in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        for part in ("weight", "weight_scale", "zero_point", "weight_scale_2"):
            keys = [
                [f"{LAYER}.{e}.{p}.{part}" for p in projections]
                for e in range(SIZES["num_experts"])
            ]
            if keys[0][0] not in stored:
                continue
            dim = 0 if gemm == "w13" else 1
            experts = [
                [cut(stored[key], dim, grid.tp_rank, grid.tp_size) for key in row] for row in keys
            ]
            is_shared = experts[0][0].numel() == 1  # gate and up have one scale
            stack = torch.stack(
                [row[0].view(()) if is_shared else torch.cat(row) for row in experts]
            )
            setattr(layer, f"{gemm}_{part}", torch.nn.Parameter(stack, requires_grad=False))
    layer.params_dtype = dtype
    sizes = SIZES if inter is None else {**SIZES, "inter": inter}
    moe = build_layer(None, LAYER, **sizes, dtype=dtype, grid=grid).moe_config
    layer.moe_config = moe
    inner = sizes["inter"] // grid.tp_size
    fields = {key: v for key, v in resolve_schema(schema).humming_fields().items() if v is not None}
    configs = convert_to_humming_moe_kernel_format(
        layer,
        sublayer_configs={
            "w13": {"shape_n": 2 * inner, "shape_k": SIZES["hidden"]},
            "w2": {"shape_n": SIZES["hidden"], "shape_k": inner},
        },
        weight_schema=humming.HummingWeightSchema(**fields),
        input_schema=input_schema(inputs),
        allow_input_schema_fallback=False,
    )
    return layer, configs


@pytest.mark.parametrize(("schema", "grid"), list(itertools.product(SCHEMAS, GRIDS)))
def test_a_layer_is_its_rank_file(
    tmp_path: Path, sources: dict[str, Path], schema: str, grid: str
) -> None:
    """Every schema on every grid: parameters are the file's bytes, in the file's dtypes."""
    ranks, layers = GRIDS[grid]
    run(sources["bfloat16"], tmp_path / "out", schema, ranks)
    groups = 2 if ranks.placement == "round_robin" else None
    for rank in layers:
        options = {"grid": rank, "placement": ranks.placement, "expert_groups": groups}
        layer = load(tmp_path / "out", **options)
        assert_holds_its_file(layer)
        assert layer.quant_method.moe_kernel is not None
        assert layer.quant_method.humming_configs["w13"].num_experts == layer.local_num_experts


def sizes_asked_for(layer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The `hadamard_block_size` that vLLM's experts call Humming with, by GEMM."""
    experts, asked = layer.quant_method.moe_kernel.fused_experts, {}

    def noted(config: Any, inputs: torch.Tensor, **options: Any) -> Any:
        asked[gemm] = options["hadamard_block_size"]
        return inputs, None, None

    monkeypatch.setattr(humming, "may_process_input", noted)
    for gemm in GEMMS:
        experts.process_input(gemm, torch.zeros(1, 256), None)
    return asked


PAIRS = [
    ("int3-g64", "int4-g32-e4m3-row"),
    ("mxfp4", "int8"),
    ("fp8-block", "int4-g64-zp"),
    ("nvfp4", "fp6-e3m2"),
]


@pytest.mark.parametrize("both", PAIRS, ids="+".join)
def test_each_gemm_has_the_schema_of_its_own(
    tmp_path: Path, sources: dict[str, Path], both: tuple[str, str]
) -> None:
    """Of each GEMM what vLLM's processing makes of a checkpoint with its schema alone; vLLM as it is refuses both."""
    source, name = sources["bfloat16"], "+".join(both)
    run(source, tmp_path / "kernel", name, Grid(tp=2))
    for schema in both:
        run(source, tmp_path / schema, schema, layout="checkpoint")
    for rank in range(2):
        grid = parallel(tp=2, tp_rank=rank)
        layer = load(tmp_path / "kernel", grid=grid)
        assert_holds_its_file(layer)
        for gemm, schema in zip(GEMMS, both, strict=True):
            alone = processed_by_vllm(tmp_path / schema, schema, torch.bfloat16, grid)
            assert_is_like(layer, *alone, (gemm,))
    run(source, tmp_path / "packed", name, layout="checkpoint")
    options = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    with pytest.raises(TypeError, match="b_dtype"):
        build_layer(get_quantization_config("humming").from_config(options), LAYER, **SIZES)


def test_inputs_are_rotated_for_the_gemm_that_needs_it(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated = WeightSchema("rotated", "uint3", weight_scale_group_size=64, hadamard_block_size=64)
    run(sources["bfloat16"], tmp_path / "out", pair(rotated, resolve_schema("int4-g32")))
    assert sizes_asked_for(load(tmp_path / "out"), monkeypatch) == {"w13": 64, "w2": 0}


CASES = [
    (inputs, schema, dtype)
    for inputs in ("a16", "fp8", "fp8-g128", "fp8-e5m2", "int8")
    for schema in SCHEMAS
    for dtype in ("bfloat16", "float16")
    if why_not(kernel_spec_of(schema, dtype, inputs=inputs)) is None
]


@pytest.mark.parametrize(("inputs", "schema", "dtype"), CASES)
def test_a_layer_is_what_vllms_own_processing_makes_of_the_packed_weights(
    tmp_path: Path, sources: dict[str, Path], inputs: str, schema: str, dtype: str
) -> None:
    """The same parameters, LayerConfigs, schemas and kernel arguments, whatever the activations."""
    source, param = sources["bfloat16"], getattr(torch, dtype)
    run(source, tmp_path / "packed", schema, layout="checkpoint", dtype=dtype)
    run(source, tmp_path / "kernel", schema, Grid(tp=2), dtype=dtype, input_schema=inputs)
    for rank in range(2):
        grid = parallel(tp=2, tp_rank=rank)
        layer = load(tmp_path / "kernel", grid=grid, dtype=param)
        assert_holds_its_file(layer)
        expected, configs = processed_by_vllm(tmp_path / "packed", schema, param, grid, inputs)
        assert layer.input_schemas == expected.input_schemas
        # vLLM never splits these scales, and saturates what float16 cannot hold
        is_split = has_split_scales(schema, dtype)
        if not is_split:
            assert_is_like(layer, expected, configs)
        quant = layer.quant_method.moe_quant_config
        theirs = get_humming_moe_quant_config(expected, configs)
        for key in ("quant_dtype", "block_shape", "is_block_quantized", "per_act_token_quant"):
            assert getattr(quant, key) == getattr(theirs, key), key
        assert quant.is_block_quantized == (inputs == "fp8-g128")
        kernels = layer.quant_method.moe_kernel.fused_experts
        assert kernels.expects_unquantized_inputs == (inputs != "fp8-g128")


@pytest.mark.parametrize("ep", [1, 2])
def test_static_scales_are_what_the_kernels_divide_by(
    ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's experts hand the file's scale of the right GEMM to Humming, of every rank."""
    source = small.save(tmp_path / "source", input_scales.fp8())
    run(source, tmp_path / "out", "fp8-tensor", Grid(ep=ep), input_schema="fp8-static")
    sizes = {"num_experts": small.E, "hidden": small.HIDDEN, "inter": small.INNER}
    for rank in range(ep):
        layer = load(tmp_path / "out", grid=parallel(ep=ep, ep_rank=rank), **sizes)
        assert_holds_its_file(layer)
        assert layer.input_schemas["w13"] == input_schema("fp8-static")
        experts, asked = layer.quant_method.moe_kernel.fused_experts, {}

        def noted(config: Any, inputs: torch.Tensor, **options: Any) -> Any:
            asked[gemm] = options["token_scales"].tolist()  # noqa: B023 - called in this round
            return inputs, None, None

        monkeypatch.setattr(humming, "may_process_input", noted)
        for gemm in ("w13", "w2"):
            experts.process_input(gemm, torch.zeros(1, small.HIDDEN), torch.zeros(1, small.HIDDEN))
        assert asked == {gemm: [scale] for gemm, scale in input_scales.expected().items()}


def gpt_oss_layer(out: Path, **options: Any) -> Any:
    config = json.loads((out / "config.json").read_text())
    sizes = {
        "num_experts": config["num_local_experts"],
        "hidden": config["hidden_size"],
        "inter": config["intermediate_size"],
    }
    return load(out, **sizes, activation="swigluoai", has_bias=True, **options)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gpt_oss_has_biases_and_gate_before_up(
    tmp_path: Path, sources: dict[str, Path], tp: int
) -> None:
    """An uneven last rank, a bias on the first, and the activation that means gate and up one after the other."""
    run(sources["gpt_oss"], tmp_path / "out", "source", Grid(tp=tp))
    for rank in range(tp):
        layer = gpt_oss_layer(tmp_path / "out", grid=parallel(tp=tp, tp_rank=rank))
        assert_holds_its_file(layer)
        assert layer.activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE
        asked = layer.quant_method.moe_kernel.fused_experts.activation_config
        assert (asked.clamp_limit, asked.alpha, asked.beta) == (7.0, 1.702, 1.0)
        quant = layer.quant_method.moe_quant_config
        assert quant.w1_bias is layer.w13_bias
        assert bool(layer.w2_bias.any()) == (rank == 0)


@pytest.mark.parametrize(
    ("schema", "inner"),
    [("int4-g64", 96), ("int4-g64", 192), ("int4-g64-zp", 96), ("fp8-block", 192), ("mxfp4", 80)],
)
def test_ranks_of_whole_groups(tmp_path: Path, schema: str, inner: int) -> None:
    """The plugin takes them: vLLM knows half of the columns, and the kernel those of the file, as of a filled model.

    The oracle is vLLM's own processing of experts that have the zeros already.
    """
    sizes = {"num_layers": 1, "num_experts": SIZES["num_experts"], "hidden_size": SIZES["hidden"]}
    src = write_qwen3_moe(tmp_path / "src", **sizes, intermediate_size=inner)
    grid = Grid(2, split=GROUPS)
    share = tp_share(inner, 2, resolve_schema(schema))
    filled = write_filled(src, tmp_path / "filled", 2 * share)
    run(src, tmp_path / "out", schema, grid)
    run(filled, tmp_path / "packed", schema, layout="checkpoint")
    for rank in range(2):
        ranks = parallel(tp=2, tp_rank=rank)
        layer = load(tmp_path / "out", inter=inner, grid=ranks)
        assert_holds_its_file(layer)
        w13, w2 = (layer.quant_method.humming_configs[gemm] for gemm in GEMMS)
        assert w13.shape_n - w13.pad_shape_n == 2 * share
        assert w2.shape_k - w2.pad_shape_k == share
        expected, configs = processed_by_vllm(
            tmp_path / "packed", schema, torch.bfloat16, ranks, inter=2 * share
        )
        assert (w13.to_str(), w2.to_str()) == tuple(configs[gemm].to_str() for gemm in GEMMS)
        # padded ranks have scales of zero
        if 2 * share == stored_size(inner, resolve_schema(schema)):
            assert_is_like(layer, expected, configs)


NUMBERED: dict[str, tuple[Options, Options, tuple[str, tuple[float | None, ...]]]] = {
    "gpt_oss says no number": (
        {"model_type": "gpt_oss", "swiglu_limit": 20.0},
        {"activation": "swigluoai"},
        ("swigluoai_uninterleave", (20.0, 1.702, 1.0, None, None)),
    ),
    "kimi says both": (
        KIMI,
        {"activation": "situ", "situ": (4.0, 25.0)},
        ("situ", (None, 1.0, 0.0, 4.0, 25.0)),
    ),
    "kimi says nothing": (KIMI, {"activation": "situ"}, ("situ", (None, 1.0, 0.0, 4.0, 25.0))),
}


def layer_of_numbers(options: Options, tmp_path: Path, asked: Options) -> Any:
    """A layer of experts whose artifact was made from a config with these options."""
    source = small.save(tmp_path / "src", small.with_activation(options))
    run(source, tmp_path / "out", "mxfp4")
    (layer,) = json.loads((tmp_path / "out" / "hqconv.json").read_text())["blocks"]
    has_bias = options["model_type"] == "gpt_oss"
    sizes = {"num_experts": small.E, "hidden": small.HIDDEN, "inter": small.INNER}
    return load(tmp_path / "out", name=layer, has_bias=has_bias, **sizes, **asked)


@pytest.mark.parametrize("case", NUMBERED)
def test_numbers_of_the_activation_reach_the_kernel(case: str, tmp_path: Path) -> None:
    """The artifact's, whether vLLM's model class knows them or not."""
    options, asked, (name, numbers) = NUMBERED[case]
    layer = layer_of_numbers(options, tmp_path, asked)
    assert_holds_its_file(layer)
    assert layer.activation.value == name
    found = layer.quant_method.moe_kernel.fused_experts.activation_config
    assert (found.clamp_limit, found.alpha, found.beta) == numbers[:3]
    assert (found.activation_situ_beta, found.activation_situ_linear_beta) == numbers[3:]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tp": (
        {"grid": parallel(tp=2)},
        r"--tensor-parallel-size 1(.|\n)*hqconv convert \S+ -o .*--tp 2",
    ),
    "dtype": ({"dtype": torch.float16}, "--dtype bfloat16"),
    "experts": ({"num_experts": 8}, "experts"),
    "activation": ({"activation": "gelu"}, "activation"),
    "biases": ({"has_bias": True}, "biases"),
    "weighed inputs": ({"apply_router_weight_on_input": True}, "weigh"),
    "another layer": ({"name": "model.layers.7.mlp.experts"}, "model.layers.7"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_a_parameter_exists(
    tmp_path_factory: pytest.TempPathFactory,
    sources: dict[str, Path],
    what: str,
    request: pytest.FixtureRequest,
) -> None:
    """With the command that mends it; nothing was allocated, nothing was read but headers."""
    out = tmp_path_factory.getbasetemp() / "refused"
    if not out.exists():
        run(sources["bfloat16"], out, "int8")
    options, message = REFUSED[what]
    with pytest.raises(RequestError, match=message):
        load(out, **options)


def test_a_model_that_is_loaded_again_in_place_gets_its_experts(
    tmp_path: Path, sources: dict[str, Path]
) -> None:
    """As vLLM does after a deep sleep: parameters lost, taken away, put back; the kernel stays the same object."""
    run(sources["bfloat16"], tmp_path / "out", "int4-g64-zp")
    model = torch.nn.Module()
    model.experts = layer = load(tmp_path / "out")
    kernel, pointers = layer.quant_method.moe_kernel, [p.data_ptr() for p in layer.parameters()]
    layerwise.record_metadata_for_reloading(model)
    for param in layer.parameters():
        as_bytes(param).zero_()
    layerwise.initialize_layerwise_reload(model)
    assert all(param.is_meta for param in layer.parameters())
    layerwise.finalize_layerwise_reload(model, None)
    assert_holds_its_file(layer)
    assert layer.quant_method.moe_kernel is kernel
    assert sorted(p.data_ptr() for p in layer.parameters()) == sorted(pointers)


def test_a_dummy_load_reads_nothing_and_has_finite_weights(
    tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels divide by scales of activations: these are one."""
    source = small.save(tmp_path / "source", input_scales.fp8())
    run(source, tmp_path / "out", "fp8-tensor", input_schema="fp8-static")
    monkeypatch.setattr(vllm_config.load_config, "load_format", "dummy")
    layer = load(tmp_path / "out", num_experts=small.E, hidden=small.HIDDEN, inter=small.INNER)
    for name, parameter in layer.named_parameters():
        assert parameter.float().unique().tolist() == [float("input_scale" in name)], name


@pytest.mark.parametrize("change", ["model", "manifest"])
def test_other_experts_are_not_loaded_in_place(
    tmp_path: Path,
    sources: dict[str, Path],
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """`reload_weights(weights_path=…)` changes the model's name, `convert --overwrite` what lies in the folder."""
    run(sources["bfloat16"], tmp_path / "out", "int8")
    model_config = SimpleNamespace(dtype=torch.bfloat16, model=str(tmp_path / "out"))
    monkeypatch.setattr(vllm_config, "model_config", model_config)
    model = torch.nn.Module()
    model.experts = load(tmp_path / "out")
    layerwise.record_metadata_for_reloading(model)
    if change == "model":
        model_config.model = "another"
    else:
        run(sources["bfloat16"], tmp_path / "out", "int8", quantizer="mse", overwrite=True)
    with pytest.raises(
        RequestError, match="another" if change == "model" else r"started with(.|\n)*hqconv\.json"
    ):
        layerwise.initialize_layerwise_reload(model)  # before vLLM loads anything


def test_a_model_without_any_of_its_layers_is_not_loaded(
    tmp_path: Path, sources: dict[str, Path]
) -> None:
    """A class that makes no such layers would leave its experts random: vLLM checks no quantized model."""
    run(sources["bfloat16"], tmp_path / "out", "int8")
    config = open_config(tmp_path / "out")
    with pytest.raises(RequestError, match="none of the artifact's experts"):
        config.get_cache_scale_mapper()
    build_layer(config, LAYER, **SIZES)
    assert config.get_cache_scale_mapper() is not None


MIXED = """
[[override]]
layers = "0"
schema = "int4-g64-zp"

[[override]]
layers = "1"
schema = "mxfp4"
input_schema = "fp8"

[[override]]
layers = "2"
schema = "none"
"""


def test_layers_that_differ_are_each_served_as_they_are(tmp_path: Path) -> None:
    """One of another schema, one with other activations, one left as it was, one of the recipe's own schema."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_experts": 5, "num_layers": 4}
    model = write_qwen3_moe(tmp_path / "model", **sizes)
    (tmp_path / "recipe.toml").write_text(MIXED)
    run(model, tmp_path / "out", "fp8", overrides=load_recipe(tmp_path / "recipe.toml").overrides)
    found = []
    for number in (0, 1, 3):
        layer = load(tmp_path / "out", LAYER.replace("0", str(number)))
        assert_holds_its_file(layer)
        config = layer.humming_configs["w13"]
        assert str(layer.weight_schemas["w13"].b_dtype) == str(config.b_dtype)
        found.append((str(config.b_dtype), str(config.a_dtype)))
    assert [inputs for _, inputs in found] == ["bfloat16", "float8e4m3", "bfloat16"]
    assert len({weights for weights, _ in found}) == 3
    left = build_layer(open_config(tmp_path / "out"), LAYER.replace("0", "2"), **SIZES)
    assert type(left.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    assert left.w13_weight.dtype == torch.bfloat16
