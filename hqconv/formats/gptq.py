"""GPTQ and AWQ, as AutoGPTQ, AutoAWQ and GPTQModel write them, and Intel's AutoRound: methods and encodings.

AutoRound's matrices are stored as `gptq`, `awq`, `mxfp4`, `mxfp8` or `nvfp4`.
Legend: N output rows, K input columns, G groups along K, b bits of a code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig, refuse_spinquant
from hqconv.formats.encoding import (
    Decoded,
    Encoding,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.mx import mx_format, nvfp4_format
from hqconv.formats.quant_config import (
    ModuleRule,
    always,
    containing,
    on_path,
    quant_method,
    regex_matcher,
    when,
)
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.tensors import FLOATS, code_bits

if TYPE_CHECKING:
    import torch

# --- config ------------------------------------------------------------------------------------------------

# What decides the format, and how a tool ran: GPTQModel's meta_field_map, transformers' GPTQConfig, AutoGPTQ's
# BaseQuantizeConfig.
_FORMAT = Keys(
    "bits wbits w_bit group_size q_group_size desc_act sym zero_point checkpoint_format format is_marlin_format "
    "pack_dtype "
    "meta damp_percent damp_auto_increment true_sequential static_groups mse model_name_or_path "
    "model_file_base_name tokenizer dataset model_seqlen max_input_length batch_size pad_token_id cache_block_outputs "
    "lm_head device module_name_preceding_first_block block_name_to_quantize to_quant_block_names autoround_version "
    "enable_quanted_input provider act_group_aware pack_impl mock_quantization foem hessian v2 v2_alpha "
    "v2_memory_device gptaq fallback failsafe adapter_config parallel_packing gc_mode moe telemetry offload_to_disk "
    "offload_to_disk_path weight_only preprocessors smoother "
    # Kernels that a loader takes; activations at run time.
    "backend use_exllama use_cuda_fp16 exllama_config max_input_len disable_exllama awq_gemm_checkpoint activation"
)
GPTQ_KEYS = _FORMAT | Keys("method modules_in_block_to_quantize", entries={"dynamic": _FORMAT})
AWQ_KEYS = GPTQ_KEYS | Keys(
    "version modules_to_not_convert do_fuse modules_to_fuse fuse_max_seq_len"
)


@quant_method("gptq", keys=GPTQ_KEYS)
def parse_gptq(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse a config of AutoGPTQ or GPTQModel, with GPTQModel's `dynamic` overrides.

    modules_in_block_to_quantize: only modules whose names contain one of them are quantized. `rotation` and `adapter`
    are refused as unknown keys: GPTQModel rotates the input of a down projection when it runs
    (`_setup_rotation_online_had` of models/loader.py).
    """
    config.text("method", ("gptq",), "gptq")
    usual = always(gptq_format(config))
    rules = list(dynamic_rules(config, gptq_format))
    if names := _modules_to_quantize(config):
        is_quantized = containing(names)
        rules.append(when(lambda module: not is_quantized(module)))
    return [*rules, usual]


def _modules_to_quantize(config: ConfigReader) -> list[str]:
    """Return the strings of a list of strings or of lists of strings; none where the key is absent."""
    key = "modules_in_block_to_quantize"
    entries = config.get(key, [])
    if not isinstance(entries, list):
        raise config.wrong(key, "a list")
    flat = [item for entry in entries for item in (entry if isinstance(entry, list) else [entry])]
    return config.replaced(**{key: flat}).names(key)


def dynamic_rules(
    config: ConfigReader, format_of: Callable[[ConfigReader], SourceFormat]
) -> Iterator[ModuleRule]:
    """Yield GPTQModel's rules: "-:regex" leaves modules out, "+:regex" (or without a sign) overrides keys."""
    if not config.has("dynamic"):
        return
    overrides = config.table("dynamic")
    for pattern in overrides.values:
        regex = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        matches = regex_matcher([regex], overrides.path)
        if pattern.startswith("-:"):
            yield when(matches)
        else:
            yield when(matches, format_of(config.overridden(overrides.table(pattern))))


