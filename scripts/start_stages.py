"""The stages of a start of vLLM, each with the function that takes its time: for check_serving.py split.

A function's time is its own: that of the functions in this list which it calls is not in it. So the times add up.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """A function that is timed, as `module:Class.method`. owner: vLLM, Humming or hqconv."""

    owner: str
    what: str
    function: str


_BASE = "vllm.model_executor.model_loader.base_loader"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_METHOD = "hqconv.serving.vllm.moe_method:HqconvMoEMethod"
_LOADER = "hqconv.serving.parameter_loader:ParameterLoader"
STAGES = (
    Stage("vLLM", "configuration", "vllm.engine.arg_utils:EngineArgs.create_engine_config"),
    Stage("vLLM", "engine, the rest", "vllm.entrypoints.llm:LLM.__init__"),
    Stage("vLLM", "engine core, the rest", "vllm.v1.engine.core:EngineCore.__init__"),
    Stage("vLLM", "device and process groups", f"{_WORKER}.init_device"),
    Stage("vLLM", "loading, the rest", f"{_WORKER}.load_model"),
    Stage("vLLM", "model building", f"{_BASE}:BaseModelLoader.create_model"),
    Stage("vLLM", "other weights", "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights"),
    Stage("vLLM", "processing of weights", f"{_BASE}:process_weights_after_loading"),
    Stage("vLLM", "memory profiling, a forward", f"{_WORKER}.determine_available_memory"),
    Stage("vLLM", "KV cache, planning", "vllm.v1.engine.core:EngineCore._initialize_kv_caches"),
    Stage("vLLM", "KV cache, allocation", f"{_WORKER}.initialize_from_config"),
    Stage("vLLM", "warm-up forwards", f"{_WORKER}.compile_or_warm_up_model"),
    Stage("vLLM", "CUDA graphs", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model"),
    Stage("vLLM", "CUDA graphs", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model"),
    Stage(
        "Humming",
        "tuning",
        "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe:HummingExpertsBase.init_humming_moe",
    ),
    Stage("Humming", "kernels, compiled or found", "humming.jit.runtime:KernelRuntime.compile_many"),
    Stage("hqconv", "manifest", "hqconv.serving.vllm.config:HqconvConfig.maybe_update_config"),
    Stage("hqconv", "checks of a layer", f"{_METHOD}.__init__"),
    Stage("hqconv", "parameters of a layer", f"{_METHOD}.create_weights"),
    Stage("hqconv", "kernel object of a layer", f"{_METHOD}.process_weights_after_loading"),
    Stage("hqconv", "kernels beforehand", f"{_LOADER}.take_kernels"),
    Stage("hqconv", "waiting for the experts", f"{_LOADER}.fill"),
)


class StageTimer:
    """Own time and calls of each watched function, in the thread that made this object."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._clock, self._thread = clock, threading.get_ident()
        self._inner: list[float] = []  # of each open call: time of the watched functions in it

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed under this name."""

        @functools.wraps(call)
        def watched(*args: Any, **words: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **words)
            begun = self._clock()
            self._inner.append(0.0)
            try:
                return call(*args, **words)
            finally:
                seconds = self._clock() - begun
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inner.pop()
                self.calls[name] = self.calls.get(name, 0) + 1
                if self._inner:
                    self._inner[-1] += seconds

        return watched

    def watch(self, function: str) -> None:
        """Time a function from now on. Raises ImportError or AttributeError if it is not there."""
        module, _, path = function.partition(":")
        *parents, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        found = inspect.getattr_static(owner, name)
        if isinstance(found, staticmethod | classmethod):
            setattr(owner, name, type(found)(self.timed(function, found.__func__)))
        else:
            setattr(owner, name, self.timed(function, found))

    def watch_all(self) -> list[str]:
        """Time all stages; returns those that are not there."""
        missing = []
        for stage in STAGES:
            try:
                self.watch(stage.function)
            except Exception as error:  # noqa: BLE001 - another version of vLLM, or a library that is not there
                missing.append(f"{stage.function}: {type(error).__name__}: {error}")
        return missing

    def rows(self) -> list[dict[str, Any]]:
        """Stages that took time, the longest first."""
        found = [
            {**stage._asdict(), "seconds": round(self.seconds[stage.function], 4), "calls": self.calls[stage.function]}
            for stage in STAGES
            if stage.function in self.seconds
        ]
        return sorted(found, key=lambda row: -row["seconds"])
