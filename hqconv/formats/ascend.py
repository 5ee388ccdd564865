"""Ascend's own quantization (msmodelslim): what its description declares for a module."""

from __future__ import annotations

from hqconv.formats.config_reader import ConfigReader, Rule, Text, always
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.ascend import W8A8_DYNAMIC, patterns

# int8 with a float32 scale per output row. An offset per row lies beside it and must be zero (`decode_int8`).
_INT8 = SourceFormat("ascend w8a8_dynamic", "int8", "uint8", "", 1, 0, options=(("has_offset", True),))


def ascend(words: ConfigReader, _text: Text) -> list[Rule]:
    """A scheme per module, as quant_model_description.json gives it, or one for all that config.json names.

    A module that the description does not name is not quantized. Source: `on_w8a8_dynamic_per_channel` of
    msmodelslim's modelslim_v1/save/ascendv1.py.
    """
    if not words.has("modules"):
        if words.text("quantize").upper() != W8A8_DYNAMIC:
            raise words.unsupported("quantize", W8A8_DYNAMIC.lower())
        return [always(_INT8)]
    modules = words.table("modules")

    def by_name(module: str) -> SourceFormat:
        found = next((name for name in patterns(module) if modules.has(name)), None)
        if found is None:
            return PLAIN
        if modules.text(found).upper() != W8A8_DYNAMIC:
            raise modules.unsupported(found, f"{W8A8_DYNAMIC} or FLOAT for experts")
        return _INT8

    return [by_name]
