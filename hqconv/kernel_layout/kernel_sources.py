"""CUDA sources of the kernels that Humming compiles for a GEMM, its inputs and its weights, and their compilation.

Needs no GPU. Humming's own code writes the sources, with its questions about the device answered for another one:
nothing here knows how a kernel is tuned. An engine says which GEMM type and options it serves with (`ComputeSettings`).
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

from hqconv.errors import RequestError
from hqconv.kernel_layout.compatibility import load_layer_config

INDEXED = "indexed"
CONTIGUOUS = "grouped_contiguous"
MASKED = "grouped_masked"
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
        made_of = [self.code, self.expression, self.architecture, self.without_fast_math]
        return sha256(json.dumps(made_of).encode()).hexdigest()


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
        document = asdict(self)
        del document["prequantized"]
        return document


def current_device() -> Any:
    """Humming's facts about the current CUDA device. Raises what its extension raises if there is none."""
    return importlib.import_module("humming.device").current_device


@contextmanager
def standing_in(facts: SimpleNamespace) -> Iterator[None]:
    """Answer Humming's questions about any device in this process, and clear its caches on entry and exit.

    facts: the attributes of its `DeviceInfo`, of a GPU that need not be present.
    """
    device: Any = importlib.import_module("humming.device")
    extension = SimpleNamespace(_DeviceInfo=lambda index: facts)
    with (
        patch.object(device, "_get_device_info_extension", lambda: extension),
        patch.object(device.current_device, "_value", facts),
        patch.dict(device.DeviceInfo._instances, clear=True),
    ):
        _forget_tuning()
        try:
            yield
        finally:
            _forget_tuning()


def _forget_tuning() -> None:
    """Humming keeps tuning by the device's number, which says nothing about whose it is here."""
    importlib.import_module("humming.tune")._get_heuristics_config.cache_clear()
    of_inputs = importlib.import_module("humming.tune.process_input")
    for function in (of_inputs._tuning_config_for_device, of_inputs._tuning_intervals_for_device):
        function.cache_clear()


def recorder(kernel: Any, found: list[KernelSource]) -> Any:
    """Humming's class of kernels, but a kernel is noted in `found` and not compiled; nothing is remembered."""

    class Noted(kernel):  # type: ignore[misc]
        _instances: ClassVar[dict[Any, Any]] = {}
        _str2kernel_cache: ClassVar[dict[Any, Any]] = {}

        def prepare(self) -> None:
            source = KernelSource(
                self.code,
                self.kernel_expr,
                self.sm_version_str,
                self.disable_fast_math,
                self.postprocess_cubin,
            )
            found.append(source)

        def register_kernel(self) -> None:
            self.kernel_id = 0

        @staticmethod
        def compile_many(specs: Iterable[Any], device: Any = None) -> list[Any]:
            return [
                (Noted if kind is Noted else recorder(kind, found))(**arguments)
                for kind, arguments in specs
            ]

    return Noted


