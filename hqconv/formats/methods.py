"""Quantization methods that describe all modules at once, with exceptions: gptq, awq, auto-round, bitnet, bitsandbytes.

Each function reads a method's words into rules; the first rule that speaks of a module decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hqconv.formats.config_reader import (
    ConfigReader,
    Matcher,
    Rule,
    Text,
    always,
    beginning_with,
    containing,
    holding,
    on_path,
    regex,
    skipped_names,
    when,
)
from hqconv.formats.source_format import ANY, PLAIN, SourceFormat


def gptq(words: ConfigReader, _text: Text) -> list[Rule]:
    """GPTQ of AutoGPTQ and GPTQModel, with GPTQModel's `dynamic` overrides.

    modules_in_block_to_quantize: only modules whose names contain one of them are quantized.
    """
    rules = list(_dynamic(words, gptq_format))
    parts = _flat(words, "modules_in_block_to_quantize")
    if parts:
        quantized = containing(parts)
        rules.append(when(lambda module: not quantized(module)))
    return [*rules, always(gptq_format(words))]


def _flat(words: ConfigReader, key: str) -> list[str]:
    """The strings of a list of strings or of lists of strings; none where the key is absent."""
    entries = words.values.get(key) or []
    if not isinstance(entries, list):
        raise words.wrong(key, "a list")
    flat = [item for entry in entries for item in (entry if isinstance(entry, list) else [entry])]
    return words.replaced(**{key: flat}).names(key)


def _dynamic(words: ConfigReader, format_of: Callable[[ConfigReader], SourceFormat]) -> Iterator[Rule]:
    """GPTQModel's rules: "-:regex" leaves modules out, "+:regex" (or without a sign) overrides keys."""
    if not words.has("dynamic"):
        return
    outer = words.table("dynamic")
    for pattern in outer.values:
        search = regex(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, outer.path)
        if pattern.startswith("-:"):
            yield when(beginning_with(search))
        else:
            yield when(beginning_with(search), format_of(words.overridden(outer.table(pattern))))


def gptq_format(words: ConfigReader, title: str = "gptq") -> SourceFormat:
    """One GPTQ format. Version 1 stores a zero point minus one, version 2 as it is."""
    bits = words.integer("bits", 2, 8)
    group_size = words.group_size("group_size")
    is_ordered = words.flag("desc_act", False)
    key = words.first("checkpoint_format", "format")
    version = words.text(key, default="gptq")
    if version not in ("gptq", "gptq_v2") or words.flag("is_marlin_format", False):
        raise words.unsupported(key, "gptq or gptq_v2")
    return SourceFormat(
        f"{title} int{bits}",
        "gptq",
        f"uint{bits}",
        group_k=group_size,
        has_zero_point=not words.flag("sym", True),
        # With one group for all columns their order changes nothing.
        is_permuted=is_ordered and group_size > 0,
        options=(("zero_offset", 0 if version == "gptq_v2" else 1), ("desc_act", is_ordered)),
    )


def awq(words: ConfigReader, _text: Text) -> list[Rule]:
    """AWQ in AutoAWQ's gemm layout. A module is left out if an entry is on its path, as in transformers."""
    key = words.first("version", "checkpoint_format", "format")
    if words.text(key, default="gemm") != "gemm" or words.values.get("backend") == "llm-awq":
        raise words.unsupported(key, "gemm")
    skipped = when(on_path(words.names("modules_to_not_convert")))
    return [skipped, *_dynamic(words, awq_format), always(awq_format(words))]


def awq_doubts(words: ConfigReader) -> Matcher:
    """Modules whose names contain an entry: AutoAWQ leaves them out, so "gate" is gate_proj too, others do not.

    Source: `exclude_layers_to_not_quantize` of awq.utils.quant_utils. Its lists for Qwen3-MoE are also written by tools
    that quantize gate_proj, and vLLM compares them with the name of the experts' module alone.
    """
    return containing(words.names("modules_to_not_convert"))


def awq_format(words: ConfigReader, title: str = "awq") -> SourceFormat:
    """One AWQ format; its order of nibbles is defined for 4 bits only."""
    bits = words.integer(words.first("bits", "w_bit"), 4, 4)
    return SourceFormat(
        f"{title} int{bits}",
        "awq",
        f"uint{bits}",
        group_k=words.group_size("group_size", "q_group_size"),
        has_zero_point=words.flag("zero_point", not words.flag("sym", False)),
    )


