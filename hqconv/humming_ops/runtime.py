"""Loader of Humming so that its schema and transform code runs on whichever device its tensors are on.

This is the only module that changes Humming, and these are the changes:
* the weight ops but `quant_weight` choose Humming's CUDA kernel or our CPU twin by their input's device; for planning,
  `meta` tensors get empty outputs; its layout of scales is computed in one pass, where Humming makes two and waits for
  the GPU, since it copies a list of places there;
* inside `target_facts(...)`, Humming's queries of "the current device" and its compiler during planning are
  answered for the target of the request, whatever GPU is here, or none; outside, by the device as ever;
* inside `resident(...)`, `Tensor.cuda()` leaves a CPU tensor where it is (Humming hides such calls), and padding by
  nothing copies nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hqconv.errors import RequestError
from hqconv.humming_ops import cpu_ops
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import WeightSchema

_MODULES = ("ops", "dtypes", "schema", "transform", "device", "config", "utils.weight")
_OPS = (
    "pack_weight",
    "unpack_weight",
    "dequant_weight",
    "repack_weight",
    "process_mxfp4_w4a8_weight",
)
_OTHER_SCALES = ("is_blockwise", "is_mxmma", "is_umma")  # scales with a layout of their own
# Modules in which Humming queries the current device to decide about schemas and layouts.
_ASKING = (
    "humming.config.config",
    "humming.config.mma",
    "humming.schema.humming",
    "humming.transform",
)
# Modules that compile and launch kernels must see the real device; layouts query the compiler's version there.
_LAUNCHING = "humming.jit.runtime"
_ASKED_OF_LAUNCHING = ("is_ppu",)

# Modules that query whether kernels may be patched after compilation (on unless an environment variable disables it).
_PATCHING = ("humming.config.config", "humming.config.mma")

# Sources of the ops that have twins, and digests of those that the twins are compared with: of 0.1.17 and 0.1.18,
# and of 0.1.19. They differ in the width of an index in pack_weight.cuh.
_SOURCES = (
    *(f"kernel/{name}_weight.py" for name in ("repack", "pack", "unpack", "dequant")),
    "kernel/process_mxfp4.py",
    "ops/weight.py",
    *(
        f"include/humming/kernel/{name}.cuh"
        for name in ("process", "process_mxfp4", "pack_weight", "dequant_weight")
    ),
)
_COMPARED = (
    "acf8c3aed8f27ae7a1372462835a86e3c9201f7194edc59c0897f63ae714945a",
    "2a8d9634bb0151d64a4c57d6fc6486f97e83067e81042762cb76ecfbf16986ca",
)

_target: ContextVar[GpuTarget | None] = ContextVar("target", default=None)
# ops that would lay out a whole matrix
_OF_WEIGHTS = ("repack_weight", "process_mxfp4_w4a8_weight")
_is_planning: ContextVar[bool] = ContextVar("is_planning", default=False)


class _TargetFacts:
    """The facts of a target that decide a layout, and nothing else: a question for another is a bug."""

    is_ppu = False

    def __init__(self, sm_version: int) -> None:
        self.sm_version = sm_version
        self.sm_major, self.sm_minor = divmod(sm_version, 10)


class _AskedDevice:
    """Stands for Humming's `current_device`: the request's target inside `target_facts`, the device outside.

    With `names`, only questions for these are the target's.
    """

    def __init__(self, device: Any, names: Collection[str] | None = None) -> None:
        self._device = device
        self._names = names

    def __getattr__(self, name: str) -> Any:
        target = _target.get()
        if target is None or (self._names is not None and name not in self._names):
            return getattr(self._device, name)
        return getattr(_TargetFacts(target.sm_version), name)


@functools.cache
def humming() -> SimpleNamespace:
    """Import Humming once, install the changes, and return the modules hqconv uses."""
    if not torch.cuda.is_available():
        # On import Humming starts a compiler process for its launcher, which only a GPU needs.
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    with _without_dynamo():
        modules = {
            name.rpartition(".")[2]: importlib.import_module(f"humming.{name}") for name in _MODULES
        }
    ops = modules["ops"]
    for name in _OPS:
        setattr(ops, name, _by_device(name, getattr(ops, name), getattr(cpu_ops, name)))
    name = "transform_humming_weight_scale"
    setattr(modules["transform"], name, _layout_of_scales(getattr(modules["transform"], name)))
    device = modules["device"].current_device
    for name, names in (*((name, None) for name in _ASKING), (_LAUNCHING, _ASKED_OF_LAUNCHING)):
        importlib.import_module(name).current_device = _AskedDevice(device, names)  # type: ignore[attr-defined]
    for name in _PATCHING:
        _answer(importlib.import_module(name), "is_cubin_patch_enabled", lambda _: True)
    _answer(importlib.import_module("humming.config.config"), "_cuda_compiler_version", _asked_cuda)
    asked_info = functools.partial(_device_info, modules["device"].DeviceInfo)
    setattr(modules["transform"], "DeviceInfo", asked_info)  # noqa: B010 - mypy does not know the module
    return SimpleNamespace(**modules)


def humming_schema(schema: WeightSchema) -> Any:
    """Return the schema as Humming's own object."""
    return humming().schema.HummingWeightSchema(**schema.humming_fields())


