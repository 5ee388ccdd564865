"""fp8: the methods `fp8` (transformers, DeepSeek, MiniMax, MiMo), `fbgemm_fp8` and `w4afp8`, and their encodings.

`w4afp8`, as SGLang and vLLM serve it, has int4 experts in a model of fp8 blocks.
Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hqconv.errors import InputError
from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import (
    SCALE_DTYPES,
    Decoded,
    Encoding,
    Headers,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.gptq import dynamic_rules
from hqconv.formats.mx import MXFP4, nvfp4_format
from hqconv.formats.quant_config import (
    Matcher,
    ModuleRule,
    always,
    globbed_in,
    parents,
    quant_method,
    skipped_names,
    when,
)
from hqconv.formats.source_format import ANY, SourceFormat
from hqconv.schemas.tensors import FLOATS, humming_name

# DeepSeek's names of code types, and torch's, which MiniMax writes.
_CODE_DTYPES = {
    "e4m3": "float8e4m3",
    "e5m2": "float8e5m2",
    "float8_e4m3fn": "float8e4m3",
    "float8_e5m2": "float8e5m2",
}
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv")

# --- config ------------------------------------------------------------------------------------------------


_GPTQMODEL = Keys(
    "weight_block_size format weight_scale_method weight_scale_semantics bits group_size desc_act sym smoother"
)
KEYS = _GPTQMODEL | Keys(
    "fmt scale_fmt activation_scheme modules_to_not_convert ignored_layers "
    "expert_dtype store_dtype routed_experts_quant_method mxfp4_block_size "  # DeepSeek, MiMo, Ling
    "moe_quant_algo ignore exclude_modules "  # ModelOpt's, of nvfp4 experts
    "weight_dtype checkpoint_format method "
    "modules_to_convert dequantize is_checkpoint_fp8_serialized run_compressed "  # of a loader
    "config_groups quant_algo kv_cache_quant_algo kv_cache_scheme targets "  # ModelOpt's
    "lm_head activation pack_dtype meta",  # GPTQModel's
    entries={"quantized_layers": Keys("quant_algo group_size"), "dynamic": _GPTQMODEL},
)


@quant_method("fp8", keys=KEYS)
def parse_fp8(config: ConfigReader, text: TextConfig) -> list[ModuleRule]:
    """Parse fp8 of transformers, DeepSeek and GPTQModel: per block, or per tensor or channel as the scales' shapes say.

    DeepSeek-V4 gives the dtype of its routed experts in the model's config (V4.1: in this one); MiMo and Ling give
    their method.
    """
    skipped = skipped_names(config, "modules_to_not_convert", "ignored_layers")
    usual = always(_dense(config))
    overrides = dynamic_rules(config, _dense)
    return [skipped, *_routed_experts(config, text), *overrides, usual]


def _dense(config: ConfigReader) -> SourceFormat:
    """Return the format of all modules, or of those that GPTQModel's `dynamic` gives other values.

    GPTQModel stores fp8_max / amax as weight_scale_inv, so its scale divides. Source: `quantize_fp8_weight` and
    `dequantize_weight` of gptqmodel, nn_modules/qlinear/fp8.py.
    """
    rows = ANY
    columns = ANY
    if config.has("weight_block_size"):
        rows, columns = config.pair("weight_block_size")
    dtype_key = config.first("fmt", "weight_dtype", "format")
    dtype = config.text(dtype_key, ("fp8", *_CODE_DTYPES), "fp8")
    scale_fmt = config.text("scale_fmt", ("float", "ue8m0"), "float")
    semantics = config.text("weight_scale_semantics", ("inverse", ""), "")
    options: list[tuple[str, object]] = []
    if scale_fmt == "ue8m0":
        options.append(("scale_fmt", "ue8m0"))
    if semantics == "inverse":
        options.append(("scale_inverted", True))
    return SourceFormat(
        "gptqmodel fp8" if semantics == "inverse" else "fp8",
        "fp8",
        _CODE_DTYPES.get(dtype, ""),
        "float8e8m0" if scale_fmt == "ue8m0" else "",
        rows,
        columns,
        options=tuple(options),
        static_inputs="float8e4m3" if config.get("activation_scheme") == "static" else "",
    )


def _is_routed(module: str) -> bool:
    return ".experts." in f".{module}."


def _routed_experts(config: ConfigReader, text: TextConfig) -> Iterator[ModuleRule]:
    """Yield the rules of routed experts whose format differs from the rest of an fp8 checkpoint.

    Experts that ModelOpt left out (an MTP layer's) keep their original format.
    """
    if config.has("moe_quant_algo"):
        config.text("moe_quant_algo", ("nvfp4",))
        is_quantized = _modelopt_modules(config)
        yield when(
            lambda module: _is_routed(module) and is_quantized(module), nvfp4_format("nvfp4")
        )
    # The model's config counts where the quantization config has no such key.
    keys = ("routed_experts_quant_method", "store_dtype", "expert_dtype")
    if not config.has(*keys):
        config = ConfigReader({"expert_dtype": text.get("expert_dtype")}, "config.json")
    method = config.text(config.first(*keys), ("mxfp4", "fp4", "fp8", *_CODE_DTYPES), "fp8")
    if method in ("mxfp4", "fp4"):
        yield when(_is_routed, MXFP4)


def _modelopt_modules(config: ConfigReader) -> Matcher:
    """Match modules of an fp8 checkpoint that ModelOpt quantized: listed with its algorithm, and not ignored."""
    key = config.first("ignore", "exclude_modules")
    is_ignored = globbed_in(config.names(key), config.where(key), with_parents=True)
    layers = dict(config.tables("quantized_layers"))
    for layer in layers.values():
        layer.text("quant_algo", ("nvfp4", "w4a16_nvfp4"))
    is_all = not config.has("quantized_layers")
    return lambda module: (
        not is_ignored(module) and (is_all or any(name in layers for name in parents(module)))
    )


@quant_method("fbgemm_fp8", keys=Keys("modules_to_not_convert activation_scale_ub dequantize"))
def parse_fbgemm_fp8(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse fbgemm's fp8: one scale per output row."""
    skipped = skipped_names(config, "modules_to_not_convert")
    return [skipped, always(SourceFormat("fbgemm fp8", "fp8", "float8e4m3", "", 1, 0))]


# --- tensors -----------------------------------------------------------------------------------------------


@register_encoding
class Fp8(Encoding):
    """fp8 weights [N, K] with a scale per tensor, channel, group or block; `weight_scale_inv` multiplies too.

    A scale in uint8 is an e8m0 exponent. With scale_fmt ue8m0 (DeepSeek-V3.1) a float scale must be a power of two.
    Option scale_inverted: the stored scale divides (GPTQModel), and its float32 reciprocal is taken.
    Source: transformers, integrations/finegrained_fp8.py, Fp8Dequantize.
    """

    name = "fp8"
    part_names = _SCALE_NAMES

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        matrix.require_multiples(4)
        dtypes = FLOATS if fmt.divides("scale") else (*FLOATS, *SCALE_DTYPES["float8e8m0"])
        scales = matrix.scale_shapes
        if len(scales[0]) == 2:  # ModelOpt's FP8_PB_WO keeps the dimensions of the blocks
            scales = (*scales, (scales[0][0], 1, scales[0][1], 1))
        return [
            StoredTensor("weight", ("weight",), ("F8_E4M3", "F8_E5M2"), ((n, k),)),
            StoredTensor("scale", _SCALE_NAMES, dtypes, scales),
        ]

    def resolve_groups(self, fmt: SourceFormat, headers: Headers, n: int) -> SourceFormat:
        """Fill in group sizes: one scale is per tensor, N scales are per channel."""
        if ANY not in (fmt.group_n, fmt.group_k):
            return fmt
        scale = next((headers[name] for name in (*_SCALE_NAMES, "scales") if name in headers), None)
        if scale is None:  # is reported when parts are matched
            return replace(fmt, group_n=1, group_k=0)
        if math.prod(scale.shape) == 1:
            return replace(fmt, group_n=0, group_k=0)
        if scale.shape in ((n,), (n, 1)):
            return replace(fmt, group_n=1, group_k=0)
        raise InputError(
            "The config gives no block size for these scales.",
            where=scale.name,
            expected=f"one scale, or one for each of {n} rows, where quantization_config has no weight_block_size",
            found=list(scale.shape),
            remedy="Put the block of these scales into quantization_config as weight_block_size, such as [128, 128].",
        )

    def complete(self, fmt: SourceFormat, found: Headers) -> SourceFormat:
        """Take the code type from the weight's header."""
        weight = found["weight"]
        b_dtype = humming_name(weight.dtype)
        if fmt.b_dtype not in ("", b_dtype):
            raise InputError(
                "A tensor has the wrong dtype.",
                where=weight.name,
                expected=fmt.b_dtype,
                found=weight.dtype,
            )
        return super().complete(replace(fmt, b_dtype=b_dtype), found)

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep the codes; give e8m0 scales their dtype."""
        import torch

        scale = matrix.scale()
        if matrix.fmt.divides("scale"):
            scale = matrix.multiplier("scale")
        elif scale.dtype != torch.float8_e8m0fnu and matrix.fmt.option("scale_fmt") == "ue8m0":
            mantissa, _ = torch.frexp(scale.float())
            expected = "ue8m0 scales: powers of two"
            matrix.refuse_where(mantissa != 0.5, "scale", "A scale is no power of two.", expected)
        return matrix.coded(matrix.int32_words(), scale)


_BLOCK = (128, 128)
_W4AFP8_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
W4AFP8_KEYS = Keys(
    "group_size weight_block_size ignored_layers modules_to_not_convert ignore "
    "activation_scheme linear_activation_scheme moe_activation_scheme kv_cache_scheme fmt quant_algo"
)


@quant_method("w4afp8", keys=W4AFP8_KEYS)
def parse_w4afp8(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse w4afp8: int4 in groups of 128 for routed experts, fp8 in blocks for the rest.

    Source: W4AFP8Config of vllm, model_executor/layers/quantization/w4afp8.py, and W4AFp8Config of sglang,
    srt/layers/quantization/w4afp8.py.
    """
    if config.has("weight_block_size") and config.pair("weight_block_size") != _BLOCK:
        raise config.unsupported("weight_block_size", list(_BLOCK))
    size = config.integer("group_size", 128, 128, default=128)
    int4 = SourceFormat(
        "w4afp8 int4", "int4_pairs", "uint4", "", 1, size, static_inputs="float8e4m3"
    )
    dense = SourceFormat("w4afp8 fp8", "fp8", "float8e4m3", "", *_BLOCK)
    skipped = skipped_names(config, "ignored_layers", "modules_to_not_convert", "ignore")
    return [skipped, when(_is_routed, int4), always(dense)]


@register_encoding
class Int4Pairs(Encoding):
    """int4 codes (two's complement), two to a byte [N, K / 2], the first in the low bits; scales [N, G] multiply.

    Source: `_convert_signed_int4_to_uint4b8` of vllm, model_executor/layers/quantization/w4afp8.py, and
    `pack_int4_values_to_int8` of sglang, sgl-kernel/tests/test_cutlass_w4a8_moe_mm.py, whose reference multiplies.
    """

    name = "int4_pairs"
    part_names = _W4AFP8_SCALE_NAMES
    b_dtype = "uint4"

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        matrix.require_multiples(fmt.group_k)
        return [
            StoredTensor("weight", ("weight",), ("I8", "U8"), ((n, k // 2),)),
            StoredTensor("scale", _W4AFP8_SCALE_NAMES, FLOATS, ((n, k // fmt.group_k),)),
        ]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Turn two's complement into offset binary."""
        import torch

        from hqconv.quantization import bit_codec

        packed = bit_codec.as_words(matrix["weight"].contiguous().view(torch.uint8) ^ 0x88)
        return matrix.coded(packed, matrix["scale"])
