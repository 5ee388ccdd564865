"""`--schema source`: which schema keeps a source, at which TP sizes, and what is said where none does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hqconv import dequantize, plan
from hqconv.errors import InputError, RequestError
from hqconv.models.expert_map import map_experts
from hqconv.planning.layer_encoding import direct_schemas, named, source_schemas
from hqconv.schemas.grid import Grid
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.weight_schema import PRESETS, WeightSchema
from hqconv.sources.opening import open_source
from tests.make import conversions
from tests.make.formats import write


def schema_of(folder: Path, tp: int) -> WeightSchema:
    with open_source(folder) as source:
        (schema,) = set(source_schemas(source.map_experts().layers, "bfloat16", Grid(tp)).values())
        return schema


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 128 x 128 over an intermediate size of 384."""
    return write(tmp_path_factory.mktemp("fp8") / "src", "fp8-block", hidden=512, inner=384).folder


@pytest.mark.parametrize(("tp", "rows"), [(1, 128), (2, 64), (3, 128), (6, 64)])
def test_blocks_shrink_until_no_slice_cuts_one(fp8: Path, tp: int, rows: int) -> None:
    schema = schema_of(fp8, tp)
    assert (schema.weight_scale_group_size_n, schema.weight_scale_group_size) == (rows, rows)
    assert schema.name == ("fp8-block" if rows == 128 else "source")


