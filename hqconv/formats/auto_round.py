"""Intel's AutoRound: the method `auto-round`. Its matrices are stored as `gptq`, `awq`, `mxfp4`, `mxfp8` or `nvfp4`."""

from __future__ import annotations

from collections.abc import Iterator

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig, refuse_spinquant
from hqconv.formats.gptq import awq_format, gptq_format
from hqconv.formats.mx import mx_format, nvfp4_format
from hqconv.formats.quant_config import ModuleRule, always, quant_method, regex_matcher, when
from hqconv.formats.source_format import PLAIN, SourceFormat

# Zero points in a GPTQ-like packing: stored minus one ("gptq") or as they are ("gptq_v2"). Source: GPTQ_FORMAT and
# GPTQ_FORMAT_NO_ZP of auto_round.inference.backend, and `pack` of auto_round_extension.torch.qlinear_torch_zp and
# qlinear_torch.
_GPTQ_VERSIONS = {
    "auto": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
_AWQ_PACKINGS = ("auto_round:auto_awq", "auto_round:awq")
# Packings of microscaling and nvfp4: `save_quantized_as_fp` of auto_round.export.export_to_autoround.export_to_nvfp_mx,
# and `get_packing_format` names of auto_round.export.formats.backends.autoround.
_FLOAT_TYPES = {
    **dict.fromkeys(("mx_fp", "mx_fp_rceil"), ("mxfp4", "mxfp8")),
    **dict.fromkeys(("mx_fp4", "mx_fp4e2m1"), ("mxfp4",)),
    **dict.fromkeys(("mx_fp8", "mx_fp8e4m3"), ("mxfp8",)),
    **dict.fromkeys(("nv_fp", "nv_fp4", "nv_fp4_with_static_gs"), ("nvfp4",)),
}
_FLOAT_PACKINGS = (
    "auto",
    "auto_round",
    "auto_round:llm_compressor",
    *(f"auto_round:{name}" for name in _FLOAT_TYPES),
)
_REGEX_SIGNS = frozenset(r"*+?^$()[]{}|\\")


_FORMAT = Keys(
    "bits group_size sym data_type act_bits packing_format "
    "act_data_type act_group_size act_sym act_dynamic act_quant_type input_bits"  # quantized activations
)
KEYS = _FORMAT | Keys(
    "block_name_to_quantize to_quant_block_names spinquant_config "
    # How the tool ran; caches and attention.
    "autoround_version amp batch_size enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input dataset "
    "gradient_accumulate_steps iters lr low_gpu_mem_usage minmax_lr nsamples quant_block_list seqlen supported_types "
    "scale_dtype enable_torch_compile seed sampler momentum not_use_best_mse dynamic_max_gap disable_opt_rtn "
    "enable_alg_ext nblocks low_cpu_mem_usage model_dtype regex_config quant_lm_head provider weight_config "
    "modules_to_not_convert backend "
    "static_attention_dtype static_kv_dtype static_attention_granularity static_kv_granularity",
    entries={"extra_config": _FORMAT},
)


@quant_method("auto-round", "auto_round", "intel/auto-round", keys=KEYS)
def parse_auto_round(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse formats in GPTQ's or AWQ's packing, mx_fp and nv_fp, with overrides per module in `extra_config`.

    A key is a name, the end of one, or a regex that is searched; names go before regexes. `rotation_config` is refused
    as an unknown key: its loader rotates the input of every layer (auto_round.algorithms.transforms,
    `apply_rotation_hooks_from_config`).
    """
    refuse_spinquant(config)
    usual = always(_format(config))
    exact: dict[str, SourceFormat] = {}
    patterns: list[ModuleRule] = []
    for key, overrides in config.tables("extra_config"):
        exact[key] = _format(config.overridden(overrides))
        if _REGEX_SIGNS & set(key):
            matches = regex_matcher([f".*(?:{key})"], config.where("extra_config"))
            patterns.append(when(matches, exact[key]))

    def by_name(module: str) -> SourceFormat | None:
        components = module.split(".")
        ends = (".".join(components[start:]) for start in range(len(components)))
        return next((exact[end] for end in ends if end in exact), None)

    return [by_name, *patterns, *_outside_blocks(config), usual]


def _outside_blocks(config: ConfigReader) -> Iterator[ModuleRule]:
    """Yield the rule that leaves out modules outside the blocks: a list of paths, or paths with commas between."""
    key = config.first("block_name_to_quantize", "to_quant_block_names")
    value = config.get(key, [])
    names = value.split(",") if isinstance(value, str) else config.names(key)
    blocks = tuple(name.strip() for name in names if name.strip())
    if blocks:
        yield when(lambda module: not module.startswith(blocks))


def _format(config: ConfigReader) -> SourceFormat:
    if config.integer("bits", 1, 32) >= 16:
        return PLAIN
    kind = config.text("data_type", ("int", *_FLOAT_TYPES), "int")
    if kind != "int":
        return _float_format(config, kind)
    if config.integer("act_bits", 1, 32, 16) < 16:
        raise config.unsupported("act_bits", "16: activations that are not quantized")
    packing = config.text("packing_format", (*_GPTQ_VERSIONS, *_AWQ_PACKINGS), "auto")
    if packing in _AWQ_PACKINGS:
        as_awq = config.replaced(zero_point=not config.flag("sym", True))
        return awq_format(as_awq, "auto-round (awq packing)")
    as_gptq = config.replaced(checkpoint_format=_GPTQ_VERSIONS[packing])
    return gptq_format(as_gptq, "auto-round (gptq packing)")


def _float_format(config: ConfigReader, kind: str) -> SourceFormat:
    """Return the format of mx_fp or nv_fp codes. Their activations, which act_bits describe, change no weight.

    Tensors: weight_packed [N, K / 2] of two codes a byte, or `weight` of fp8; weight_scale as exponent bytes or e4m3;
    weight_global_scale, which divides. Source: `QuantLinear.pack` of auto_round.export.export_to_autoround.qlinear_fp.
    """
    config.text("packing_format", _FLOAT_PACKINGS, "auto")
    bits = config.integer("bits", 4, 8)
    encoding = next((name for name in _FLOAT_TYPES[kind] if name.endswith(str(bits))), "")
    if not encoding:
        raise config.unsupported("bits", f"4 or 8, as {kind} says")
    name = f"auto-round {encoding}"
    return nvfp4_format(name, 16) if encoding == "nvfp4" else mx_format(name, encoding)
