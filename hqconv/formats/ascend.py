"""Huawei Ascend's own quantization (msmodelslim): the method `ascend`. Its matrices are stored as `int8`.

quant_model_description.json names every tensor with its scheme; `hqconv.schemas.ascend` turns it into a config.
"""

from __future__ import annotations

from hqconv.formats.config_reader import ConfigReader, Text
from hqconv.formats.module_rules import Rule, always
from hqconv.formats.registry import quant_method
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.ascend import W8A8_DYNAMIC, patterns

# int8 with a float32 scale per output row. An offset per row lies beside it and must be zero.
_INT8 = SourceFormat("ascend w8a8_dynamic", "int8", "uint8", "", 1, 0, options=(("has_offset", True),))


@quant_method("ascend")
def parse_ascend(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse a scheme per module, as quant_model_description.json gives it, or one for all from config.json.

    A module that the description does not name is not quantized. Source: `on_w8a8_dynamic_per_channel` of
    msmodelslim's modelslim_v1/save/ascendv1.py.
    """
    if not config.has("modules"):
        if config.text("quantize").upper() != W8A8_DYNAMIC:
            raise config.unsupported("quantize", W8A8_DYNAMIC.lower())
        return [always(_INT8)]
    modules = config.table("modules")

    def by_name(module: str) -> SourceFormat:
        pattern = next((name for name in patterns(module) if modules.has(name)), None)
        if pattern is None:
            return PLAIN
        if modules.text(pattern).upper() != W8A8_DYNAMIC:
            raise modules.unsupported(pattern, f"{W8A8_DYNAMIC} or FLOAT for experts")
        return _INT8

    return [by_name]