def gptq_format(config: ConfigReader, title: str = "gptq") -> SourceFormat:
    """Return one GPTQ format. Version 1 stores a zero point minus one, version 2 as it is."""
    bits_key = config.agreed("bits", "wbits", "w_bit")
    bits = config.integer(bits_key, 2, 8)
    if bits not in (2, 3, 4, 8):
        raise config.unsupported(bits_key, "2, 3, 4 or 8: others are spread over bit planes")
    group_size = config.group_size("group_size", "q_group_size")
    is_ordered = config.flag("desc_act", False)
    key = config.agreed("checkpoint_format", "format")
    version = config.text(key, ("gptq", "gptq_v2"), "gptq")
    if config.flag("is_marlin_format", False):
        raise config.unsupported("is_marlin_format", "false")
    return SourceFormat(
        f"{title} int{bits}",
        "gptq",
        f"uint{bits}",
        group_k=group_size,
        has_zero_point=not config.flag("sym", True),
        # With one group for all columns their order changes nothing.
        is_permuted=is_ordered and group_size > 0,
        options=(("zero_offset", 0 if version == "gptq_v2" else 1), ("desc_act", is_ordered)),
    )


# Undecided are modules whose names contain an entry: AutoAWQ leaves them out, so "gate" is gate_proj too, others do
# not. Source: `exclude_layers_to_not_quantize` of awq.utils.quant_utils. Its lists for Qwen3-MoE are also written by
# tools that quantize gate_proj, and vLLM compares them with the name of the experts' module alone.
@quant_method(
    "awq",
    keys=AWQ_KEYS,
    undecided=lambda config: containing(config.names("modules_to_not_convert")),
)
def parse_awq(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse AutoAWQ's config. A module is left out if an entry is on its path, as in transformers."""
    config.text("method", ("awq",), "awq")
    config.text(config.first("version", "checkpoint_format", "format"), ("gemm",), "gemm")
    if config.get("backend") == "llm-awq":
        raise config.unsupported("backend", "autoawq")
    skipped = when(on_path(config.names("modules_to_not_convert")))
    usual = always(awq_format(config))
    return [skipped, *dynamic_rules(config, awq_format), usual]


def awq_format(config: ConfigReader, title: str = "awq") -> SourceFormat:
    """Return one AWQ format; its order of nibbles is defined for 4 bits only."""
    bits = config.integer(config.agreed("bits", "w_bit", "wbits"), 4, 4)
    return SourceFormat(
        f"{title} int{bits}",
        "awq",
        f"uint{bits}",
        group_k=config.group_size("group_size", "q_group_size"),
        has_zero_point=config.flag("zero_point", not config.flag("sym", False)),
    )


# --- tensors -----------------------------------------------------------------------------------------------


def _zeros_and_scales(matrix: MatrixHeaders) -> list[StoredTensor]:
    """Return both tensors of the groups: zero points packed along N, and scales."""
    fmt = matrix.fmt
    groups = matrix.num_groups
    zeros = ((groups, matrix.n * code_bits(fmt.b_dtype) // 32),)
    return [
        StoredTensor("zero_point", ("qzeros",), ("I32",), zeros, is_required=fmt.has_zero_point),
        StoredTensor("scale", ("scales",), FLOATS, ((groups, matrix.n),)),
    ]


@register_encoding
class Gptq(Encoding):
    """qweight int32 [K * b / 32, N] packed along K, qzeros [G, N * b / 32] along N, scales [G, N].

    Option zero_offset: 1 where zero - 1 modulo 2**b is stored ("gptq"), 0 for the zero itself ("gptq_v2").
    Option desc_act: true if g_idx may order the columns differently from the group size.
    Source: gptqmodel, nn_modules/qlinear/__init__.py and utils/model.py, convert_gptq_v1_to_v2_format_module.
    """

    name = "gptq"
    weight_names = ("qweight",)
    part_names = ("qzeros", "scales", "g_idx")

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        bits = code_bits(fmt.b_dtype)
        divisor = 32 // math.gcd(bits, 32)
        matrix.require_multiples(divisor, divisor)
        is_ordered = bool(fmt.option("desc_act"))
        return [
            StoredTensor("weight", ("qweight",), ("I32",), ((k * bits // 32, n),)),
            *_zeros_and_scales(matrix),
            StoredTensor("g_idx", ("g_idx",), ("I32", "I64"), ((k,),), is_required=is_ordered),
        ]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Transpose the words; the zero points are codes [N, G]."""
        packed = matrix["weight"].t().contiguous()
        scale = matrix["scale"].t().contiguous()
        zero = _zero_points(matrix.fmt, matrix["zero_point"].contiguous())
        zero_point = matrix.zero_or_midpoint(zero.t().contiguous())
        columns = matrix.group_index(scale.size(1)) if "g_idx" in matrix else None
        if columns is not None and not matrix.fmt.option("desc_act"):
            matrix.refuse(
                "g_idx",
                "The columns are in another order than the config says.",
                f"column // {matrix.fmt.group_k or len(columns)}, because desc_act is false",
                "other groups",
            )
        return matrix.coded(packed, scale, zero_point=zero_point, column_groups=columns)


def _zero_points(fmt: SourceFormat, stored: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 zero points [G, N]; GPTQModel subtracts 1 from whole int32 words, so that a zero of 0 borrows."""
    from hqconv.quantization import bit_codec

    bits = code_bits(fmt.b_dtype)
    offset = int(fmt.option("zero_offset"))
    if offset and 32 % bits == 0:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        return bit_codec.unpack(stored + ones, bits)  # wraps
    zero: torch.Tensor = (bit_codec.unpack(stored, bits) + offset) & (2**bits - 1)
    return zero


@register_encoding
class Awq(Encoding):
    """qweight int32 [K, N / 8], qzeros [G, N / 8] with nibbles 0 2 4 6 1 3 5 7, scales [G, N].

    Source: autoawq, utils/packing_utils.py.
    """

    name = "awq"
    weight_names = ("qweight",)
    part_names = ("qzeros", "scales")

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        matrix.require_multiples(8, 8)
        return [
            StoredTensor("weight", ("qweight",), ("I32",), ((matrix.k, matrix.n // 8),)),
            *_zeros_and_scales(matrix),
        ]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Transpose the nibbles into words along K."""
        from hqconv.quantization.bit_codec import AWQ_ORDER, reordered_nibbles, transpose_4bit

        packed = transpose_4bit(matrix["weight"], AWQ_ORDER)
        zero_point = None
        if "zero_point" in matrix:
            zero_point = matrix.zero_or_midpoint(
                reordered_nibbles(matrix["zero_point"]).t().contiguous()
            )
        return matrix.coded(packed, matrix["scale"].t().contiguous(), zero_point=zero_point)


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


_AUTO_ROUND_LAYER = Keys(
    "bits group_size sym data_type act_bits packing_format "
    "act_data_type act_group_size act_sym act_dynamic act_quant_type input_bits"  # quantized activations
)
AUTO_ROUND_KEYS = _AUTO_ROUND_LAYER | Keys(
    "block_name_to_quantize to_quant_block_names spinquant_config "
    # How the tool ran; caches and attention.
    "autoround_version amp batch_size enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input dataset "
    "gradient_accumulate_steps iters lr low_gpu_mem_usage minmax_lr nsamples quant_block_list seqlen supported_types "
    "scale_dtype enable_torch_compile seed sampler momentum not_use_best_mse dynamic_max_gap disable_opt_rtn "
    "enable_alg_ext nblocks low_cpu_mem_usage model_dtype regex_config quant_lm_head provider weight_config "
    "modules_to_not_convert backend "
    "static_attention_dtype static_kv_dtype static_attention_granularity static_kv_granularity",
    entries={"extra_config": _AUTO_ROUND_LAYER},
)


@quant_method("auto-round", "auto_round", "intel/auto-round", keys=AUTO_ROUND_KEYS)
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
    return nvfp4_format(name) if encoding == "nvfp4" else mx_format(name, encoding)
