"""Humming's compiler on this machine: its identity, and the compilation of one kernel. Needs no GPU."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from hqconv.errors import RequestError
from hqconv.kernel_layout.kernel_sources import KernelSource

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
        digest.update(f"{path.relative_to(include.parent).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@contextmanager
def toolkit() -> Iterator[None]:
    """Let Humming find a CUDA toolkit with a torch that was built for none, and NVRTC its own libraries.

    Raises RequestError where there is no compiler.
    """
    version, path = torch.version.cuda, os.environ.get("LD_LIBRARY_PATH")
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
                os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(Path(library).parent), path)))
        except (RuntimeError, OSError) as error:
            raise _no_compiler(error) from error
        yield
    finally:
        torch.version.cuda = version
        if path is None:
            os.environ.pop("LD_LIBRARY_PATH", None)
        else:
            os.environ["LD_LIBRARY_PATH"] = path


def _no_compiler(error: Exception) -> RequestError:
    return RequestError(
        "There is no CUDA compiler here that Humming can use.",
        expected="NVRTC with the CUDA headers, or nvcc with HUMMING_COMPILER=nvcc; the same version as on the server",
        found=str(error),
        remedy="Install it, for instance with `pip install 'humming-kernels[cu13]'`.",
    )


def compile_kernel(source: KernelSource, compiler: Any) -> bytes:
    """The compiled kernel, patched as Humming patches it; Humming's own cache is not touched.

    Raises RequestError where the compiler refuses it.
    """
    flags = compiler.get_flags(source.architecture, source.without_fast_math)
    with tempfile.TemporaryDirectory(prefix="hqconv-warm-") as name:
        folder = Path(name)
        path, made = folder / "kernel.cu", folder / "kernel_tmp.cubin"
        path.write_text(source.code, encoding="utf-8")
        code, out, errors = compiler._compile(str(path), folder, source.architecture, source.expression, flags)
        if code == 0:
            source.patch(str(made))
            return made.read_bytes()
    said = [line for line in f"{out}\n{errors}".splitlines() if "error" in line.lower()] or ["no message"]
    raise RequestError(
        "The CUDA compiler here cannot compile a kernel.",
        where=f"{compiler.__name__} {compiler.signature()}: {source.expression.split('<')[0].strip()}",
        found=said[0].strip(),
        remedy="Install the compiler that the server has, with its headers.",
    )
