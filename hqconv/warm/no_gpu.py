"""Stand-ins with which vLLM builds its own model classes in a process without a GPU, for a program of its own.

vLLM asks for compiled extensions and GPU libraries as soon as it is imported, and so nothing but names stands in for
them: layers can be built, and their weights processed on the CPU, but nothing can run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# Libraries of which vLLM's modules use nothing but names until a kernel runs.
_LIBRARIES = (
    "flashinfer",
    "cutlass",
    "deep_gemm",
    "cuda",
    "quack",
    "flash_attn",
    "tvm_ffi",
    "torchvision",
)
_ATTENTION_KERNELS = (
    "flash_attn_varlen_func",
    "compile_flash_attn_varlen_func_from_specs",
    "reshape_and_cache_flash",
    "get_scheduler_metadata",
)
# What vLLM asks its CUDA extension about CUTLASS: answers for an architecture, 90, as built for all of them.
ASKED_OF_CUTLASS: dict[str, Callable[[int], bool]] = {
    "scaled_mm_supports_fp8": lambda sm: sm >= 89,
    "scaled_mm_supports_block_fp8": lambda sm: sm >= 90,
    "group_gemm_supported": lambda sm: 90 <= sm < 120,
    "scaled_mm_supports_fp4": lambda sm: sm >= 100,
}


_libraries_alive: list[Any] = []  # lives as long as the process
platform: Any = None  # of `pretend`


class Anything:
    """Stand-in for whatever a module wants of a library that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: object) -> Any:
        return Anything()

    def __or__(self, operand: object) -> Any:
        return Anything()

    __ror__ = __or__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a module's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Libraries(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the libraries that are not there; asked after everything that is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in _LIBRARIES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


class _TritonConfig(SimpleNamespace):
    """triton.Config, whose stages vLLM's kernels look at while they are imported."""

    def __init__(
        self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 1, **_: Any
    ) -> None:
        super().__init__(kwargs=kwargs or {}, num_warps=num_warps, num_stages=num_stages)


class _NoPrefill(Anything):
    @staticmethod
    def get_name() -> str:
        return "none"


