"""Keys of quantization configs: known ones, unknown ones that are refused, and inputs rotated at run time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hqconv.errors import RequestError
from hqconv.formats.config_reader import COMMON, Keys
from hqconv.formats.quant_config import declared_formats, methods
from tests.make.formats import FORMATS
from tests.make.places import REPO

Json = dict[str, Any]
EXPERT = "model.layers.3.mlp.experts.7.gate_proj"


def config_of(name: str) -> Json:
    config = FORMATS[name].config
    return copy.deepcopy(config.get("quantization_config") or config.get("hf_quant_config") or {})


# One config of each set of keys, with the format that it is.
CONFIGS = {name: config_of(name) for name in FORMATS if config_of(name)}
ONE_OF_EACH = list(
    {
        str(sorted(config)) + str(config.get("quant_method")): name
        for name, config in CONFIGS.items()
    }.values()
)


# --- unknown keys ------------------------------------------------------------------------------------------

REFUSED = [
    "weight_packing", "packing", "code_dtype", "storage_type", "num_bits_high", "zero_offset", "nibble_order", "perm",
    "column_permutation", "group_map", "scale_2_dtype", "layout", "swizzle", "interleaved_rows", "is_transposed",
    "codebook_size", "lora_rank", "svd", "outlier_columns", "double_quant", "rotation", "online_hadamard", "quarot",
    "spinquant", "input_rotation", "activation_rotation", "R4_rotation", "transform_config", "pre_quant_scale",
    "had_block", "sparse_mask", "blockShape",
]  # fmt: skip
HARMLESS = [
    "note", "calibration_dtype", "calib_group_size", "train_dataset", "act_group_size", "input_dtype", "kv_cache_bits",
    "activation_format", "attn_scale", "num_samples", "seqlen", "seed", "iters", "vram_strategy", "tool_version",
    "kernel_layout", "compute_dtype", "made_by", "rotary_dim", "embedding_bits", "lm_head_bits", "loss_scale", "url",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_speaks_of_bytes_or_rotations_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="unknown key") as caught:
        declared_formats({**CONFIGS["gptq-int4"], name: 1}, {})
    assert caught.value.where == f"quantization_config.{name}"
    for nothing in (None, False, 0, "", [], {}):
        declared_formats({**CONFIGS["gptq-int4"], name: nothing}, {})


@pytest.mark.parametrize("name", HARMLESS)
def test_a_name_that_speaks_of_something_else_changes_nothing(name: str) -> None:
    found = declared_formats({**CONFIGS["gptq-int4"], name: 3}, {})
    assert found.of(EXPERT) == declared_formats(CONFIGS["gptq-int4"], {}).of(EXPERT)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_method_looks_at_all_depths(name: str) -> None:
    """An unknown key at any depth that is read is found, with its path."""
    method = methods()[declared_formats(CONFIGS[name], {}).method]
    places = list(objects(CONFIGS[name], method.keys))
    assert places
    for path in places:
        config = copy.deepcopy(CONFIGS[name])
        inner = config
        for step in path:
            inner = inner[step]
        inner["odd_packing"] = "x"
        with pytest.raises(RequestError, match="unknown key") as caught:
            declared_formats(config, {})
        assert caught.value.where.endswith(".odd_packing")


def objects(config: Any, keys: Keys, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of a config's objects whose keys are listed."""
    yield path
    for name, inside in keys.inside.items():
        value = config.get(name)
        for step, inner in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(inner, dict):
                steps = (name,) if step is None else (name, step)
                yield from objects(inner, inside, (*path, *steps))
    for name, entries in keys.entries.items():
        for key, inner in (config.get(name) or {}).items():
            if isinstance(inner, dict):
                yield from objects(inner, entries, (*path, name, key))


def test_an_unknown_object_is_looked_into() -> None:
    with pytest.raises(RequestError) as caught:
        declared_formats({**CONFIGS["awq"], "extras": {"deep": {"hadamard": True}}}, {})
    assert caught.value.where == "quantization_config.extras.deep.hadamard"
    declared_formats({**CONFIGS["awq"], "extras": {"deep": {"hadamard": False}}}, {})
    # GPTQModel's own, about ParoQuant's training.
    declared_formats({**CONFIGS["gptq-int4"], "meta": {"opt_fused_rotation": True}}, {})


