"""CUDA sources of the kernels that Humming compiles for a GEMM and for its inputs. Needs no GPU.

Humming's own code writes the sources, with its questions about the device answered for another one: nothing here
knows how a kernel is tuned. An engine says which GEMM type and options it serves with (`ComputeSettings`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from hqconv.kernel_layout.compatibility import load_layer_config

INDEXED, CONTIGUOUS, MASKED = "indexed", "grouped_contiguous", "grouped_masked"
NO_DEVICE = -1  # torch and Humming take it for "leave the current device"


@dataclass(frozen=True)
class KernelSource:
    """One kernel before compilation: its text, the template to instantiate, sm 90 as "90a", and how it is compiled.

    patch: Humming's last touch on the compiled file, given its path.
    """

    code: str
    expression: str
    architecture: str
    without_fast_math: bool
    patch: Callable[[str], None] = field(compare=False)

    @property
    def name(self) -> str:
        """SHA-256 over all that makes the kernel, but for the compiler and its headers."""
        return kernel_name(self.code, self.expression, self.architecture, self.without_fast_math)


def kernel_name(code: str, expression: str, architecture: str, without_fast_math: bool) -> str:
    """The name of a kernel's files: see `KernelSource.name`."""
    return sha256(json.dumps([code, expression, architecture, without_fast_math]).encode()).hexdigest()


