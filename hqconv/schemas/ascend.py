"""Ascend's checkpoints (msmodelslim's): the quantization scheme of each module, as a few patterns.

quant_model_description.json names every tensor with its scheme. Modules that differ only in numbers (layers, experts)
and have one scheme are one pattern here, with "*" for the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DESCRIPTION = "quant_model_description.json"
METHOD = "ascend"
FLOAT = "FLOAT"
W8A8_DYNAMIC = "W8A8_DYNAMIC"
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_WEIGHT = ".weight"


def patterns(module: str) -> tuple[str, str, str]:
    """Return the patterns that may name a module: its name, without later numbers, without any."""
    first = _NUMBER.search(module)
    head = first.end() if first else 0
    return module, module[:head] + _NUMBER.sub("*", module[head:]), _NUMBER.sub("*", module)


def ascend_quantization_config(config: Mapping[str, Any], description: Mapping[str, Any]) -> dict[str, Any] | None:
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
        return {"quant_method": METHOD, "modules": _summed_up(schemes)}
    quantize = config.get("quantize")
    if isinstance(quantize, str) and quantize.upper() == W8A8_DYNAMIC:
        return {"quant_method": METHOD, "quantize": quantize}
    return None


def _summed_up(schemes: Mapping[str, str]) -> dict[str, str]:
    """Return pattern → scheme, for the widest patterns whose modules agree."""
    found: dict[str, str] = {}
    left = {patterns(module): scheme for module, scheme in schemes.items()}
    for width in (2, 1, 0):
        agreed: dict[str, set[str]] = {}
        for names, scheme in left.items():
            agreed.setdefault(names[width], set()).add(scheme)
        found |= {name: next(iter(one)) for name, one in agreed.items() if len(one) == 1}
        left = {names: scheme for names, scheme in left.items() if len(agreed[names[width]]) > 1}
    return {name: scheme for name, scheme in found.items() if scheme != FLOAT}
