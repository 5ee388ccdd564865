"""The kernels of Humming's weight ops, which convert a checkpoint's weights when an engine loads them. Needs no GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hqconv.humming_ops.runtime import humming
from hqconv.kernel_layout.kernel_sources import KernelSource, recorder


class _OnGpu(torch.Tensor):
    """A CPU tensor that Humming's weight ops take for one of a GPU."""

    is_cuda = property(lambda self: True)


_WITH_VALUES = (
    "pack_weight",
    "unpack_weight",
    "dequant_weight",
)  # ops whose results Humming's schemas look at


@contextmanager
def weight_kernels() -> Iterator[list[KernelSource]]:
    """Note the kernels of Humming's weight ops, which its schemas call on CPU tensors. Inside `standing_in` only.

    Results have the right shapes, and of the ops in `_WITH_VALUES` the right values.
    """
    ops, module = humming().ops, importlib.import_module("humming.ops.weight")
    found: list[KernelSource] = []
    with ExitStack() as stack:
        for name in [name for name in vars(module) if name.endswith("Kernel")]:
            noted = recorder(getattr(module, name), found)
            silent = type(name, (noted,), {"__call__": lambda self, *args, **words: None})
            stack.enter_context(patch.object(module, name, silent))
        for name in (*_WITH_VALUES, "repack_weight", "process_mxfp4_w4a8_weight", "quant_weight"):
            stack.enter_context(
                patch.object(ops, name, _noted(getattr(module, name), getattr(ops, name), name))
            )
        yield found


def _noted(cuda_op: Callable[..., Any], op: Callable[..., Any], name: str) -> Callable[..., Any]:
    def noted(inputs: torch.Tensor, *args: Any, **words: Any) -> Any:
        made = cuda_op(inputs.as_subclass(_OnGpu), *args, **words)
        return op(inputs, *args, **words) if name in _WITH_VALUES else made

    return noted
