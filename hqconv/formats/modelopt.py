"""NVIDIA's Model Optimizer: the method `modelopt`. It stores matrices as fp8, int8, mxfp4, mxfp8 and nvfp4."""

from __future__ import annotations

from dataclasses import replace

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.mx import mx_format, nvfp4_format
from hqconv.formats.quant_config import (
    Matcher,
    ModuleRule,
    always,
    globbed_in,
    parents,
    quant_method,
    when,
)
from hqconv.formats.source_format import SourceFormat

# Sources: `process_layer_quant_config` of modelopt.torch.export.quant_utils, `convert_hf_quant_config_format` of its
# convert_hf_config. Scaled or rotated inputs (pre_quant_scale, rotate) and zero points are refused as unknown keys.
_ALGORITHM = Keys("quant_algo group_size")
_WEIGHTS = Keys("group_size dynamic num_bits type strategy symmetric block_structure")
_GROUP = _ALGORITHM | Keys(
    "targets input_activations output_activations", inside={"weights": _WEIGHTS}
)
_QUANTIZATION = _ALGORITHM | Keys(
    "exclude_modules ignore "
    "kv_cache_quant_algo kv_cache_scheme kv_cache_group_size smoothquant_val clamp_val has_weight_scale "
    "weight_compression",
    entries={"quantized_layers": _ALGORITHM},
)
KEYS = _QUANTIZATION | Keys(
    "activation_scheme",
    inside={"quantization": _QUANTIZATION},  # of hf_quant_config.json
    entries={"config_groups": _GROUP},  # in newer configs
)


def _algorithms(config: ConfigReader) -> ConfigReader:
    """Return the object with the algorithms: hf_quant_config.json has it under "quantization"."""
    return config.table("quantization") if config.has("quantization") else config


def _excluded(config: ConfigReader, *, with_parents: bool) -> Matcher:
    config = _algorithms(config)
    key = config.first("ignore", "exclude_modules")
    return globbed_in(config.names(key), config.where(key), with_parents=with_parents)


@quant_method(
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "modelopt_mxfp8",
    keys=KEYS,
    undecided=lambda config: _excluded(config, with_parents=True),
)
def parse_modelopt(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse one algorithm for all modules, or one per module; `quant_algo` null: none.

    A shell pattern excludes the modules whose whole name it matches, as in vLLM's
    ModelOptQuantConfigBase.is_layer_excluded; its module of all experts is above theirs, so there the tensors decide.
    An algorithm given to a module goes to all below it.
    """
    excluded = when(_excluded(config, with_parents=False))
    config = _algorithms(config)
    if "quant_algo" in config.values and not config.has("quant_algo"):
        return []
    if config.text("quant_algo") != "mixed_precision":
        return [excluded, always(_algorithm_format(config))]
    if not config.has("quantized_layers"):
        raise config.wrong("quantized_layers", "an object of modules")
    layers = {name: _algorithm_format(layer) for name, layer in config.tables("quantized_layers")}

    def by_name(module: str) -> SourceFormat | None:
        return next((layers[name] for name in parents(module) if name in layers), None)

    return [excluded, by_name]


# What algorithms store. What they do with activations at run time changes no weight. Source: `to_quantized_weight` and
# `get_weight_scaling_factor` of modelopt.torch.export.quant_utils.
_NVFP4 = nvfp4_format("modelopt nvfp4")
_MXFP4 = mx_format("modelopt mxfp4", "mxfp4")
_FP8_BLOCKS = SourceFormat("modelopt fp8 blocks", "fp8", "float8e4m3", "")
_FORMATS = {
    "nvfp4": replace(_NVFP4, static_inputs="float4e2m1"),
    "w4a16_nvfp4": _NVFP4,
    "w4a8_nvfp4_fp8": replace(_NVFP4, group_k=32),
    "w4a8_mxfp4_fp8": _MXFP4,
    "mxfp4": _MXFP4,
    "mxfp8": mx_format("modelopt mxfp8", "mxfp8"),
    "w8a16": SourceFormat("modelopt int8", "int8", "uint8"),
    "fp8_pb_wo": _FP8_BLOCKS,
    "fp8_block_scales": _FP8_BLOCKS,
    "fp8": SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", 0, 0, static_inputs="float8e4m3"),
    "fp8_per_channel_per_token": SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", 1, 0),
}


def _algorithm_format(config: ConfigReader) -> SourceFormat:
    fmt = _FORMATS[config.text("quant_algo", tuple(_FORMATS))]
    if fmt is _FP8_BLOCKS:
        size = _group_size(config, 128)
        return replace(fmt, group_n=size, group_k=size)
    # Of mxfp4 config_groups may say 16: the scales' shape decides.
    return replace(fmt, group_k=_group_size(config, fmt.group_k)) if fmt.scale_2 != "none" else fmt


def _group_size(config: ConfigReader, default: int) -> int:
    """Return the group size, in newer configs given with the weights of a group."""
    readers = [config]
    for _, group in config.tables("config_groups"):
        if group.has("weights"):
            readers.append(group.table("weights"))
    reader = next((reader for reader in readers if reader.has("group_size")), config)
    return reader.integer("group_size", 16, default=default)
