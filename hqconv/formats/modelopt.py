"""NVIDIA's Model Optimizer: the method `modelopt`. It stores matrices as fp8, int8, mxfp4, mxfp8 and nvfp4."""

from __future__ import annotations

from dataclasses import replace

from hqconv.formats.config_reader import LARGEST, ConfigReader, Keys, Text, refuse_rotation
from hqconv.formats.module_rules import Matcher, Rule, always, globbed_in, parents, when
from hqconv.formats.mx import mx_format, nvfp4_format
from hqconv.formats.quant_config import quant_method
from hqconv.formats.source_format import SourceFormat

# Sources: `process_layer_quant_config` of modelopt.torch.export.quant_utils, `convert_hf_quant_config_format` of its
# convert_hf_config.
_ALGORITHM = Keys("quant_algo group_size pre_quant_scale has_zero_point rotate")
_GROUP = _ALGORITHM | Keys(
    unused="targets input_activations output_activations",
    inside={
        "weights": Keys("group_size", "dynamic num_bits type strategy symmetric block_structure")
    },
)
_QUANTIZATION = _ALGORITHM | Keys(
    "exclude_modules ignore",
    "kv_cache_quant_algo kv_cache_scheme kv_cache_group_size smoothquant_val clamp_val has_weight_scale "
    "weight_compression",
    entries={"quantized_layers": _ALGORITHM},
)
KEYS = _QUANTIZATION | Keys(
    unused="activation_scheme",
    inside={"quantization": _QUANTIZATION},  # of hf_quant_config.json
    entries={"config_groups": _GROUP},  # in newer configs
)


def _excluded(config: ConfigReader, *, with_parents: bool) -> Matcher:
    if config.has("quantization"):
        config = config.table("quantization")
    key = config.first("ignore", "exclude_modules")
    return globbed_in(config.names(key), config.where(key), with_parents=with_parents)


@quant_method(
    *("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
    keys=KEYS,
    undecided=lambda config: _excluded(config, with_parents=True),
)
def parse_modelopt(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse one algorithm for all modules, or one per module; `quant_algo` null: none.

    Both forms are read: hf_quant_config.json's "quantization" and the flat one of config.json. A shell pattern excludes
    the modules whose whole name it matches, as in vLLM's ModelOptQuantConfigBase.is_layer_excluded; its module of all
    experts is above theirs, so there the tensors decide. An algorithm given to a module goes to all below it.
    """
    excluded = when(_excluded(config, with_parents=False))
    if config.has("quantization"):
        config = config.table("quantization")
    if "quant_algo" in config.values and not config.has("quant_algo"):
        return []
    if config.text("quant_algo") != "mixed_precision":
        return [excluded, always(_algorithm_format(config))]
    if not config.has("quantized_layers"):
        raise config.wrong("quantized_layers", "an object of modules")
    _check_inputs(config)
    layers = {name: _algorithm_format(layer) for name, layer in config.tables("quantized_layers")}

    def by_name(module: str) -> SourceFormat | None:
        return next((layers[name] for name in parents(module) if name in layers), None)

    return [excluded, by_name]


def _check_inputs(config: ConfigReader) -> None:
    """Raise RequestError for inputs that are scaled or rotated at run time, and for zero points."""
    for reader in (config, *(group for _, group in config.tables("config_groups"))):
        refuse_rotation(reader, "rotate")
        if reader.flag("pre_quant_scale", False):
            raise reader.unsupported("pre_quant_scale", "false: activations that are not scaled")
        if reader.flag("has_zero_point", False):
            raise reader.unsupported("has_zero_point", "false")


def _algorithm_format(config: ConfigReader) -> SourceFormat:
    """Return the format of an algorithm. What it does with activations at run time changes no weight.

    Source: `to_quantized_weight` and `get_weight_scaling_factor` of modelopt.torch.export.quant_utils.
    """
    _check_inputs(config)
    algorithm = config.text("quant_algo")
    if algorithm in ("nvfp4", "w4a16_nvfp4"):
        is_static = algorithm == "nvfp4" and not config.flag("dynamic", False)
        fmt = nvfp4_format("modelopt nvfp4", _group_size(config, 16, only=(16,)))
        return replace(fmt, static_inputs="float4e2m1" if is_static else "")
    if algorithm == "w4a8_nvfp4_fp8":
        return nvfp4_format("modelopt nvfp4", _group_size(config, 32, only=(16, 32)))
    if algorithm in (
        "w4a8_mxfp4_fp8",
        "mxfp4",
    ):  # config_groups may say 16: the scales' shape decides
        return mx_format("modelopt mxfp4", "mxfp4")
    if algorithm == "w8a16":
        return SourceFormat("modelopt int8", "int8", "uint8")
    if algorithm == "mxfp8":
        return mx_format("modelopt mxfp8", "mxfp8")
    if algorithm in ("fp8_pb_wo", "fp8_block_scales"):
        size = _group_size(config, 128)
        return SourceFormat("modelopt fp8 blocks", "fp8", "float8e4m3", "", size, size)
    if algorithm == "fp8":
        return SourceFormat(
            "modelopt fp8", "fp8", "float8e4m3", "", 0, 0, static_inputs="float8e4m3"
        )
    if algorithm == "fp8_per_channel_per_token":
        return SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", 1, 0)
    names = (
        "NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8, W4A8_MXFP4_FP8, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, W8A16, "
        "MIXED_PRECISION"
    )
    raise config.unsupported("quant_algo", names)


def _group_size(config: ConfigReader, default: int, only: tuple[int, ...] = ()) -> int:
    """Return the group size, in newer configs given with the weights of a group; one of `only`, if there are any."""
    reader = config
    if not config.has("group_size"):
        groups = (
            group.table("weights")
            for _, group in config.tables("config_groups")
            if group.has("weights")
        )
        reader = next((weights for weights in groups if weights.has("group_size")), config)
    least, most = (min(only), max(only)) if only else (1, LARGEST)
    size = reader.integer("group_size", least, most, default=default)
    if only and size not in only:
        raise reader.wrong("group_size", " or ".join(map(str, only)))
    return size
