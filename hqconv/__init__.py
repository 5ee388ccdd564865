"""hqconv: offline conversion of Mixture-of-Experts checkpoints for the Humming GPU kernels.

For programs: `plan`, `convert`, `verify`, `inspect`, `load` and `dequantize`, and the types that they take and give;
see docs/api.md. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hqconv.api import convert, dequantize, inspect, load, plan, verify
    from hqconv.artifact.load import RankGemm
    from hqconv.conversion.progress import Progress
    from hqconv.conversion.run import ConversionReport
    from hqconv.errors import HqconvError
    from hqconv.planning.plan import Plan
    from hqconv.schemas.weight_schema import TargetSchema
    from hqconv.verification.result import VerificationReport

__all__ = [
    "ConversionReport",
    "HqconvError",
    "Plan",
    "Progress",
    "RankGemm",
    "TargetSchema",
    "VerificationReport",
    "__version__",
    "convert",
    "dequantize",
    "inspect",
    "load",
    "plan",
    "verify",
]
_PLACES = {
    "ConversionReport": "pipeline.run",
    "HqconvError": "errors",
    "Plan": "planning.plan",
    "Progress": "pipeline.progress",
    "RankGemm": "artifact.load",
    "TargetSchema": "schemas.target",
    "VerificationReport": "verification.report",
}  # where it is not the room `api`


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"hqconv.{_PLACES.get(name, 'api')}"), name)
    raise AttributeError(f"module 'hqconv' has no attribute '{name}'")
