"""A CUDA compiler that is none, and Humming with a cache of its own, for tests of kernels compiled beforehand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from hqconv.kernel_layout.kernel_sources import standing_in, toolkit
from hqconv.warm.gpus import KNOWN
from hqconv.warm.kernel_store import VARIABLE


def fake_compiler(version: str = "13.0") -> Any:
    """A class like Humming's compilers, whose kernels are ELF's first bytes and a digest; it counts them."""
    base = importlib.import_module("humming.jit.compiler").Compiler

    class FakeCompiler(base):  # type: ignore[misc]
        num_compiled = 0

        @classmethod
        def signature(cls) -> str:
            return f"fake+{version}"

        @classmethod
        def get_flags(cls, sm_version: str, disable_fast_math: bool = False) -> list[str]:
            return [
                f"--arch={sm_version}",
                f"-I{cls.humming_include_dir()}",
                f"{disable_fast_math}",
            ]

        @classmethod
        def _compile(
            cls, source: str, folder: Path, sm: str, expr: str, flags: list[str]
        ) -> tuple[int, str, str]:
            FakeCompiler.num_compiled += 1
            digest = sha256(Path(source).read_bytes() + expr.encode()).digest()
            (folder / "kernel_tmp.cubin").write_bytes(b"\x7fELF" + digest)
            return 0, "", ""

    return FakeCompiler


def use_compiler(monkeypatch: pytest.MonkeyPatch, compiler: Any) -> Any:
    """Make it the compiler of Humming here."""
    runtime = importlib.import_module("humming.jit.runtime").KernelRuntime
    monkeypatch.setattr(runtime, "_get_compiler", staticmethod(lambda: compiler))
    return compiler


@contextmanager
def server(monkeypatch: pytest.MonkeyPatch, cache: Path, wanted: str = "1") -> Iterator[None]:
    """As in a server's process on an H200, with an empty cache of Humming's, `wanted` as `HQCONV_WARM_KERNELS`."""
    jit = importlib.import_module("humming.utils.jit")
    remembered = (jit.get_humming_cache_dir, jit.get_humming_tmp_dir, jit.get_humming_lock_dir)
    others = (jit.get_humming_lock_filename,)
    cache.mkdir(exist_ok=True, parents=True)
    with monkeypatch.context() as patch:
        patch.setenv("HUMMING_CACHE_DIR", str(cache))
        patch.setenv("HUMMING_TMP_DIR", str(cache.with_name(f"{cache.name}-tmp")))
        patch.setenv(VARIABLE, wanted)
        for function in (*remembered, *others):
            function.cache_clear()
        with standing_in(KNOWN["h200"].facts()), toolkit():
            yield
    for function in (*remembered, *others):
        function.cache_clear()


def num_cached(cache: Path) -> int:
    """Kernels in a cache of Humming's."""
    return len(list(cache.glob("*/kernel.cubin")))
