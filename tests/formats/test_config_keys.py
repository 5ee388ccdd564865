"""Keys of quantization configs: known ones, unknown ones that warn or are refused, and inputs rotated at run time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import hqconv
from hqconv.errors import RequestError
from hqconv.formats.config_reader import COMMON, REFUSAL, WARNING, ConfigReader, Keys, verdict
from hqconv.formats.quant_config import declared_formats, methods
from hqconv.schemas.grid import Grid
from tests.make import configs, conversions
from tests.make.formats import FORMATS, write
from tests.make.published import load, paths

Json = dict[str, Any]
EXPERT = "model.layers.3.mlp.experts.7.gate_proj"


def config_of(name: str) -> Json:
    words: Json = (
        FORMATS[name].config.get("quantization_config")
        or FORMATS[name].config.get("hf_quant_config")
        or {}
    )
    return copy.deepcopy(words)


# One config of each form of words, with the format that it is.
CONFIGS = {name: config_of(name) for name in FORMATS if config_of(name)}
ONE_OF_EACH = list(
    {
        str(sorted(words)) + str(words.get("quant_method")): name for name, words in CONFIGS.items()
    }.values()
)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_publishers_write_gives_no_warning(name: str) -> None:
    assert declared_formats(CONFIGS[name], {}).warnings == ()


def test_published_models_give_no_warning() -> None:
    seen = 0
    for path in paths():
        config = load(path).config
        words = config.get("quantization_config")
        if words:
            seen += 1
            assert declared_formats(words, config).warnings == (), path.name
    assert seen > 8


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
    assert verdict(name) == REFUSAL
    with pytest.raises(RequestError, match="unknown key") as caught:
        declared_formats(
            {**CONFIGS["gptq-int4"], name: 1}, {}
        ) if name != "rotation" else declared_formats({**CONFIGS["fp8-block"], "rotations": 1}, {})
    assert caught.value.where.startswith("quantization_config.")
    for nothing in (None, False, "", [], {}):
        assert declared_formats({**CONFIGS["gptq-int4"], name: nothing}, {}).warnings == ()


@pytest.mark.parametrize("name", HARMLESS)
def test_a_name_that_speaks_of_something_else_is_a_warning(name: str) -> None:
    assert verdict(name) == WARNING
    (warning,) = declared_formats({**CONFIGS["gptq-int4"], name: 3}, {}).warnings
    assert f"quantization_config.{name}" in warning
    same = declared_formats(CONFIGS["gptq-int4"], {})
    assert same.of(EXPERT) == declared_formats({**CONFIGS["gptq-int4"], name: 3}, {}).of(EXPERT)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_method_looks_at_all_depths(name: str) -> None:
    """An unknown key at any depth that is read is found, with its path."""
    places = list(
        objects(CONFIGS[name], methods()[declared_formats(CONFIGS[name], {}).method].keys)
    )
    assert places
    for path in places:
        for key, kind in (("odd_note", WARNING), ("odd_packing", REFUSAL)):
            words = copy.deepcopy(CONFIGS[name])
            at(words, path)[key] = "x"
            if kind == WARNING:
                (warning,) = declared_formats(words, {}).warnings
                assert warning.startswith("quantization_config.")
                assert f"{key} is unknown" in warning
            else:
                with pytest.raises(RequestError, match="unknown key") as caught:
                    declared_formats(words, {})
                assert caught.value.where.endswith(f".{key}")


def objects(words: Any, keys: Keys, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of a config's objects whose keys are listed."""
    yield path
    for name, inside in keys.inside.items():
        value = words.get(name)
        for index, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(one, dict):
                yield from objects(
                    one, inside, (*path, name) if index is None else (*path, name, index)
                )
    for name, entries in keys.entries.items():
        for inner, one in (words.get(name) or {}).items():
            if isinstance(one, dict):
                yield from objects(one, entries, (*path, name, inner))