DEFAULTS = {
    "humming-int4": ("int4-g64", "quantized already (humming"),
    "bnb-nf4": ("int4-g32-e4m3", "since no kernel reads the source's codes"),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_without_a_schema_a_source_keeps_its_codes_if_a_kernel_reads_them(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema, reason = DEFAULTS[name]
    assert plan(write(tmp_path / "src", name).folder, target="sm90").spec.schema.name == schema
    assert reason in caplog.text


def test_without_a_schema_a_missing_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        plan(write(tmp_path / "src", "fp8-channel-f32").folder, target="sm90")
    assert error.value.remedy.startswith("Add --round-scales")


def test_where_no_block_is_small_enough_the_tp_sizes_are_listed(fp8: Path) -> None:
    with pytest.raises(RequestError) as error:
        schema_of(fp8, 12)  # 32 rows a rank, and the kernel loads scales of 64 rows or more
    assert "no kernel loads scales cut like this" in str(error.value)
    assert error.value.remedy.endswith("TP sizes that work: 1, 2, 3, 6.")
    with pytest.raises(RequestError, match="384 columns are not 5 equal slices"):
        schema_of(fp8, 5)


def test_a_preset_that_a_slice_would_cut_points_to_source(fp8: Path) -> None:
    with pytest.raises(RequestError) as error:
        conversions.open_plan(fp8, "fp8-block", Grid(2))
    assert error.value.remedy == (
        "TP sizes that work: 1, 3; --tp 2 works with --tp-split groups. "
        "With --schema source the source's scales are repeated into smaller blocks."
    )
    with pytest.raises(RequestError) as error:
        conversions.open_plan(fp8, "int4", Grid(2))
    assert error.value.remedy == "TP sizes that work: 1, 3; --tp 2 works with --tp-split groups."


def test_direct_schemas_are_those_that_convert_directly(tmp_path: Path) -> None:
    expected = {
        "fp8-block": ["fp8-block", "source (fp8-block)"],
        "fp8-block-e8m0": ["mxfp8", "fp8-block", "source (fp8-block)"],
        "fp8-tensor": ["fp8-block", "fp8-tensor", "source (fp8-block)", "fp8 (scales rounded)"],
        "mxfp4-gpt-oss": ["mxfp4", "source (mxfp4)"],
        "ct-int4-g32": ["source (int4-g32)"],
        "ct-int4-channel": ["int4", "source (int4-c)"],
        "gptq-desc-act": ["source (int4), as far as g_idx allows"],
        "fp8-channel-f32": ["fp8 (scales rounded)", "source --round-scales (fp8)"],
        "quark-int8": ["int8 (scales rounded)", "source --round-scales (int8)"],
        "ct-naive-int8": ["int8 (scales rounded)", "source --round-scales (int8)"],
    }
    for name, schemas in expected.items():
        folder = write(tmp_path / name, name, hidden=512, inner=256).folder
        with open_source(folder) as source:
            experts = source.map_experts()
            assert direct_schemas(experts, "bfloat16") == schemas, name


@pytest.mark.parametrize("name", [*PRESETS, "int4-g32", "int3-c", "int8-g64-zp", "int4-g128-fpzp"])
def test_known_schemas_get_their_names_back(name: str) -> None:
    schema = conversions.schema_of(name)
    assert named(WeightSchema(name="source", **schema.humming_fields())).name == name


def test_one_scale_for_a_whole_stack(tmp_path: Path) -> None:
    """ModelOpt's Llama 4 in fp8: a number for all experts' gates and ups, another for their downs."""
    layer, (e, h, i) = "model.layers.0.feed_forward.experts", (3, 128, 256)
    codes = torch.arange(e * h * 2 * i).to(torch.uint8) % 120
    gate_up, down = codes.view(e, h, 2 * i), codes[: e * i * h].view(e, i, h).clone()
    tensors = {
        f"{layer}.gate_up_proj": gate_up.view(torch.float8_e4m3fn),
        f"{layer}.gate_up_proj_weight_scale": torch.tensor(0.25),
        f"{layer}.down_proj": down.view(torch.float8_e4m3fn),
        f"{layer}.down_proj_weight_scale": torch.tensor([0.75]),
    }
    (tmp_path / "src").mkdir()
    save_file(tensors, tmp_path / "src" / "model.safetensors", {"format": "pt"})
    sizes = {
        "hidden_size": h,
        "intermediate_size": i,
        "num_local_experts": e,
        "num_experts_per_tok": 1,
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
    words = {"model_type": "llama4_text", "hidden_act": "silu", "num_hidden_layers": 1, **sizes}
    config = {**words, "quantization_config": quantization, "torch_dtype": "bfloat16"}
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    for schema in ("source", "fp8-tensor"):
        out = tmp_path / schema
        conversions.run(tmp_path / "src", out, schema, Grid(2))
        conversions.assert_verified(out, tmp_path / "src")
        found = dequantize(out, layer=layer)
        both = gate_up.view(torch.float8_e4m3fn).float().transpose(1, 2) * 0.25
        assert torch.equal(found["w1"], both[:, :i])
        assert torch.equal(found["w3"], both[:, i:])
        assert torch.equal(
            found["w2"], down.view(torch.float8_e4m3fn).float().transpose(1, 2) * 0.75
        )


@pytest.mark.parametrize(
    ("model_type", "inner", "good"),
    [
        ("qwen3_5_moe", 256, True),
        ("qwen3_5_moe", 64, True),  # one row of layers for gate and up
        ("qwen3_5_moe", 96, False),  # two rows, the first for all of gate and a third of up
        ("qwen3_5_moe", 224, False),
        ("qwen3_5_moe", 192, False),
        ("gpt_oss", 256, False),  # gate and up in every layer
        ("gpt_oss", 64, True),
    ],
)
def test_blocks_of_a_stack_must_not_hold_gate_and_up(
    model_type: str, inner: int, good: bool
) -> None:
    layer, (e, h) = "model.layers.0.mlp.experts", (2, 256)
    shapes = {"gate_up_proj": (e, 2 * inner, h), "down_proj": (e, h, inner)}
    refs = {}
    for name, (_, rows, columns) in shapes.items():
        stored = (e, columns, rows) if model_type == "gpt_oss" else (e, rows, columns)
        scale = (e, *(-(-size // 128) for size in stored[1:]))
        for suffix, dtype, shape in (("", "F8_E4M3", stored), ("_scale_inv", "F32", scale)):
            full = f"{layer}.{name}{suffix}"
            refs[full] = TensorRef(
                full, dtype, shape, 0, 0, math.prod(shape) * (4 if suffix else 1)
            )
    sizes = {"num_experts": e, "num_local_experts": e, "num_experts_per_tok": 1, "hidden_size": h}
    config = {"model_type": model_type, "hidden_act": "silu", "intermediate_size": inner, **sizes}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if good:
        assert map_experts(refs, config | {"moe_intermediate_size": inner}, quantization).layers
        return
    with pytest.raises(InputError) as error:
        map_experts(refs, config | {"moe_intermediate_size": inner}, quantization)
    assert f"{layer}.gate_up_proj_scale_inv" in error.value.where


def nvfp4_refs(num_layers: int, plain_layers: tuple[int, ...] = ()) -> dict[str, TensorRef]:
    """DeepSeek's names in ModelOpt's nvfp4, every module with its activation scale; some layers not quantized."""
    refs = {}
    for layer in range(num_layers):
        for e in range(2):
            for word, (n, k) in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
                module = f"model.layers.{layer}.mlp.experts.{e}.{word}_proj"
                parts: dict[str, tuple[str, tuple[int, ...]]] = {
                    "weight": ("U8", (n, k // 2)),
                    "weight_scale": ("F8_E4M3", (n, k // 16)),
                    "weight_scale_2": ("F32", ()),
                    "input_scale": ("F32", ()),
                }
                if layer in plain_layers:
                    parts = {"weight": ("BF16", (n, k))}
                for part, (dtype, shape) in parts.items():
                    refs[f"{module}.{part}"] = TensorRef(f"{module}.{part}", dtype, shape, 0, 0, 64)
    return refs


NVFP4_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "n_routed_experts": 2,
    "hidden_size": 64,
}
NVFP4_CONFIG |= {"num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_hidden_layers": 2}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def test_a_token_prediction_layer_may_be_plain_without_being_ignored() -> None:
    found = map_experts(nvfp4_refs(3, plain_layers=(2,)), NVFP4_CONFIG, NVFP4)
    assert [layer.format.is_float for layer in found.layers] == [False, False, True]
    with pytest.raises(
        InputError, match="declares a quantized module"
    ):  # an ordinary layer may not
        map_experts(nvfp4_refs(3, plain_layers=(1,)), NVFP4_CONFIG, NVFP4)


def test_without_a_gate_one_scale_of_a_tensor_is_kept(tmp_path: Path) -> None:
    layer = "backbone.layers.0.mixer.experts"
    refs = {}
    for e in range(2):
        for word, shape in {"up_proj": (96, 128), "down_proj": (128, 96)}.items():
            for part, dtype, of_part in (("weight", "F8_E4M3", shape), ("weight_scale", "F32", ())):
                name = f"{layer}.{e}.{word}.{part}"
                refs[name] = TensorRef(name, dtype, of_part, 0, 0, 4)
    config = {
        "model_type": "nemotron_h",
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "hidden_size": 128,
    }
    experts = map_experts(refs, config | {"moe_intermediate_size": 96}, {"quant_method": "fp8"})
    assert {s.name for s in source_schemas(experts.layers, "bfloat16", Grid(3)).values()} == {
        "fp8-tensor"
    }


@pytest.mark.parametrize(("inner", "good"), [(128, True), (96, False)])
def test_blocks_of_a_flat_stack_must_not_hold_two_experts(inner: int, good: bool) -> None:
    """dbrx: experts lie one below the other. Two of 96 rows have two rows of layers, the first of both experts."""
    layer, (e, h) = "transformer.blocks.0.ffn.experts.mlp", (2, 256)
    refs = {}
    for name in ("w1", "v1", "w2"):
        scale = (-(-e * inner // 128), h // 128)
        for suffix, dtype, shape in (("", "F8_E4M3", (e * inner, h)), ("_scale_inv", "F32", scale)):
            full = f"{layer}.{name}{suffix}"
            refs[full] = TensorRef(
                full, dtype, shape, 0, 0, math.prod(shape) * (4 if suffix else 1)
            )
    sizes = {"moe_num_experts": e, "moe_top_k": 1, "ffn_hidden_size": inner}
    config = {"model_type": "dbrx", "d_model": h, "n_layers": 1, "ffn_config": sizes}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if good:
        assert map_experts(refs, config, quantization).layers
        return
    with pytest.raises(InputError, match="serves two experts"):
        map_experts(refs, config, quantization)