# --- keys as the publishers' classes have them -------------------------------------------------------------

# Fields that the classes of packages write, which are not dependencies of the tests.
WRITTEN: dict[str, tuple[str, str]] = {
    # auto-round 0.16.1: QuantizationScheme of auto_round/schemes.py, SerializedCompressorConfig of compressors/base.py.
    "auto-round": (
        "auto-round",
        "bits group_size sym data_type act_bits act_group_size act_sym act_data_type act_dynamic super_bits "
        "super_group_size rotation_config amp batch_size enable_minmax_tuning enable_norm_bias_tuning "
        "enable_quanted_input gradient_accumulate_steps iters lr low_gpu_mem_usage minmax_lr nsamples quant_block_list "
        "regex_config scale_dtype seqlen supported_types static_attention_dtype static_kv_dtype "
        "static_attention_granularity static_kv_granularity to_quant_block_names rotation_configs packing_format "
        "block_name_to_quantize extra_config autoround_version",
    ),
    # gptqmodel 7.7.0: to_dict and _update_output_payload of quantization/config.py.
    "gptqmodel": (
        "gptq",
        "bits dynamic group_size desc_act lm_head activation method quant_method format checkpoint_format pack_dtype "
        "rotation meta sym",
    ),
    "gptqmodel awq": (
        "awq",
        "bits group_size desc_act lm_head method format pack_dtype rotation meta zero_point version",
    ),
    "gptqmodel fp8": (
        "fp8",
        "bits format method weight_scale_method weight_block_size weight_scale_semantics pack_dtype",
    ),
    # amd-quark 0.13: QConfig.to_dict of torch/quantization/config/config.py.
    "quark": (
        "quark",
        "global_quant_config exclude algo_config softmax_quant_spec quant_method layer_type_quant_config "
        "layer_quant_config kv_cache_quant_config kv_cache_post_rope quant_mode version export log_severity_level",
    ),
    # nvidia-modelopt 0.47.0: convert_hf_quant_config_format and process_layer_quant_config of torch/export.
    "modelopt": (
        "modelopt",
        "config_groups ignore quant_algo kv_cache_scheme producer quant_method quantized_layers quantization "
        "kv_cache_quant_algo exclude_modules group_size has_zero_point pre_quant_scale",
    ),
}


# Refused as unknown keys where they hold anything.
NOT_READ = ("super_bits", "super_group_size", "pre_quant_scale", "has_zero_point")
OF_METHOD = {"auto-round": "auto-round", "gptq": "gptq-int4", "awq": "awq", "fp8": "fp8-block"}
OF_METHOD |= {"quark": "quark-mxfp4", "modelopt": "modelopt-nvfp4"}


@pytest.mark.parametrize("package", WRITTEN)
def test_the_fields_that_a_package_writes_are_known(package: str) -> None:
    method, names = WRITTEN[package]
    unknown = set(names.split()) - (COMMON | methods()[method].keys).names
    assert unknown <= {"rotation", "rotation_config", "rotation_configs", *NOT_READ}
    for name in unknown:
        with pytest.raises(RequestError, match="unknown key"):
            declared_formats({**CONFIGS[OF_METHOD[method]], name: 1}, {})


def test_the_fields_of_compressed_tensors_are_known() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    keys = methods()["compressed-tensors"].keys
    group = keys.entries["config_groups"]
    assert set(quantization.QuantizationConfig.model_fields) - (COMMON | keys).names == set()
    assert set(quantization.QuantizationScheme.model_fields) - group.names == set()
    assert set(quantization.QuantizationArgs.model_fields) - group.inside["weights"].names == set()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("FineGrainedFP8Config", "fp8"),
        ("FbgemmFp8Config", "fbgemm_fp8"),
        ("Mxfp4Config", "mxfp4"),
        ("BitNetQuantConfig", "bitnet"),
        ("BitsAndBytesConfig", "bitsandbytes"),
        ("AwqConfig", "awq"),
        ("GPTQConfig", "gptq"),
        ("AutoRoundConfig", "auto-round"),
    ],
)
def test_the_parameters_of_transformers_are_known(kind: str, method: str) -> None:
    import inspect

    module = pytest.importorskip("transformers.utils.quantization_config")
    names = set(inspect.signature(getattr(module, kind).__init__).parameters) - {"self", "kwargs"}
    assert names - (COMMON | methods()[method].keys).names == set()


