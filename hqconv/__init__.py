"""hqconv: offline conversion of Mixture-of-Experts checkpoints for the Humming GPU kernels.

For programs: `plan`, `convert`, `verify`, `inspect`, `load` and `dequantize`; see docs/api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hqconv.api import convert, dequantize, inspect, load, plan, verify

__all__ = ["__version__", "convert", "dequantize", "inspect", "load", "plan", "verify"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from hqconv import api

        return getattr(api, name)
    raise AttributeError(f"module 'hqconv' has no attribute '{name}'")
