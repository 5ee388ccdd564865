"""Loads Humming so that its schema and transform code runs on whichever device its tensors are on.

This is the only module that changes Humming, and these are the changes:
* the six weight ops choose Humming's CUDA kernel or our CPU twin by their input's device; for shape planning,
  `meta` tensors get empty outputs;
* without a GPU, the device facts that `LayerConfig` asks for come from the requested target;
* inside `resident(...)`, `Tensor.cuda()` leaves a CPU tensor where it is (Humming hides such calls).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hqconv.backends import twins

_MODULES = (
    "ops",
    "dtypes",
    "schema",
    "transform",
    "device",
    "config",
    "utils.weight",
)
_OPS = (
    "quant_weight",
    "pack_weight",
    "unpack_weight",
    "dequant_weight",
    "repack_weight",
    "process_mxfp4_w4a8_weight",
)


_target_sm: ContextVar[int] = ContextVar("target_sm")


class _DeviceFacts:
    """What Humming asks of a device while it plans a layout, for a machine without one: the target's facts.

    One object answers for every thread, each with the target that it set by `target_facts`.
    """

    is_ppu = False

    @property
    def sm_version(self) -> int:
        return _target_sm.get()

    @property
    def sm_major(self) -> int:
        return self.sm_version // 10

    @property
    def sm_minor(self) -> int:
        return self.sm_version % 10


@functools.cache
def humming() -> SimpleNamespace:
    """Import Humming once, install the dispatch, and return the modules hqconv uses."""
    if not torch.cuda.is_available():
        # On import Humming starts a compiler process for its launcher, which only a GPU needs.
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    with _without_dynamo():
        modules = {name.rpartition(".")[2]: importlib.import_module(f"humming.{name}") for name in _MODULES}
    ops = modules["ops"]
    for name in _OPS:
        setattr(ops, name, _by_device(getattr(ops, name), getattr(twins, name)))
    if not torch.cuda.is_available():
        _stand_in_for_device(modules["device"])
    return SimpleNamespace(**modules)


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Keep Humming's import from loading torch's compiler (0.7 s) only to mark two functions as constant."""

    def mark(function: Any) -> Any:
        function._dynamo_marked_constant = True  # all that torch._dynamo.assume_constant_result does
        return function

    original = torch.compiler.assume_constant_result
    torch.compiler.assume_constant_result = mark
    try:
        yield
    finally:
        torch.compiler.assume_constant_result = original


@functools.cache
def humming_gpu() -> SimpleNamespace:
    """The modules that only a GPU can use: tuning and the GEMM itself."""
    names = ("tune", "forward", "kernel.humming")
    return SimpleNamespace(**{n.partition(".")[0]: importlib.import_module(f"humming.{n}") for n in names})


def _by_device(cuda_op: Callable[..., Any], cpu_op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(cuda_op)
    def op(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = cuda_op if inputs.is_cuda else cpu_op
        return chosen(inputs, *args, **kwargs)

    return op


def _stand_in_for_device(device: Any) -> None:
    """Let `humming.device` answer from `_DeviceFacts` instead of loading its CUDA extension."""
    facts = _DeviceFacts()
    device._get_device_info_extension = lambda: SimpleNamespace(_DeviceInfo=lambda _index: facts)
    device.current_device._value = facts


@contextmanager
def target_facts(sm_version: int) -> Iterator[None]:
    """Answer Humming's questions about the device for `sm_version` where no GPU can answer them."""
    token = _target_sm.set(sm_version)
    try:
        yield
    finally:
        _target_sm.reset(token)


class _StayOnCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda and not args[0].is_cuda:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def resident(device: torch.device) -> Iterator[None]:
    """Keep Humming's schema code on `device`."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        with _StayOnCpu():
            yield
