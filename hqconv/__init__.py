"""hqconv: offline conversion of Mixture-of-Experts checkpoints for the Humming GPU kernels.

For programs: `load(path, tp_rank, ep_rank)` gives a rank's kernel tensors, `dequantize(path, block)` float experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hqconv.version import __version__

if TYPE_CHECKING:
    from hqconv.artifact.load import dequantize, load

__all__ = ["__version__", "dequantize", "load"]


def __getattr__(name: str) -> Any:
    if name in ("load", "dequantize"):
        from hqconv.artifact import load as library  # loads torch, which the command line must not

        return getattr(library, name)
    raise AttributeError(f"module 'hqconv' has no attribute '{name}'")