def test_the_fields_of_humming_are_known() -> None:
    import dataclasses

    schema = pytest.importorskip("humming.schema")
    keys = methods()["humming"].keys
    for kind in (schema.HummingWeightSchema, schema.HummingInputSchema):
        assert {field.name for field in dataclasses.fields(kind)} - (COMMON | keys).names == set()


# --- other names of a key ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gptq-int4", {"format": "GPTQ", "wbits": 4, "q_group_size": 128, "pack_dtype": "int32"}),
        ("awq", {"w_bit": 4, "sym": False, "checkpoint_format": "gemm", "method": "AWQ"}),
        ("fp8-block", {"store_dtype": "float8_e4m3fn", "weight_dtype": "e4m3"}),
    ],
)
def test_other_names_of_a_key_change_nothing(name: str, more: Json) -> None:
    found = declared_formats({**CONFIGS[name], **more}, {})
    assert found.of(EXPERT) == declared_formats(CONFIGS[name], {}).of(EXPERT)


# --- rotations ---------------------------------------------------------------------------------------------


# Of tests/data/quant_configs.json: name of CONFIGS, changes, and the key that is refused.
DATA: dict[str, Any] = json.loads((REPO / "tests/data/quant_configs.json").read_text())


@pytest.mark.parametrize("name", DATA["online"])
def test_inputs_that_are_rotated_at_run_time_are_refused(name: str) -> None:
    base, changes, key = DATA["online"][name]
    with pytest.raises(RequestError) as caught:
        declared_formats({**CONFIGS.get(base, {}), **changes}, {})
    assert caught.value.where == f"quantization_config.{key}"
    assert caught.value.expected


@pytest.mark.parametrize("name", DATA["fused"])
def test_rotations_that_are_fused_convert(name: str) -> None:
    base, changes = DATA["fused"][name]
    assert not declared_formats({**CONFIGS.get(base, {}), **changes}, {}).of(EXPERT).is_float


def test_a_fused_place_is_what_compressed_tensors_says() -> None:
    transforms = pytest.importorskip("compressed_tensors.transform")
    for place in transforms.TransformLocation:
        apply = [{"targets": ["Linear"], "location": place.value}]
        groups = {"u": {"type": "hadamard", "apply": apply}}
        config = {**CONFIGS["ct-int4-g32"], "transform_config": {"config_groups": groups}}
        if place.is_online():
            with pytest.raises(RequestError):
                declared_formats(config, {})
        else:
            assert not declared_formats(config, {}).of(EXPERT).is_float


SPINS = DATA["fused"]["auto-round"][1]["spinquant_config"]


@pytest.mark.parametrize("config", [None, CONFIGS["gptq-int4"]])
def test_a_rotation_beside_the_quantization_config_is_refused(
    config: Mapping[str, Any] | None,
) -> None:
    for text in (
        {"spinquant_config": {**SPINS, "r4": True}},
        {"rotation_config": {"block_size": 32}},
    ):
        with pytest.raises(RequestError, match="rotated at run time"):
            declared_formats(config, text)
    declared_formats(config, {"spinquant_config": SPINS, "rotary_dim": 64})


def test_a_description_of_ascend_keeps_what_it_says_of_rotations() -> None:
    from hqconv.formats.ascend import ascend_quantization_config

    description = {
        "model.layers.0.mlp.experts.0.up_proj.weight": "W8A8_DYNAMIC",
        "metadata": {"quarot": {"kronecker_rotation": {"layers": ["0"]}}},
        "model_quant_type": "W8A8_DYNAMIC",
        "version": "1.0.0",
    }
    config = ascend_quantization_config({}, description)
    assert config is not None
    with pytest.raises(RequestError, match="rotated at run time"):
        declared_formats(config, {})
    del config["metadata"]
    declared_formats(config, {})
