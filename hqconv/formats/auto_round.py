"""Intel's AutoRound: the method `auto-round`. Its matrices are stored as `gptq` or `awq`."""

from __future__ import annotations

from collections.abc import Iterator

from hqconv.formats.awq import awq_format
from hqconv.formats.bounded_regex import BoundedRegex
from hqconv.formats.config_reader import ConfigReader, Text
from hqconv.formats.gptq import gptq_format
from hqconv.formats.module_rules import Rule, always, when
from hqconv.formats.registry import quant_method
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
_REGEX_SIGNS = frozenset(r"*+?^$()[]{}|\\")


@quant_method("auto-round", "auto_round", "intel/auto-round")
def parse_auto_round(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse integer formats in GPTQ's or AWQ's packing, with overrides per module in `extra_config`.

    A key is a name, the end of one, or a regex that is searched; names go before regexes.
    """
    exact: dict[str, SourceFormat] = {}
    patterns: list[Rule] = []
    for key, overrides in config.tables("extra_config"):
        exact[key] = _format(config.overridden(overrides))
        if _REGEX_SIGNS & set(key):
            regex = BoundedRegex(key, config.where("extra_config"), is_anywhere=True)
            patterns.append(when(regex.matches, exact[key]))

    def by_name(module: str) -> SourceFormat | None:
        ends = [module]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        return next((exact[end] for end in ends if end in exact), None)

    key = config.first("block_name_to_quantize", "to_quant_block_names")
    outside = list(_outside_blocks(config, key)) if config.has(key) else []
    return [by_name, *patterns, *outside, always(_format(config))]


def _outside_blocks(config: ConfigReader, key: str) -> Iterator[Rule]:
    """Yield the rule that leaves out modules outside the blocks: a list of paths, or paths with commas between."""
    value = config.values[key]
    names = value.split(",") if isinstance(value, str) else config.names(key)
    blocks = tuple(name.strip() for name in names if name.strip())
    if blocks:
        yield when(lambda module: not module.startswith(blocks))


def _format(config: ConfigReader) -> SourceFormat:
    if config.integer("bits", 1, 32) >= 16:
        return PLAIN
    if config.text("data_type", default="int") != "int":
        raise config.unsupported("data_type", "int")
    if config.integer("act_bits", 1, 32, 16) < 16:
        raise config.unsupported("act_bits", "16: activations that are not quantized")
    packing = config.text("packing_format", default="auto")
    if packing in _AWQ_PACKINGS:
        as_awq = config.replaced(zero_point=not config.flag("sym", True))
        return awq_format(as_awq, "auto-round (awq packing)")
    if packing not in _GPTQ_VERSIONS:
        raise config.unsupported("packing_format", ", ".join([*_GPTQ_VERSIONS, *_AWQ_PACKINGS]))
    as_gptq = config.replaced(checkpoint_format=_GPTQ_VERSIONS[packing])
    return gptq_format(as_gptq, "auto-round (gptq packing)")
