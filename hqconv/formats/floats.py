"""Quantization methods of small floats that describe all modules at once, with exceptions: fp8, mxfp4, mxfp8.

Each function reads a method's words into rules; the first rule that speaks of a module decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from hqconv.formats.config_reader import (
    ConfigReader,
    Matcher,
    Rule,
    Text,
    always,
    globbed_in,
    on_path,
    parents,
    skipped_names,
    when,
)
from hqconv.formats.source_format import ANY, SourceFormat

MXFP4 = SourceFormat("mxfp4", "mxfp4", "float4e2m1", "float8e8m0", 1, 32)


def nvfp4_format(name: str, group_size: int) -> SourceFormat:
    """NVIDIA's fp4: an e4m3 scale per group and one scale for the matrix."""
    return SourceFormat(name, "nvfp4", "float4e2m1", "float8e4m3", 1, group_size, scale_2="tensor")


# DeepSeek's words, and torch's, as MiniMax writes them.
_FP8_CODES = {
    "e4m3": "float8e4m3",
    "e5m2": "float8e5m2",
    "float8_e4m3fn": "float8e4m3",
    "float8_e5m2": "float8e5m2",
}


def fp8(words: ConfigReader, text: Text) -> list[Rule]:
    """fp8 of transformers and DeepSeek, per block, or per tensor or channel as the scales' shapes say.

    DeepSeek-V4 names its routed experts' dtype apart from it, in the model's config (V4.1: in this one), MiMo and
    Ling name their method.
    """
    skipped = skipped_names(words, "modules_to_not_convert", "ignored_layers")
    rows, columns = words.pair("weight_block_size") if words.has("weight_block_size") else (ANY, ANY)
    codes = _FP8_CODES[words.text("fmt", tuple(_FP8_CODES))] if words.has("fmt") else ""
    is_power = words.text("scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    dense = SourceFormat(
        "fp8",
        "fp8",
        codes,
        "float8e8m0" if is_power else "",
        rows,
        columns,
        options=(("scale_fmt", "ue8m0"),) if is_power else (),
        static_inputs="float8e4m3" if words.values.get("activation_scheme") == "static" else "",
    )
    return [skipped, *_routed_experts(words, text), always(dense)]


def _routed_experts(words: ConfigReader, text: Text) -> Iterator[Rule]:
    """The rules for routed experts that are stored otherwise than the rest of an fp8 checkpoint.

    Where ModelOpt quantized them, those that it left out are as they were (an MTP block's).
    """

    def is_routed(module: str) -> bool:
        return ".experts." in f".{module}."

    source = words if words.has("expert_dtype") else ConfigReader(text, "config.json")
    methods = [key for key in ("routed_experts_quant_method", "store_dtype") if words.has(key)]
    if methods:
        for key in methods:
            if words.text(key) != "mxfp4":
                raise words.unsupported(key, "mxfp4")
        words.integer("mxfp4_block_size", 32, 32, 32)
        yield when(is_routed, MXFP4)
    elif words.has("moe_quant_algo"):
        if words.text("moe_quant_algo") != "nvfp4":
            raise words.unsupported("moe_quant_algo", "NVFP4")
        is_quantized = _of_modelopt(words)
        yield when(lambda module: is_routed(module) and is_quantized(module), nvfp4_format("nvfp4", 16))
    if source.has("expert_dtype") and source.text("expert_dtype", ("fp4", "fp8")) == "fp4":
        yield when(is_routed, MXFP4)


def _of_modelopt(words: ConfigReader) -> Matcher:
    """Whether ModelOpt quantized a module of an fp8 checkpoint: listed with its algorithm, and not to be ignored."""
    keys = ("ignore", "exclude_modules")
    ignored = globbed_in(words.names(*keys), words.where(words.first(*keys)), with_parents=True)
    layers = dict(words.tables("quantized_layers"))
    for layer in layers.values():
        if layer.text("quant_algo") not in ("nvfp4", "w4a16_nvfp4"):
            raise layer.unsupported("quant_algo", "NVFP4")
    is_all = not words.has("quantized_layers")
    return lambda module: not ignored(module) and (is_all or any(name in layers for name in parents(module)))


def fbgemm_fp8(words: ConfigReader, _text: Text) -> list[Rule]:
    """fbgemm's fp8: one scale per output row."""
    skipped = skipped_names(words, "modules_to_not_convert")
    return [skipped, always(SourceFormat("fbgemm fp8", "fp8", "float8e4m3", "", 1, 0))]


def mxfp4(words: ConfigReader, _text: Text) -> list[Rule]:
    """GPT-OSS: fp4 with a power-of-two scale per 32 columns."""
    return [skipped_names(words, "modules_to_not_convert"), always(MXFP4)]


def mxfp8(words: ConfigReader, _text: Text) -> list[Rule]:
    """MiniMax: fp8 with a power-of-two scale per 32 columns, ModelOpt's MXFP8 in other words. A name covers its path.

    Source: `ModelOptMxFp8Config.from_config` of vLLM's layers/quantization/modelopt.py.
    """
    if words.has("weight_block_size") and words.pair("weight_block_size") != (1, 32):
        raise words.unsupported("weight_block_size", "[1, 32]")
    key = words.first("ignored_layers", "modules_to_not_convert")
    names = words.names(key)
    skipped = when(globbed_in(names, words.where(key), with_parents=True))
    return [
        skipped,
        when(on_path(names)),
        always(SourceFormat("mxfp8", "mxfp8", "float8e4m3", "float8e8m0", 1, 32)),
    ]