@dataclass(frozen=True)
class ComputeSettings:
    """Humming's compute config of a server: `gemm_type` and numeric options.

    prequantized: (dtype, mode, group size) of activations that the engine quantizes itself, before the kernels.
    """

    gemm_type: str
    use_f16_accum: bool = False
    use_batch_invariant: bool = False
    prequantized: tuple[str, str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Humming's compute config, with the keys that kernels depend on."""
        return {
            "use_batch_invariant": self.use_batch_invariant,
            "use_f16_accum": self.use_f16_accum,
            "gemm_type": self.gemm_type,
        }


class GpuModel(Protocol):
    """A GPU model that need not be present: `hqconv.serving.warm.gpus.Gpu`."""

    def facts(self) -> SimpleNamespace:
        """Attributes of Humming's `DeviceInfo` for the GPU."""


def current_device() -> Any:
    """Humming's facts about the current CUDA device. Raises what its extension raises if there is none."""
    return importlib.import_module("humming.device").current_device


@contextmanager
def standing_in(gpu: GpuModel) -> Iterator[None]:
    """Answer Humming's questions about any device for `gpu` in this process, and clear its caches on entry and exit."""
    device: Any = importlib.import_module("humming.device")
    facts, current = gpu.facts(), device.current_device
    saved = device._get_device_info_extension, current._value, dict(device.DeviceInfo._instances)
    device._get_device_info_extension = lambda: SimpleNamespace(_DeviceInfo=lambda index: facts)
    current._value = facts
    device.DeviceInfo._instances.clear()
    _forget_tuning()
    try:
        yield
    finally:
        device._get_device_info_extension, current._value, _ = saved
        device.DeviceInfo._instances.clear()
        device.DeviceInfo._instances.update(saved[2])
        _forget_tuning()


def _forget_tuning() -> None:
    """Humming keeps tuning by the device's number, which says nothing about whose it is here."""
    importlib.import_module("humming.tune")._get_heuristics_config.cache_clear()
    of_inputs = importlib.import_module("humming.tune.process_input")
    for function in (of_inputs._tuning_config_for_device, of_inputs._tuning_intervals_for_device):
        function.cache_clear()


def _recorder(kernel: Any, found: list[KernelSource]) -> Any:
    """Humming's class of kernels, but a kernel is noted in `found` and not compiled; nothing is remembered."""

    class Noted(kernel):  # type: ignore[misc]
        _instances: ClassVar[dict[Any, Any]] = {}
        _str2kernel_cache: ClassVar[dict[Any, Any]] = {}

        def prepare(self) -> None:
            words = self.sm_version_str, self.disable_fast_math, self.postprocess_cubin
            found.append(KernelSource(self.code, self.kernel_expr, *words))

        def register_kernel(self) -> None:
            self.kernel_id = 0

        @staticmethod
        def compile_many(specs: Iterable[Any], device: Any = None) -> list[Any]:
            return [(Noted if kind is Noted else _recorder(kind, found))(**words) for kind, words in specs]

    return Noted


def gemm_kernels(config_dict: Mapping[str, Any], settings: ComputeSettings) -> list[KernelSource]:
    """Return the GEMM kernels of every batch size. Inside `standing_in` only.

    config_dict: the stored LayerConfig of a rank file.
    """
    kernels = importlib.import_module("humming.kernel.humming")
    config, tuning = tuning_table(config_dict, settings)
    found: list[KernelSource] = []
    recorder = _recorder(kernels.HummingKernel, found)
    recorder.prepare_kernels(config.to_str(), json.dumps(settings.to_dict()), json.dumps(tuning), NO_DEVICE)
    return found


def tuning_table(config_dict: Mapping[str, Any], settings: ComputeSettings) -> tuple[Any, Any]:
    """Return Humming's LayerConfig of a stored one, and its tuning for every batch size. Inside `standing_in` only."""
    config = load_layer_config(config_dict)
    tuning = importlib.import_module("humming.tune").get_heuristics_config(
        layer_config=config,
        use_f16_accum=settings.use_f16_accum,
        use_batch_invariant=settings.use_batch_invariant,
        gemm_type=settings.gemm_type,
        device=NO_DEVICE,
    )
    return config, tuning


def input_kernels(
    config_dict: Mapping[str, Any],
    settings: ComputeSettings,
    activation: Mapping[str, str] | None,
    top_k: int,
    rotation: int = 0,
) -> list[KernelSource]:
    """The kernels that prepare a GEMM's input. Inside `standing_in` only.

    config_dict: the stored LayerConfig. activation: applied before w2's GEMM; None for w13's, which has none.
    rotation: the block size of the inputs' rotation, 0 for none.
    """
    config = load_layer_config(config_dict)
    mode = config.input_quant_mode
    scatters = activation is None and settings.gemm_type == CONTIGUOUS
    if activation is None and (
        _is_prequantized(config, settings) or not (mode.should_quantize or scatters or rotation)
    ):
        return []
    layout = "scatter" if scatters else "grouped_mask" if settings.gemm_type == MASKED else "normal"
    options: dict[str, Any] = {
        **(activation or {}),
        "layout": layout,
        "scatter_width": top_k if scatters else 1,
        "hadamard_block_size": rotation or None,
    }
    if mode.should_quantize:
        options |= {
            "quant_mode": mode.value,
            "quant_dtype": config.a_dtype.dtype_str,
            "quant_group_size": config.input_scale_group_size or None,
            "group_scale_dtype": config.as_dtype.dtype_str,
        }
    problem = importlib.import_module("humming.config").ProcessInputProblemConfig(
        input_dtype=config.c_dtype, hidden_size=config.shape_k - config.pad_shape_k, **options
    )
    return _input_kernels(problem, config)


def _is_prequantized(config: Any, settings: ComputeSettings) -> bool:
    inputs = config.a_dtype.dtype_str, config.input_quant_mode.value, config.input_scale_group_size
    return bool(inputs == settings.prequantized)


def _input_kernels(problem: Any, config: Any) -> list[KernelSource]:
    heuristics = importlib.import_module("humming.tune").get_heuristics_class(NO_DEVICE)
    tuning = importlib.import_module("humming.tune.process_input")
    found: list[KernelSource] = []
    recorder = _recorder(importlib.import_module("humming.kernel.process_input").ProcessInputKernel, found)
    for use_pdl in {heuristics.should_use_pdl_for_input(config, rows) for rows in (1, 1 << 20)}:
        intervals = tuning._tuning_intervals_for_device(problem, NO_DEVICE, use_pdl)
        recorder.prepare_kernels(problem, intervals, NO_DEVICE)
    return found