def gemm_kernels(config_dict: Mapping[str, Any], settings: ComputeSettings) -> list[KernelSource]:
    """Return the GEMM kernels of every batch size. Inside `standing_in` only.

    config_dict: the stored LayerConfig of a rank file.
    """
    kernels = importlib.import_module("humming.kernel.humming")
    config, tuning = tuning_table(config_dict, settings)
    found: list[KernelSource] = []
    noted = recorder(kernels.HummingKernel, found)
    noted.prepare_kernels(
        config.to_str(), json.dumps(settings.to_dict()), json.dumps(tuning), NO_DEVICE
    )
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
    is_ready = (
        config.a_dtype.dtype_str,
        mode.value,
        config.input_scale_group_size,
    ) == settings.prequantized
    if activation is None and (is_ready or not (mode.should_quantize or scatters or rotation)):
        return []
    layout = "scatter" if scatters else "grouped_mask" if settings.gemm_type == MASKED else "normal"
    options = {
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
    heuristics = importlib.import_module("humming.tune").get_heuristics_class(NO_DEVICE)
    tuning = importlib.import_module("humming.tune.process_input")
    found: list[KernelSource] = []
    noted = recorder(
        importlib.import_module("humming.kernel.process_input").ProcessInputKernel, found
    )
    for use_pdl in {heuristics.should_use_pdl_for_input(config, rows) for rows in (1, 1 << 20)}:
        intervals = tuning._tuning_intervals_for_device(problem, NO_DEVICE, use_pdl)
        noted.prepare_kernels(problem, intervals, NO_DEVICE)
    return found


def weight_ops() -> Any:
    """Return Humming's module of the ops that convert a checkpoint's weights when an engine loads them."""
    return importlib.import_module("humming.ops.weight")


# --- Humming's compiler on this machine

# What must agree between the machine that compiled and the one that serves, and what it is called in messages.
AGREE = {
    "humming_kernels_version": "version of humming-kernels",
    "target": "target",
    "compiler": "CUDA compiler",
    "flags": "compiler flags",
    "headers_sha256": "digest of Humming's headers",
}


def kernel_compiler() -> Any:
    """The compiler class of Humming that a server with this environment uses."""
    return importlib.import_module("humming.jit.runtime").KernelRuntime._get_compiler()


def architecture_of(sm_version: int) -> str:
    """90 → "90a", as Humming writes it."""
    return f"{sm_version}a" if sm_version >= 90 else str(sm_version)


def identity(sm_version: int) -> dict[str, Any]:
    """All that a compiled kernel depends on besides its source, under the keys of `AGREE`.

    Humming's own key of a kernel has the same in it, but folders and times for the headers instead of their bytes.
    Asks the current device whether it is NVIDIA's. Raises RuntimeError where there is no compiler.
    """
    compiler = kernel_compiler()
    flags = compiler.get_flags(architecture_of(sm_version), True)
    return {
        "humming_kernels_version": importlib.import_module("humming").__version__,
        "target": f"sm{sm_version}",
        "compiler": f"{compiler.__name__} {compiler.signature()}",
        "flags": [flag for flag in flags if not flag.startswith("-I")],
        "headers_sha256": _headers_digest(compiler),
    }


def _headers_digest(compiler: Any) -> str:
    include = Path(compiler.humming_include_dir())
    digest = sha256()
    for path in [*sorted(include.rglob("*.cuh")), include.parent / "csrc" / "patch_cubin.cpp"]:
        content = path.read_bytes()
        digest.update(
            f"{path.relative_to(include.parent).as_posix()} {len(content)}\n".encode() + content
        )
    return digest.hexdigest()


@contextmanager
def toolkit() -> Iterator[None]:
    """Let Humming find a CUDA toolkit with a torch that was built for none, and NVRTC its own libraries.

    Raises RequestError where there is no compiler.
    """
    import torch

    version = torch.version.cuda
    path = os.environ.get("LD_LIBRARY_PATH")
    try:
        if version is None:
            found = importlib.import_module("humming.utils.cuda").find_all_cuda_paths()
            majors = [f"{env['major']}.0" for env in found if env["major"] in (12, 13)]
            torch.version.cuda = max(majors, default=None)
        compiler = kernel_compiler()
        try:
            compiler.signature()
            compiler.get_flags("90a")  # looks for the headers
            if "NVRTC" in compiler.__name__:
                library = importlib.import_module("humming.utils.nvrtc").get_nvrtc_library_path()
                os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(
                    filter(None, (str(Path(library).parent), path))
                )
        except (RuntimeError, OSError) as error:
            raise RequestError(
                "There is no CUDA compiler here that Humming can use.",
                expected="NVRTC with the CUDA headers, or nvcc with HUMMING_COMPILER=nvcc; "
                "the same version as on the server",
                found=error,
                remedy="Install it, for instance with `pip install 'humming-kernels[cu13]'`.",
            ) from error
        yield
    finally:
        torch.version.cuda = version
        if path is None:
            os.environ.pop("LD_LIBRARY_PATH", None)
        else:
            os.environ["LD_LIBRARY_PATH"] = path


def compile_kernel(source: KernelSource, compiler: Any) -> bytes:
    """The compiled kernel, patched as Humming patches it; Humming's own cache is not touched.

    Raises RequestError where the compiler refuses it.
    """
    flags = compiler.get_flags(source.architecture, source.without_fast_math)
    with tempfile.TemporaryDirectory(prefix="hqconv-warm-") as name:
        folder = Path(name)
        path = folder / "kernel.cu"
        binary = folder / "kernel_tmp.cubin"
        path.write_text(source.code, encoding="utf-8")
        code, out, errors = compiler._compile(
            str(path), folder, source.architecture, source.expression, flags
        )
        if code == 0:
            source.patch(str(binary))
            return binary.read_bytes()
    lines = f"{out}\n{errors}".splitlines()
    message = next((line for line in lines if "error" in line.lower()), "no message")
    raise RequestError(
        "The CUDA compiler here cannot compile a kernel.",
        where=f"{compiler.__name__} {compiler.signature()}: {source.expression.split('<')[0].strip()}",
        found=message.strip(),
        remedy="Install the compiler that the server has, with its headers.",
    )