def _answer(module: Any, name: str, of_target: Callable[[GpuTarget], Any]) -> None:
    """Have a module's question answered for the target inside `target_facts`, by its own function outside."""
    original = getattr(module, name)

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        target = _target.get()
        return original(*args, **kwargs) if target is None else of_target(target)

    setattr(module, name, asked)


def _asked_cuda(target: GpuTarget) -> tuple[int, int]:
    """Of a target whose layouts do not depend on it, any: `schemas.layer.needs_cuda` says of which they do."""
    return target.cuda or (0, 0)


def _device_info(device_info: Any, device: Any = None) -> Any:
    """`humming.device.DeviceInfo` for `prepare_layer_config`, whose LayerConfig is the target's."""
    target = _target.get()
    return device_info(device) if target is None else _TargetFacts(target.sm_version)


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Keep Humming's import from loading torch's compiler (0.7 s) only to mark two functions as constant."""

    def mark(function: Any) -> Any:
        # all that torch._dynamo.assume_constant_result does
        function._dynamo_marked_constant = True
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
    return SimpleNamespace(
        **{n.partition(".")[0]: importlib.import_module(f"humming.{n}") for n in names}
    )


def _by_device(
    name: str, cuda_op: Callable[..., Any], cpu_op: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(cuda_op)
    def op(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if name in _OF_WEIGHTS and _is_planning.get():
            inputs = inputs.to("meta")
        if inputs.is_cuda:
            return cuda_op(inputs, *args, **kwargs)
        if not inputs.is_meta and not has_twins():
            raise RequestError(
                "The CPU cannot stand in for the kernels of this humming-kernels: they have changed.",
                where="humming-kernels",
                expected="the sources of the weight ops of 0.1.17 to 0.1.19",
                found=f"other sources in {version('humming-kernels')}",
                remedy="Use --device cuda, which runs Humming's own kernels, or install humming-kernels==0.1.19.",
            )
        return cpu_op(inputs, *args, **kwargs)

    return op


@functools.cache
def has_twins() -> bool:
    """Return whether the installed Humming's weight ops are those that the CPU twins are compared with."""
    root = Path(importlib.import_module("humming").__file__ or "").parent
    texts = [
        (root / name).read_bytes().split() if (root / name).is_file() else [] for name in _SOURCES
    ]
    return (
        hashlib.sha256(b" ".join(word for text in texts for word in text)).hexdigest() in _COMPARED
    )


def _layout_of_scales(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def layout(
        weight_scale: torch.Tensor, to_apply_on_c: bool = False, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        is_other = any(args) or any(kwargs.get(name) for name in _OTHER_SCALES)
        if is_other:
            return original(weight_scale, to_apply_on_c, *args, **kwargs)
        return transpose_scales(weight_scale, to_apply_on_c)

    return layout


def transpose_scales(scale: torch.Tensor, on_results: bool) -> torch.Tensor:
    """Twin of `humming.transform.transform_humming_weight_scale` without block scales, by torch: [..., N, G].

    on_results: its `to_apply_on_c`. Does not synchronize with CUDA.
    """
    *front, shape_n, num_groups = scale.shape
    tile, swapped = ((4, 4, 2), (3, 2, 4)) if on_results else ((8, 8), (3, 2))
    # torch copies some 8-bit floats slowly
    bits = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    tiles = bits.reshape(-1, shape_n // math.prod(tile), *tile, num_groups)
    permuted = tiles.permute(0, len(tile) + 2, 1, *swapped).contiguous()
    return permuted.view(scale.dtype).view(*front, num_groups, shape_n)


def compiler_version() -> tuple[int, int]:
    """Major and minor version of the CUDA compiler that Humming uses on this machine, as it finds it.

    Raises what Humming does where there is none: OSError, RuntimeError and others.
    """
    humming()
    config, runtime = (
        importlib.import_module(name) for name in ("humming.config.config", _LAUNCHING)
    )
    major, minor = config._cuda_compiler_version(runtime.KernelRuntime._get_compiler())
    return major, minor


@contextmanager
def target_facts(target: GpuTarget) -> Iterator[None]:
    """Answer Humming's questions about the device for `target`, in this thread."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


@contextmanager
def planning() -> Iterator[None]:
    """Have Humming's transform of CPU tensors give a weight of the right shape, on `meta`, without laying it out."""
    token = _is_planning.set(True)
    try:
        with _StayOnCpu():
            yield
    finally:
        _is_planning.reset(token)


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
        if func is torch.nn.functional.pad and not any(args[1]):
            return args[0]  # torch would copy
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