class NoDevice:
    """`torch.cuda.device(None)`, as Humming enters it."""

    def __init__(self, device: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def pretend(sm_version: int = 90, name: str = "NVIDIA H200", sm_count: int = 132) -> None:
    """Have vLLM in this process see a CUDA device whose tensors lie on the CPU.

    To be called once, before anything of vLLM is imported.
    """
    # looks for versions of libraries
    importlib.import_module("transformers.models.auto.image_processing_auto")
    _find_libraries()
    _find_operators()
    platforms: Any = importlib.import_module("vllm.platforms")
    global platform
    platform = platform_class(sm_version, name, sm_count)
    platforms._current_platform = platform()
    _stand_in()
    platform._enum = type(platform._enum).CUDA


def platform_class(sm_version: int, name: str, sm_count: int) -> Any:
    """Return a platform of vLLM that answers as a CUDA device; its `_enum` has to be CUDA after vLLM's imports."""
    interface: Any = importlib.import_module("vllm.platforms.interface")
    facts = {"sm_version": sm_version, "name": name, "sm_count": sm_count}
    capability = interface.DeviceCapability(*divmod(sm_version, 10))
    # While vLLM is imported its modules for CUDA would look for compiled extensions.
    members = {**facts, "capability": capability, "_enum": interface.PlatformEnum.OOT}
    return type("Pretended", (_Answers, interface.Platform), members)


class _Answers:
    """Answers of vLLM's platform of a CUDA device."""

    device_name = "cuda"
    device_type = "cpu"
    dispatch_key = "CPU"
    simple_compile_backend = "inductor"
    dist_backend = "gloo"
    sm_version: int
    name: str
    sm_count: int
    capability: Any

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return cls.capability

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.name

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return cls.sm_count

    @classmethod
    def fp8_dtype(cls) -> torch.dtype:
        return torch.float8_e4m3fn

    @classmethod
    def supports_fp8(cls) -> bool:
        return cls.sm_version >= 89

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        pass

    @classmethod
    def get_attn_backend_cls(
        cls, backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        known: Any = importlib.import_module(
            "vllm.v1.attention.backends.registry"
        ).AttentionBackendEnum
        if not attn_selector_config.use_mla:
            return str(known.TRITON_ATTN.get_path())
        return str(
            (
                known.FLASHMLA_SPARSE if attn_selector_config.use_sparse else known.TRITON_MLA
            ).get_path()
        )

    @classmethod
    def get_mla_prefill_backend_cls(cls, *args: Any, **kwargs: Any) -> Any:
        return _NoPrefill


def _find_libraries() -> None:
    """Have imports of the libraries succeed; whether they are installed is answered truly, as vLLM chooses by it."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        found = find(name, package)
        return None if found is not None and isinstance(found.loader, _Libraries) else found

    importlib.util.find_spec = find_spec
    sys.meta_path.append(_Libraries())


def _find_operators() -> None:
    """Have operators of vLLM's extensions be nothing; `_custom_ops` must not find them, or it would register more."""
    find = torch._ops._OpNamespace.__getattr__

    def operator(namespace: Any, name: str) -> Any:
        try:
            return find(namespace, name)
        except AttributeError:
            asks_whether = sys._getframe(1).f_code.co_filename.endswith("_custom_ops.py")
            if (
                name.startswith("__")
                or asks_whether
                or not namespace.name.lstrip("_").startswith(("C", "moe_C"))
            ):
                raise
            return Anything()

    torch._ops._OpNamespace.__getattr__ = operator  # type: ignore[method-assign]
    extension: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, answer in ASKED_OF_CUTLASS.items():
        extension.define(f"cutlass_{name}(int capability) -> bool")
        extension.impl(f"cutlass_{name}", answer, "CompositeExplicitAutograd")
    _libraries_alive.append(extension)


def _stand_in() -> None:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    # a new process would have no pretended GPU
    registry._run_in_subprocess = lambda function: function()
    importlib.import_module("vllm.triton_utils").triton.Config = _TritonConfig
    attention = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    for name in _ATTENTION_KERNELS:
        if not hasattr(attention, name):
            setattr(attention, name, Anything())
    for name in torch.accelerator.__all__:
        if "memory" in name or name in ("empty_cache", "synchronize", "current_device_index"):
            setattr(torch.accelerator, name, lambda *args, **kwargs: 0)
    experts: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe"
    )
    experts.create_humming_locks = lambda device: torch.zeros(1, dtype=torch.int32)
    experts.HummingExpertsBase.init_humming_moe = lambda self: None  # compiled tuning tables


@contextmanager
def ranks(tp: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of `tp` ranks, whose others do not exist. Inside a current config of vLLM."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    with tempfile.TemporaryDirectory() as scratch:
        state.init_distributed_environment(1, 0, f"file://{scratch}/store", 0, backend="gloo")
        state.initialize_model_parallel(1, 1)
        for group in (state.get_tp_group(), state.get_ep_group()):
            group.world_size = tp
            group.rank_in_group = rank
        workspace.init_workspace_manager(torch.device("cpu"))
        try:
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


@contextmanager
def building(vllm_config: Any, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Make models of this config inside, on the CPU."""
    import transformers

    config: Any = importlib.import_module("vllm.config")
    default_dtype: Any = importlib.import_module("vllm.utils.torch_utils").set_default_torch_dtype
    with (
        config.set_current_vllm_config(vllm_config),
        default_dtype(dtype),
        torch.device("cpu"),
        patch("torch.cuda.Stream", _NoPrefill),
        patch("torch.cuda.Event", _NoPrefill),
        patch("torch.cuda.device", NoDevice),
        patch.object(transformers.AutoImageProcessor, "from_pretrained", Anything()),
        patch.object(transformers.AutoProcessor, "from_pretrained", Anything()),
    ):
        yield
