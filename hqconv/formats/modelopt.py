"""NVIDIA's Model Optimizer: the method `modelopt`. Its matrices are stored as `fp8`, `mxfp8` and `nvfp4`."""

from __future__ import annotations

from dataclasses import replace

from hqconv.formats.config_reader import LARGEST, ConfigReader, Text
from hqconv.formats.module_rules import Rule, always, globbed_in, parents, when
from hqconv.formats.mx import mx_format
from hqconv.formats.nvfp4 import nvfp4_format
from hqconv.formats.registry import quant_method
from hqconv.formats.source_format import SourceFormat


@quant_method("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")
def parse_modelopt(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse one algorithm for all modules, or one per module; `quant_algo` null: none.

    Both forms are read: hf_quant_config.json's "quantization" and the flat one of config.json. A shell
    pattern that excludes a module excludes all below it; an algorithm given to a module also goes to these.
    """
    if config.has("quantization"):
        config = config.table("quantization")
    key = config.first("ignore", "exclude_modules")
    excluded = when(globbed_in(config.names(key), config.where(key), with_parents=True))
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


def _algorithm_format(config: ConfigReader) -> SourceFormat:
    if config.flag("pre_quant_scale", False):
        raise config.unsupported("pre_quant_scale", "false: activations that are not scaled")
    algorithm = config.text("quant_algo")
    if algorithm in ("nvfp4", "w4a16_nvfp4"):
        is_static = algorithm == "nvfp4" and not config.flag("dynamic", False)
        fmt = nvfp4_format("modelopt nvfp4", _group_size(config, 16, only=16))
        return replace(fmt, static_inputs="float4e2m1" if is_static else "")
    if algorithm == "mxfp8":
        return mx_format("modelopt mxfp8", "mxfp8")
    if algorithm in ("fp8_pb_wo", "fp8_block_scales"):
        size = _group_size(config, 128)
        return SourceFormat("modelopt fp8 blocks", "fp8", "float8e4m3", "", size, size)
    if algorithm == "fp8":
        return SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", 0, 0, static_inputs="float8e4m3")
    if algorithm == "fp8_per_channel_per_token":
        return SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", 1, 0)
    names = "NVFP4, W4A16_NVFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MIXED_PRECISION"
    raise config.unsupported("quant_algo", names)


def _group_size(config: ConfigReader, default: int, only: int | None = None) -> int:
    """Return the group size, in newer configs given with the weights of a group; with `only` no other than that."""
    least, most = (1, LARGEST) if only is None else (only, only)
    if not config.has("group_size"):
        for _, group in config.tables("config_groups"):
            if group.has("weights") and group.table("weights").has("group_size"):
                return group.table("weights").integer("group_size", least, most)
    return config.integer("group_size", least, most, default=default)