def at(words: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        words = words[step]
    return words


def test_an_unknown_object_is_looked_into() -> None:
    words = {**CONFIGS["awq"], "extras": {"deep": {"hadamard": True}}}
    with pytest.raises(RequestError) as caught:
        declared_formats(words, {})
    assert caught.value.where == "quantization_config.extras.deep.hadamard"
    assert (
        len(
            declared_formats(
                {**CONFIGS["awq"], "extras": {"deep": {"hadamard": False}}}, {}
            ).warnings
        )
        == 2
    )
    meta = {
        **CONFIGS["gptq-int4"],
        "meta": {"opt_fused_rotation": True},
    }  # GPTQModel's own, about ParoQuant's training
    assert declared_formats(meta, {}).warnings == ()


def test_a_warning_is_in_the_plan_and_the_manifest(tmp_path: Path) -> None:
    written = write(tmp_path / "src", "fp8-block", hidden=128, inner=128, experts=2)
    path = written.folder / "config.json"
    words = json.loads(path.read_text())
    words["quantization_config"]["tool_note"] = "made by hand"
    path.write_text(json.dumps(words))
    assert any("tool_note" in one for one in hqconv.inspect(written.folder)["warnings"])
    conversions.run(written.folder, tmp_path / "out", "source", Grid())
    assert any("tool_note" in one for one in conversions.manifest(tmp_path / "out")["warnings"])


class Asked(dict[str, Any]):
    """An object that notes the keys asked for."""

    log: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.log.add(key)
        return super().get(key, default)


def wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return Asked({key: wrapped(one) for key, one in value.items()})
    return [wrapped(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_parser_asks_for_known_keys_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is read and not listed would be refused as unknown."""
    monkeypatch.setattr(Asked, "log", set())
    method = methods()[declared_formats(CONFIGS[name], {}).method]
    list(method.parse(ConfigReader(wrapped(CONFIGS[name]), "quantization_config"), {}))
    known = flat(COMMON | method.keys)
    own = {inner for key in method.keys.entries for inner in CONFIGS[name].get(key) or {}}
    assert Asked.log - known - own - {"expert_dtype", "head_dim", "format"} == set()


def flat(keys: Keys) -> set[str]:
    return keys.names.union(*(flat(one) for one in (*keys.inside.values(), *keys.entries.values())))


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


@pytest.mark.parametrize("package", WRITTEN)
def test_the_fields_that_a_package_writes_are_known(package: str) -> None:
    method, names = WRITTEN[package]
    assert set(names.split()) - (COMMON | methods()[method].keys).names == set()


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
        assert {one.name for one in dataclasses.fields(kind)} - (COMMON | keys).names == set()


# --- agreement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more", "key"),
    [
        ("gptq-int4", {"format": "gptq_v2"}, "format"),
        ("gptq-int4", {"wbits": 8}, "wbits"),
        ("gptq-int4", {"q_group_size": 64}, "q_group_size"),
        ("gptq-int4", {"zero_point": True}, "zero_point"),
        ("gptq-int4", {"pack_dtype": "int16"}, "pack_dtype"),
        ("gptq-int4", {"adapter": {"name": "lora", "rank": 32}}, "adapter"),
        ("awq", {"w_bit": 8}, "w_bit"),
        ("awq", {"sym": True}, "zero_point"),
        ("awq", {"format": "gemv"}, "format"),
        ("fp8-block", {"weight_dtype": "e5m2"}, "weight_dtype"),
        ("fp8-block", {"weight_scale_method": "row"}, "weight_scale_method"),
        ("fp8-block", {"weight_scale_semantics": "direct"}, "weight_scale_semantics"),
        ("fp8-block", {"store_dtype": "mxfp4", "expert_dtype": "fp8"}, "expert_dtype"),
    ],
)
def test_keys_that_contradict_one_another_are_refused(name: str, more: Json, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        declared_formats({**CONFIGS[name], **more}, {})
    assert caught.value.where == f"quantization_config.{key}"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (
            "gptq-int4",
            {
                "format": "GPTQ",
                "wbits": 4,
                "q_group_size": 128,
                "zero_point": False,
                "pack_dtype": "int32",
            },
        ),
        (
            "awq",
            {
                "w_bit": 4,
                "sym": False,
                "checkpoint_format": "gemm",
                "format": "GEMM",
                "method": "awq",
            },
        ),
        ("fp8-block", {"store_dtype": "fp8"}),  # MiMo-V2.5
        (
            "fp8-block",
            {"store_dtype": "float8_e4m3fn", "weight_dtype": "e4m3", "expert_dtype": "fp8"},
        ),
        ("fp8-block", {"store_dtype": "fp8", "routed_experts_quant_method": "fp8"}),
    ],
)
def test_keys_that_agree_change_nothing(name: str, more: Json) -> None:
    found, plain = (
        declared_formats(words, {}) for words in ({**CONFIGS[name], **more}, CONFIGS[name])
    )
    assert (found.of(EXPERT), found.warnings) == (plain.of(EXPERT), ())


# --- rotations ---------------------------------------------------------------------------------------------


def quark(**algorithm: Any) -> Json:
    return {**CONFIGS["quark-mxfp4"], "algo_config": [{"name": "gptq"}, algorithm]}


def transform(*locations: str) -> Json:
    scheme = {
        "type": "hadamard",
        "apply": [{"targets": ["Linear"], "location": one} for one in locations],
    }
    return {**CONFIGS["ct-int4-g32"], "transform_config": {"config_groups": {"u": scheme}}}


def ascend(**facts: Any) -> Json:
    return {"quant_method": "ascend", "quantize": "w8a8_dynamic", **facts}


AUTO_ROUND, GPTQ, MODELOPT = CONFIGS["auto-round"], CONFIGS["gptq-int4"], CONFIGS["modelopt-nvfp4"]
FUSED_SPINS = {
    "r1": True,
    "r2": True,
    "r3": False,
    "r4": False,
    "online_r1_rotation": False,
    "algorithm": "spinquant",
}
FUSED_ROTATION = {
    "name": "rotation",
    "r1": True,
    "r2": True,
    "r3": False,
    "r4": False,
    "online_r1_rotation": False,
}
ONLINE: dict[str, tuple[Json, str]] = {
    "auto-round": (
        {**AUTO_ROUND, "rotation_config": {"block_size": 32, "hadamard_type": "hadamard"}},
        "rotation_config",
    ),
    "auto-round, several": (
        {**AUTO_ROUND, "rotation_configs": [{"algorithm": "hadamard"}]},
        "rotation_configs",
    ),
    "auto-round, a module": (
        {**AUTO_ROUND, "extra_config": {"a.b": {"rotation_config": {"block_size": 32}}}},
        "extra_config.a.b.rotation_config",
    ),
    "auto-round, r4": (
        {**AUTO_ROUND, "spinquant_config": {**FUSED_SPINS, "r4": True}},
        "spinquant_config",
    ),
    "auto-round, r1": (
        {**AUTO_ROUND, "spinquant_config": {**FUSED_SPINS, "online_r1_rotation": True}},
        "spinquant_config",
    ),
    "auto-round, r1 by default": (
        {**AUTO_ROUND, "spinquant_config": {"r1": True, "r4": False}},
        "spinquant_config",
    ),
    "gptqmodel": ({**GPTQ, "rotation": "hadamard"}, "rotation"),
    "gptqmodel, random": ({**GPTQ, "rotation": "random"}, "rotation"),
    "gptqmodel, a module": (
        {**GPTQ, "dynamic": {"+:.*down": {"rotation": "hadamard"}}},
        "dynamic.+:.*down.rotation",
    ),
    "gptqmodel awq": ({**CONFIGS["awq"], "rotation": "hadamard"}, "rotation"),
    "gptqmodel fp8": ({**CONFIGS["fp8-gptqmodel"], "rotation": "hadamard"}, "rotation"),
    "quark, r4": (quark(**{**FUSED_ROTATION, "r4": True}), "algo_config"),
    "quark, r1": (quark(**{**FUSED_ROTATION, "online_r1_rotation": True}), "algo_config"),
    "quark, layers": (
        quark(
            **FUSED_ROTATION,
            online_config={"shared_parallel": False, "online_rotation_layers": ["a"]},
        ),
        "algo_config",
    ),
    "quark, r4 by default": (quark(name="rotation", r1=False), "algo_config"),
    "quark, quarot": (quark(name="quarot"), "algo_config"),
    "quark, a low-rank branch": (quark(name="svdquant", svd_rank=32), "algo_config"),
    "quark, one object": (
        {**CONFIGS["quark-mxfp4"], "algo_config": {"name": "rotation", "r4": True}},
        "algo_config",
    ),
    "compressed-tensors": (transform("weight_input", "input"), "transform_config"),
    "compressed-tensors, outputs": (transform("output"), "transform_config"),
    "compressed-tensors, an unknown place": (transform("weight_middle"), "transform_config"),
    "compressed-tensors, nothing said": (
        {
            **CONFIGS["ct-int4-g32"],
            "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
        },
        "transform_config",
    ),
    "modelopt, scaled": ({**MODELOPT, "pre_quant_scale": True}, "pre_quant_scale"),
    "modelopt, scaled in a group": (
        {
            **MODELOPT,
            "config_groups": {"group_0": {"pre_quant_scale": True, "targets": ["Linear"]}},
        },
        "config_groups.group_0.pre_quant_scale",
    ),
    "modelopt, rotated": ({**MODELOPT, "rotate": {"enable": True}}, "rotate"),
    "ascend, heads": (
        ascend(metadata={"quarot": {"heads_rotation": {"layers": ["0"]}}}),
        "metadata",
    ),
    "ascend, down": (
        ascend(metadata={"quarot": {"kronecker_rotation": {"layers": ["1"]}}}),
        "metadata",
    ),
    "ascend, a file": (
        ascend(optional={"quarot": {"rotation_map": {"kronecker_rotation_m": "a"}}}),
        "optional",
    ),
}
FUSED: dict[str, Json] = {
    "auto-round, nothing": {**AUTO_ROUND, "rotation_config": {}, "rotation_configs": None},
    "auto-round": {**AUTO_ROUND, "spinquant_config": FUSED_SPINS},
    "gptqmodel": {**GPTQ, "rotation": None},
    "quark": quark(**FUSED_ROTATION),
    "quark, others": {
        **CONFIGS["quark-mxfp4"],
        "algo_config": [{"name": "awq"}, {"name": "smooth"}, {"name": "gptq"}],
    },
    "quark, none": {**CONFIGS["quark-mxfp4"], "algo_config": None},
    "compressed-tensors": transform("weight_input", "weight_output"),
    "compressed-tensors, empty": {**CONFIGS["ct-int4-g32"], "transform_config": {}},
    "modelopt": {**MODELOPT, "pre_quant_scale": False, "rotate": False},
    "ascend": ascend(
        optional={"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}},
        is_rot_used=True,
    ),
    "ascend, no layers": ascend(
        metadata={"quarot": {"max_tp_size": 4, "heads_rotation": {"layers": []}}}
    ),
}


@pytest.mark.parametrize("name", ONLINE)
def test_inputs_that_are_rotated_at_run_time_are_refused(name: str) -> None:
    words, key = ONLINE[name]
    with pytest.raises(RequestError) as caught:
        declared_formats(words, {})
    assert caught.value.where == f"quantization_config.{key}"
    assert caught.value.expected


@pytest.mark.parametrize("name", FUSED)
def test_rotations_that_are_fused_convert(name: str) -> None:
    found = declared_formats(FUSED[name], {})
    assert not found.of(EXPERT).is_float
    assert found.warnings == ()


def test_a_fused_place_is_what_compressed_tensors_says() -> None:
    transforms = pytest.importorskip("compressed_tensors.transform")
    for place in transforms.TransformLocation:
        if place.is_online():
            with pytest.raises(RequestError):
                declared_formats(transform(place.value), {})
        else:
            assert not declared_formats(transform(place.value), {}).of(EXPERT).is_float


@pytest.mark.parametrize("words", [None, GPTQ])
def test_a_rotation_beside_the_quantization_config_is_refused(
    words: Mapping[str, Any] | None,
) -> None:
    with pytest.raises(RequestError, match="rotated at run time"):
        declared_formats(words, {"spinquant_config": {**FUSED_SPINS, "r4": True}})
    with pytest.raises(RequestError, match="rotated at run time"):
        declared_formats(words, {"rotation_config": {"block_size": 32}})
    assert (
        declared_formats(words, {"spinquant_config": FUSED_SPINS, "rotary_dim": 64}).warnings == ()
    )


def test_a_description_of_ascend_keeps_what_it_says_of_rotations() -> None:
    from hqconv.formats.ascend import ascend_quantization_config

    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    description = {
        name: "W8A8_DYNAMIC",
        "metadata": {"quarot": {"kronecker_rotation": {"layers": ["0"]}}},
    }
    words = ascend_quantization_config(
        {}, {**description, "model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0"}
    )
    assert words is not None
    with pytest.raises(RequestError, match="rotated at run time"):
        declared_formats(words, {})
    del words["metadata"]
    assert declared_formats(words, {}).warnings == ()
    assert configs.ASCEND
