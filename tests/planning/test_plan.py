"""The plan: headers the safetensors library reads, bounded shards, refusals that help."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from hqconv.errors import RequestError
from hqconv.io.checkpoint_files import SidecarFiles
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.planning import output_units
from hqconv.planning.output_units import CopiedShardPlan, build_file
from hqconv.planning.plan import ConversionPlan, make_plan
from hqconv.planning.spec import ConversionSpec, default_param_dtype
from hqconv.schemas import artifact_names
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema
from hqconv.schemas.tensors import DTYPES, TensorRef, TensorSpec, num_bits
from hqconv.schemas.weight_schema import WeightSchema
from tests.make.conversions import schema_of
from tests.make.matrices import SCHEMAS

QWEN = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}


def synthetic(layers: int = 2, dtype: str = "BF16") -> tuple[Any, ExpertMap]:
    """What planning sees of a Qwen3-MoE checkpoint: names, shapes, sizes; there are no files."""
    experts, hidden, inner = 5, 128, 256
    tensors: dict[str, TensorRef] = {}
    width = num_bits(dtype) // 8

    def put(name: str, *shape: int) -> None:
        last = next(reversed(tensors.values()), None)
        offset = last.offset_bytes + last.num_bytes if last else 0
        tensors[name] = TensorRef(name, dtype, shape, 0, offset, math.prod(shape) * width)

    put("model.embed_tokens.weight", 96, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        put(f"{prefix}.input_layernorm.weight", hidden)
        put(f"{prefix}.mlp.gate.weight", experts, hidden)
        for expert in range(experts):
            put(f"{prefix}.mlp.experts.{expert}.gate_proj.weight", inner, hidden)
            put(f"{prefix}.mlp.experts.{expert}.up_proj.weight", inner, hidden)
            put(f"{prefix}.mlp.experts.{expert}.down_proj.weight", hidden, inner)
    words = {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
    }
    checkpoint = SimpleNamespace(
        listing=None,
        root=Path("model"),
        place=Path("model"),
        name="model",
        repo_id=None,
        revision=None,
        config={**QWEN, **words},
        quantization=None,
        files=(),
        tensors=tensors,
        index_sha256=None,
        read_into=None,
        sidecar_files=SidecarFiles(("tokenizer.json",)),
    )
    return checkpoint, map_experts(tensors, checkpoint.config)


def plan_of(
    source: tuple[Any, ExpertMap],
    schema: str | WeightSchema = "mxfp4",
    grid: Grid | None = None,
    layout: str = "kernel",
    **more: Any,
) -> ConversionPlan:
    words: dict[str, Any] = {"param_dtype": "bfloat16", "target": GpuTarget(90), **more}
    target = schema_of(schema) if isinstance(schema, str) else schema
    return make_plan(
        *source, ConversionSpec(schema=target, grid=grid or Grid(), layout=layout, **words)
    )


# --- files -------------------------------------------------------------------------------------------------

# The library's sub-byte types have to fill whole bytes.
specs = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
        lambda n: n != "__metadata__"
    ),
    st.tuples(
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 5), max_size=3).map(lambda shape: (*shape, 8)),
    ),
    max_size=12,
)


@given(chosen=specs)
def test_a_planned_file_is_read_by_the_library(
    chosen: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    metadata = {"format": "pt", "w13": '{"a": "ключ"}'}
    file = build_file(
        "x.safetensors", [TensorSpec(name, *rest) for name, rest in chosen.items()], metadata
    )
    content = bytearray(file.header + bytes(file.size_bytes - len(file.header)))
    for number, tensor in enumerate(file.tensors.values()):
        end = tensor.offset_bytes + tensor.num_bytes
        content[tensor.offset_bytes : end] = bytes([number + 1]) * tensor.num_bytes
        width = max(num_bits(tensor.dtype) // 8, 1)
        assert tensor.offset_bytes % width == 0, tensor
    assert len(content) == file.size_bytes
    assert len(file.header) % 8 == 0
    parsed = dict(safetensors.deserialize(bytes(content)))
    assert {n: (t["dtype"], tuple(t["shape"])) for n, t in parsed.items()} == chosen
    for number, name in enumerate(file.tensors):
        assert set(parsed[name]["data"]) <= {number + 1}
    assert json.loads(file.header[8:])["__metadata__"] == metadata


# --- places ------------------------------------------------------------------------------------------------


def test_a_single_shard_has_an_index_beside_the_experts_folders_only() -> None:
    checkpoint, experts = synthetic(layers=1)
    alone = (checkpoint, dataclasses.replace(experts, copied=()))
    found = {
        (
            layout,
            len([unit for unit in plan.units if "/" not in unit.files[0].path]),
        ): artifact_names.INDEX in plan.paths
        for layout in (artifact_names.KERNEL, artifact_names.CHECKPOINT)
        for plan in (plan_of((checkpoint, experts), layout=layout), plan_of(alone, layout=layout))
    }
    kernel, packed = artifact_names.KERNEL, artifact_names.CHECKPOINT
    assert found == {(kernel, 1): True, (kernel, 0): False, (packed, 2): True, (packed, 1): False}


# --- refusals ----------------------------------------------------------------------------------------------


def refused(*args: Any, **words: Any) -> str:
    with pytest.raises(RequestError) as caught:
        plan_of(*args, **words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        ({"target": GpuTarget(75)}, "sm75 has no bfloat16"),
        (
            {"target": GpuTarget(75), "inputs": INPUT_PRESETS["fp8"], "param_dtype": "float16"},
            "has no kernel for float4e2m1 weights",
        ),
        (
            {"inputs": INPUT_PRESETS["fp8"], "schema": schema_of("nvfp4")},
            "nvfp4 with --input-schema a16; fp8 activations with --schema mxfp4",
        ),
        (
            {"inputs": InputSchema("x", "float8e4m3", input_quant_mode="static_tensor")},
            "has no static activation scales",
        ),
        ({"target": GpuTarget(100), "param_dtype": "float16"}, "--cuda"),
        ({"layout": "checkpoint", "grid": Grid(tp=2)}, "--layout checkpoint"),
        ({"layout": "checkpoint", "grid": Grid(redundant=1)}, "--redundant-experts"),
        ({"schema": WeightSchema("odd", "uint4", "float16", "channel")}, "bs_dtype"),
        (
            {
                "schema": WeightSchema("odd", "uint4", "bfloat16", "channel"),
                "param_dtype": "float16",
            },
            "bs_dtype",
        ),
    ],
    ids=str,
)
def test_other_refusals(words: dict[str, Any], needle: str) -> None:
    assert needle in refused(synthetic(), **words)


# --- the rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "warns"),
    [
        ("mxfp4", "bfloat16", False),
        ("mxfp4", "float16", True),
        ("int4", "float16", False),
        ("nvfp4", "bfloat16", True),
        ("fp8-tensor", "bfloat16", True),
        ("int4-g64-zp", "bfloat16", True),
    ],
)
def test_warnings_for_what_stock_vllm_cannot_serve(name: str, dtype: str, warns: bool) -> None:
    warnings = plan_of(synthetic(), name, layout="checkpoint", param_dtype=dtype).warnings
    assert bool(warnings) is warns
    assert all(f"'{name}' with {dtype}" in warning for warning in warnings)
    assert plan_of(synthetic(), name, param_dtype=dtype).warnings == ()


def test_warning_for_what_the_kernel_was_seen_to_fail_on() -> None:
    fp8 = INPUT_PRESETS["fp8"]  # under which the kernel was not seen to fail
    assert "overflows" not in str(
        plan_of(synthetic(), "fp8-e5m2", param_dtype="float16", inputs=fp8).warnings
    )
    assert "overflows" in plan_of(synthetic(), "fp8-e5m2", param_dtype="float16").warnings[0]
    assert plan_of(synthetic(), "fp8", param_dtype="float16").warnings == ()


@pytest.mark.parametrize(
    ("config", "source", "expected"),
    [
        ({"torch_dtype": "float16"}, "BF16", "float16"),
        ({"dtype": "bfloat16"}, "F16", "bfloat16"),
        ({"torch_dtype": "float32"}, "F32", "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "BF16", "float16"),
        ({}, "F16", "float16"),
        ({}, "BF16", "bfloat16"),
        ({}, "F32", "bfloat16"),
    ],
)
def test_default_param_dtype(config: dict[str, Any], source: str, expected: str) -> None:
    assert default_param_dtype(config, synthetic(dtype=source)[1]) == expected


# vLLM's module names, as its models/{mixtral,qwen3_moe,deepseek_v2}.py give them as `prefix`.
EXPERTS = (
    "model.layers.3.mlp.experts",
    "model.layers.3.block_sparse_moe.experts",
    "layers.0.ffn.experts",
)
OTHERS = (
    "lm_head",
    "model.embed_tokens",
    "model.layers.3.self_attn.qkv_proj",
    "model.layers.3.self_attn.o_proj",
    "model.layers.3.self_attn.kv_b_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.3.mlp.gate",
    "model.layers.3.block_sparse_moe.gate",
    "model.layers.3.mlp.shared_experts.gate_up_proj",
    "model.layers.3.mlp.shared_experts",
    "model.layers.3.mlp.shared_expert.down_proj",
    "model.layers.3.mlp.shared_expert_gate",
)


def test_ignore_spares_the_experts_and_nothing_else() -> None:
    words = ENGINE.checkpoint_config(schema_of("mxfp4"), ["model.layers.3.mlp.experts"])
    patterns = [entry.removeprefix("re:") for entry in words["ignore"]]
    assert all(entry.startswith("re:") for entry in words["ignore"])
    for name in OTHERS:
        assert any(re.match(pattern, name) for pattern in patterns), name
    for name in EXPERTS:
        assert not any(re.match(pattern, name) for pattern in patterns), name
        # compressed-tensors' HummingConverter and Humming's HummingLayer ask for the modules of single experts.
        assert not any(re.match(pattern, f"{name}.12.gate_proj") for pattern in patterns), name
        assert any(re.match(pattern, f"{name}.shared.gate_proj") for pattern in patterns), name


@pytest.mark.parametrize("name", SCHEMAS)
def test_quantization_config_is_hummings_words(name: str) -> None:
    """Humming's own class reads the words back to the same schema; its aliases are not used."""
    from hqconv.humming_ops.runtime import humming_schema

    words = ENGINE.checkpoint_config(schema_of(name), ["a.experts"])
    assert {"dtype", "group_size", "scale_dtype", "scale_type"}.isdisjoint(words)
    target = humming_schema(schema_of(name))
    assert type(target).from_config(words) == target


@pytest.mark.parametrize("limit", [1, 40_000, 10**9])
def test_copied_tensors_are_all_there_in_bounded_shards(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_units, "MAX_SHARD_BYTES", limit)
    source = synthetic()
    plan = plan_of(source)
    copies = [group for group in plan.units if isinstance(group, CopiedShardPlan)]
    assert [ref.name for group in copies for ref in group.refs] == list(source[1].copied)
    for group in copies:
        sizes = [tensor.num_bytes for tensor in group.files[0].tensors.values()]
        assert sum(sizes) <= limit or len(sizes) == 1
        assert {n: (t.dtype, t.shape) for n, t in group.files[0].tensors.items()} == {
            ref.name: (ref.dtype, ref.shape) for ref in group.refs
        }
    single = ["model.safetensors"] if len(copies) == 1 else None
    assert single is None or [g.name for g in copies] == single
    assert artifact_names.INDEX in plan.paths
