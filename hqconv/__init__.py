"""hqconv: offline conversion of Mixture-of-Experts checkpoints for the Humming GPU kernels.

For programs: `plan`, `convert`, `allocate`, `verify`, `evaluate`, `check`, `inspect`, `push`, `publish`,
`load`, `dequantize`, `to_kernel`, and the types that they take and give; see docs/api.md. Nothing is loaded before it
is asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hqconv.version import __version__

# the caller decides about records: docs/api.md
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from hqconv.api import (
        PublishReport,
        allocate,
        check,
        convert,
        dequantize,
        evaluate,
        inspect,
        load,
        plan,
        publish,
        push,
        to_kernel,
        verify,
    )
    from hqconv.artifact.load import RankGemm
    from hqconv.conversion.convert import ConversionReport
    from hqconv.conversion.push import PushReport
    from hqconv.conversion.stages import Progress
    from hqconv.errors import HqconvError
    from hqconv.planning.plan import ConversionPlan
    from hqconv.schemas.weight_schema import WeightSchema
    from hqconv.verification.result import VerificationReport

__all__ = [
    "ConversionPlan",
    "ConversionReport",
    "HqconvError",
    "Progress",
    "PublishReport",
    "PushReport",
    "RankGemm",
    "VerificationReport",
    "WeightSchema",
    "__version__",
    "allocate",
    "check",
    "convert",
    "dequantize",
    "evaluate",
    "inspect",
    "load",
    "plan",
    "publish",
    "push",
    "to_kernel",
    "verify",
]
_MODULES = {  # of names that are not functions of `api`
    "ConversionPlan": "planning.plan",
    "ConversionReport": "conversion.convert",
    "HqconvError": "errors",
    "Progress": "conversion.stages",
    "PushReport": "conversion.push",
    "RankGemm": "artifact.load",
    "VerificationReport": "verification.result",
    "WeightSchema": "schemas.weight_schema",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hqconv' has no attribute '{name}'")
    if name in _MODULES:
        return getattr(importlib.import_module(f"hqconv.{_MODULES[name]}"), name)
    function = _with_parameters(getattr(importlib.import_module("hqconv.api"), name))
    globals()[name] = function
    return function


def _with_parameters(function: Callable[..., Any]) -> Any:
    """Return a function of the API; a note of its errors names parameters where the text has options."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        from hqconv.errors import HqconvError

        try:
            return function(*arguments, **options)
        except HqconvError as error:
            found = re.findall(r"--([a-z][a-z-]*)", error.where)
            if found:
                names = ", ".join(name.replace("-", "_") for name in found)
                error.add_note(f"In Python: {names}.")
            raise

    return call if callable(function) and not isinstance(function, type) else function