# Whether a GPTQ-like packing stores zero points minus one. Source: GPTQ_FORMAT and GPTQ_FORMAT_NO_ZP of
# auto_round.inference.backend, and `pack` of auto_round_extension.torch.qlinear_torch_zp and qlinear_torch.
_AUTO_ROUND_ZERO_OFFSET = {
    "auto": 1,
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
}
_AUTO_ROUND_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_REGEX_SIGNS = frozenset(r"*+?^$()[]{}|\\")


def auto_round(words: ConfigReader, _text: Text) -> list[Rule]:
    """AutoRound's integer formats, in GPTQ's or AWQ's packing, with overrides per module in `extra_config`.

    A key is a name, the end of one, or a regex that is searched; names go before regexes.
    """
    exact: dict[str, SourceFormat] = {}
    patterns: list[Rule] = []
    for key, overrides in words.tables("extra_config"):
        found = _auto_round_format(words.overridden(overrides))
        exact[key] = found
        if _REGEX_SIGNS & set(key):
            search = regex(key, words.where("extra_config"))
            patterns.append(when(holding(search), found))

    def by_name(module: str) -> SourceFormat | None:
        ends = [module]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        return next((exact[end] for end in ends if end in exact), None)

    key = words.first("block_name_to_quantize", "to_quant_block_names")
    outside = list(_outside_blocks(words, key)) if words.has(key) else []
    return [by_name, *patterns, *outside, always(_auto_round_format(words))]


def _outside_blocks(words: ConfigReader, key: str) -> Iterator[Rule]:
    """The rule that leaves out modules outside the blocks: a list of paths, or paths with commas between."""
    value = words.values[key]
    names = value.split(",") if isinstance(value, str) else words.names(key)
    blocks = tuple(name.strip() for name in names if name.strip())
    if blocks:
        yield when(lambda module: not module.startswith(blocks))


def _auto_round_format(words: ConfigReader) -> SourceFormat:
    if words.integer("bits", 1, 32) >= 16:
        return PLAIN
    if words.text("data_type", default="int") != "int":
        raise words.unsupported("data_type", "int")
    if words.integer("act_bits", 1, 32, 16) < 16:
        raise words.unsupported("act_bits", "16: activations that are not quantized")
    packing = words.text("packing_format", default="auto")
    if packing in _AUTO_ROUND_AWQ:
        layout = words.replaced(zero_point=not words.flag("sym", True))
        return awq_format(layout, "auto-round (awq packing)")
    if packing not in _AUTO_ROUND_ZERO_OFFSET:
        raise words.unsupported("packing_format", ", ".join([*_AUTO_ROUND_ZERO_OFFSET, *_AUTO_ROUND_AWQ]))
    version = "gptq" if _AUTO_ROUND_ZERO_OFFSET[packing] else "gptq_v2"
    layout = words.replaced(checkpoint_format=version)
    return gptq_format(layout, "auto-round (gptq packing)")


def bitnet(words: ConfigReader, _text: Text) -> list[Rule]:
    """BitNet's ternary weights, four to a byte, with one scale per matrix.

    scale_inverted: `BitLinear` divides by the stored scale, `AutoBitLinear` multiplies with it. Source:
    their `forward` in transformers.integrations.bitnet.
    """
    kind = words.text("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    if words.text("quantization_mode", ("offline", "online"), "offline") == "online":
        raise words.unsupported("quantization_mode", "offline: online weights are rounded on each use")
    if words.flag("use_rms_norm", False):
        raise words.unsupported("use_rms_norm", "false: the kernel has no norm before an expert")
    options = (("scale_inverted", kind == "bitlinear"),)
    ternary = SourceFormat("bitnet", "bitnet", "float2e0m1", group_n=0, group_k=0, options=options)
    return [skipped_names(words, "modules_to_not_convert"), always(ternary)]


def bitsandbytes(words: ConfigReader, _text: Text) -> list[Rule]:
    """bitsandbytes' 4-bit tables; the sizes of its blocks are in the checkpoint."""
    if not words.flag(words.first("load_in_4bit", "_load_in_4bit"), False):
        key = words.first("load_in_8bit", "_load_in_8bit", "load_in_4bit")
        raise words.unsupported(key, "load_in_4bit: true")
    kind = words.text("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    options = (("quant_type", kind),)
    table = SourceFormat(f"bitsandbytes {kind}", "bnb4", group_n=ANY, group_k=ANY, options=options)
    return [skipped_names(words, "llm_int8_skip_modules"), always(table)]
