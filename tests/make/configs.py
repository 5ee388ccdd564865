"""The words that publishers put into config.json (or hf_quant_config.json) for each quantization method."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
_SKIPPED = ["lm_head", "model.layers.0.mlp.gate"]


def _of(words: Json) -> Json:
    return {"quantization_config": words}


def fp8(**more: Any) -> Json:
    """Per tensor or channel."""
    words = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return _of({**words, "modules_to_not_convert": _SKIPPED, **more})


def fp8_blocks(**more: Any) -> Json:
    """DeepSeek-V3's."""
    return fp8(weight_block_size=[128, 128], **more)


def fbgemm(**more: Any) -> Json:
    """transformers' fbgemm_fp8."""
    skipped = ["lm_head", "mlp.gate", "router"]
    return _of(
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": skipped,
        }
    )


def compressed(storage: str, bits: int, kind: str, strategy: str, **weights: Any) -> Json:
    """compressed-tensors with one group; `ignore` besides the usual under that key."""
    ignored = weights.pop("ignore", [])
    words: Json = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": {**words, **weights}, "input_activations": None}
    return _of(
        {
            "quant_method": "compressed-tensors",
            "format": storage,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp\\.gate$", *ignored],
            "kv_cache_scheme": None,
        }
    )


def gptq(bits: int = 4, size: int = 128, **more: Any) -> Json:
    """AutoGPTQ's and GPTQModel's."""
    words = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": False,
        "sym": True,
    }
    return _of({**words, "checkpoint_format": "gptq", "true_sequential": True, **more})


def awq(**more: Any) -> Json:
    """AutoAWQ's."""
    words = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "version": "gemm",
        "zero_point": True,
    }
    return _of({**words, "modules_to_not_convert": ["mlp.gate."], **more})


def auto_round(packing: str, **more: Any) -> Json:
    """AutoRound's."""
    words = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
    }
    words |= {"packing_format": packing, "autoround_version": "0.5.1"}
    return _of({**words, "block_name_to_quantize": "model.layers", **more})


def modelopt(algorithm: str, **more: Any) -> Json:
    """modelopt's flat form, in config.json."""
    words = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "*mlp.gate"],
    }
    return _of({**words, "producer": {"name": "modelopt", "version": "0.39.0"}, **more})


def hf_quant_config(algorithm: str, **more: Any) -> Json:
    """modelopt's own file: written beside a config.json that says nothing."""
    words = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
        **more,
    }
    return {"hf_quant_config": {"producer": {"name": "modelopt"}, "quantization": words}}


def gptqmodel_fp8(**more: Any) -> Json:
    """GPTQModel's fp8, whose stored scale divides. Source: `_update_output_payload` of its FP8Config."""
    words = {
        "quant_method": "fp8",
        "method": "fp8",
        "checkpoint_format": "fp8",
        "format": "float8_e4m3fn",
        "bits": 8,
    }
    words |= {
        "group_size": -1,
        "weight_scale_method": "row",
        "weight_scale_semantics": "inverse",
        "meta": {"seed": 1},
    }
    return _of({**words, "desc_act": False, "lm_head": False, "pack_dtype": "int32", **more})


def w4afp8(**more: Any) -> Json:
    """GLM's and DeepSeek's in w4afp8."""
    return _of(
        {"quant_method": "w4afp8", "modules_to_not_convert": ["lm_head", "mlp.gate"], **more}
    )


ASCEND: Json = {"quantize": "w8a8_dynamic"}
"""What users of msmodelslim's checkpoints write into config.json."""
ASCEND_FILE: Json = {"quant_model_description": True}
"""msmodelslim's own file, which `layouts` makes of the tensors."""


def bitnet(**more: Any) -> Json:
    """transformers' bitnet."""
    return _of({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"], **more})


def quark(dtype: str, qscheme: str, pack_method: str = "reorder", **more: Any) -> Json:
    """Quark with one stage."""
    axis = {"per_channel": 0, "per_group": -1}.get(qscheme)
    spec = {
        "dtype": dtype,
        "qscheme": qscheme,
        "ch_axis": axis,
        "is_dynamic": False,
        "symmetric": True,
    }
    return quark_stages({**spec, **more}, pack_method)


def quark_stages(weight: Any, pack_method: str = "reorder") -> Json:
    """Quark with one scheme for all layers, of one stage or a list of them."""
    return _of(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": weight, "input_tensors": None, "bias": None},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head", "*mlp.gate"],
            "export": {
                "kv_cache_group": [],
                "pack_method": pack_method,
                "weight_format": "real_quantized",
            },
        }
    )


QUARK_TWO_STAGES: list[Json] = [
    {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "ch_axis": -1, "is_dynamic": False},
    {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True, "symmetric": True},
]
QUARK_INT4_FP8: list[Json] = [
    {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False},
    {
        "dtype": "int4",
        "qscheme": "per_channel",
        "ch_axis": 0,
        "symmetric": True,
        "is_dynamic": False,
    },
]


def humming(**words: Any) -> Json:
    """Humming's checkpoint layout, where only the experts are in it."""
    return _of({"quant_method": "humming", **words, "ignore": [r"re:(?!.*\.(experts)$)"]})


def bitsandbytes(kind: str, nested: bool) -> Json:
    """transformers' bitsandbytes in 4 bits."""
    words = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
    words |= {
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    return _of(
        {
            **words,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", "mlp.gate"],
        }
    )
