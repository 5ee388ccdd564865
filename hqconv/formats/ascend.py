"""Huawei Ascend's own quantization (msmodelslim): the method `ascend`. Its matrices are stored as `int8`.

quant_model_description.json names every tensor with its scheme. Modules that differ only in numbers (layers, experts)
and have one scheme become one pattern, with "*" for the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hqconv.formats.config_reader import (
    COMMON,
    ConfigReader,
    Keys,
    TextConfig,
    rotated,
    speaks_of_rotations,
)
from hqconv.formats.quant_config import ModuleRule, always, quant_method
from hqconv.formats.source_format import PLAIN, SourceFormat

FLOAT = "FLOAT"
W8A8_DYNAMIC = "W8A8_DYNAMIC"
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_WEIGHT = ".weight"
# int8 with a float32 scale per output row. An offset per row lies beside it and must be zero.
_INT8 = SourceFormat(
    "ascend w8a8_dynamic", "int8", "uint8", "", 1, 0, options=(("has_offset", True),)
)


_FUSED = "global_rotation"  # of the residual stream, in the weights already; its file serves draft models
_UNUSED = (
    "model_quant_type group_size is_rot_used "
    # Quantized cache and attention.
    "kv_quant_type kv_cache_type fa_quant_type indexer_quant_type reduce_quant_type enable_fa_quant"
)
KEYS = Keys(f"quantize modules metadata optional {_UNUSED}")


@quant_method("ascend", keys=KEYS)
def parse_ascend(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse a scheme per module, as quant_model_description.json gives it, or one for all from config.json.

    A module that the description does not name is not quantized. Sources: `on_w8a8_dynamic_per_channel` of
    msmodelslim's modelslim_v1/save/ascendv1.py; `get_quarot_save_info` of its QuarotOnlineRotationInfo, and
    `set_rotation_config` of vllm-ascend's AscendW4A4LaosDynamicLinearMethod, which reads it.
    """
    for key in ("metadata", "optional"):
        if _is_rotated(config.values.get(key)):
            raise rotated(config, key, f"no rotation but {_FUSED}")
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


def _is_rotated(value: object) -> bool:
    """Return True if an object, at any depth, has layers that are rotated at run time."""
    if not isinstance(value, Mapping):
        return False
    for name, inner in value.items():
        is_named = speaks_of_rotations(str(name)) and str(name) not in (
            _FUSED,
            "quarot",
            "rotation_map",
        )
        if is_named and (inner.get("layers", True) if isinstance(inner, Mapping) else inner):
            return True
        if str(name) != _FUSED and _is_rotated(inner):
            return True
    return False


def patterns(module: str) -> tuple[str, str, str]:
    """Return the patterns that may name a module: its name, without later numbers, without any."""
    first = _NUMBER.search(module)
    head = first.end() if first else 0
    return module, module[:head] + _NUMBER.sub("*", module[head:]), _NUMBER.sub("*", module)


def ascend_quantization_config(
    config: Mapping[str, Any], description: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a stand-in for quantization_config: `modules` maps patterns to schemes, FLOAT ones left out.

    Without a description that names weights, config.json's `quantize` holds for all modules; None where it names no
    known scheme.
    """
    schemes = {
        name.removesuffix(_WEIGHT): scheme
        for name, scheme in description.items()
        if name.endswith(_WEIGHT) and isinstance(scheme, str)
    }
    if schemes:
        # Entries of tensors have a dot in their names, facts about the model have none. Facts that say nothing about
        # the weights are left out.
        unused = (*_UNUSED.split(), *COMMON.names)
        facts = {
            name: value
            for name, value in description.items()
            if "." not in name and value and name not in unused
        }
        return {**facts, "quant_method": "ascend", "modules": _summed_up(schemes)}
    quantize = config.get("quantize")
    if isinstance(quantize, str) and quantize.upper() == W8A8_DYNAMIC:
        return {"quant_method": "ascend", "quantize": quantize}
    return None


def _summed_up(schemes: Mapping[str, str]) -> dict[str, str]:
    """Return pattern → scheme, for the widest patterns whose modules agree."""
    found: dict[str, str] = {}
    left = {patterns(module): scheme for module, scheme in schemes.items()}
    for width in (2, 1, 0):
        agreed: dict[str, set[str]] = {}
        for names, scheme in left.items():
            agreed.setdefault(names[width], set()).add(scheme)
        found |= {name: next(iter(values)) for name, values in agreed.items() if len(values) == 1}
        left = {names: scheme for names, scheme in left.items() if len(agreed[names[width]]) > 1}
    return {name: scheme for name, scheme in found.items() if scheme != FLOAT}
