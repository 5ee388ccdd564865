"""Loops compiled by numba: they release the interpreter's lock, and are cached on disk for the next process."""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba import njit
from numba.core import caching, config, event
from numba.core.serialize import dumps

Function = Callable[..., Any]
# Folder of loops that were compiled with the installation or before it (`hqconv.precompile`); read only.
COMPILED = Path(__file__).parent / "cpu_loops" / "compiled"
_is_cached = [True]  # False once a loop could not be cached

_V3 = "avx,avx2,bmi,bmi2,cmov,cx16,cx8,f16c,fma,fxsr,lzcnt,mmx,movbe,popcnt,sahf,sse,sse2,sse3,sse4.1,sse4.2,ssse3"
_V4 = f"{_V3},avx512bw,avx512cd,avx512dq,avx512f,avx512vl"
# Levels of x86-64 that loops are compiled for beforehand, the best first: the instructions, by LLVM's names.
LEVELS = {"x86-64-v4": frozenset(_V4.split(",")), "x86-64-v3": frozenset(_V3.split(","))}
# LLVM's own tuning of a level ("generic") gives loops that are 5 to 8 % slower on a Zen 4, the one processor measured.
_TUNED_FOR = {"x86-64-v4": "znver4", "x86-64-v3": "znver3"}
HOST = "host"  # the level of this very processor
_output: list[tuple[Path, str]] = []  # the folder to compile into instead of the user's cache, and for which level


def compiled(function: Function) -> Function:
    """Compile a function on its first call with each kind of arguments.

    Where no folder can hold the result (a read-only installation and home), every process compiles for itself.
    """
    return _compile(function)


def compiled_sums(function: Function) -> Function:
    """`compiled`, where sums of floats may be taken in any order: in vectors, and with other last bits elsewhere."""
    return _compile(function, fastmath={"reassoc"})


def inlined(function: Function) -> Function:
    """`compiled`, and expanded where another compiled function calls it."""
    return _compile(function, inline="always")


class CacheFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Cache of one function on disk that several processes may fill at the same time.

    numba numbers the data files. Two processes that compile different signatures at once both take the next number, and
    the index then gives one signature the machine code of the other: a wrong result without any error. Here every data
    file has a name of its own, so that such a race can only lose an entry.
    """

    def _data_name(self, number: int) -> str:
        return str(self._data_name_pattern.format(number=uuid.uuid4().int))


class _Nowhere(caching._CacheLocator):  # type: ignore[misc]
    """Place of the user's cache where no folder can hold it."""

    def get_cache_path(self) -> str:
        return ""

    def get_source_stamp(self) -> None:
        return None

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Function, py_file: str) -> _Nowhere:
        return cls()


class _LoopImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (*caching.CacheImpl._locator_classes, _Nowhere)


class LoopCache(caching.FunctionCache):  # type: ignore[misc]
    """The user's cache of one loop, and behind it the loops that were compiled with the installation."""

    _impl_class = _LoopImpl

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._is_kept = not isinstance(self._impl.locator, _Nowhere)
        _is_cached[0] &= self._is_kept
        stamp = (self._impl.locator.get_source_stamp(), _digest_of_loops())
        self._cache_file = CacheFile(self._cache_path, self._impl.filename_base, stamp)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        """Return the key of a cached loop: its types, the processor, its name.

        numba's own has the pickled closure. A compiled function in it has another random number in every process, so
        that each process would compile such a loop again.
        """
        return signature, codegen.magic_tuple(), self._py_func.__qualname__

    def _load_overload(self, signature: Any, target_context: Any) -> Any:
        if _output:
            return self._load_compiled(signature, target_context, *_output[0])
        found = super()._load_overload(signature, target_context) if self._is_kept else None
        for level in (HOST, *_levels()) if found is None else ():
            found = found or self._load_compiled(signature, target_context, COMPILED, level)
        return found

    def _load_compiled(self, signature: Any, target_context: Any, folder: Path, level: str) -> Any:
        try:
            data = (folder / self._compiled_name(signature, target_context.codegen(), level)).read_bytes()
        except OSError:
            return None
        return self._impl.rebuild(target_context, pickle.loads(data))

    def _save_overload(self, signature: Any, result: Any) -> None:
        if not _output:
            if self._is_kept:
                super()._save_overload(signature, result)
        elif self._impl.check_cachable(result):
            folder, level = _output[0]
            path = folder / self._compiled_name(signature, result.codegen, level)
            part = path.with_suffix(f".{uuid.uuid4().hex}")
            part.write_bytes(dumps(self._impl.reduce(result)))
            part.replace(path)

    def _compiled_name(self, signature: Any, codegen: Any, level: str) -> str:
        """Return the name of a compiled loop's file: a digest of all that decides its machine code, or can read it."""
        function, processor = self._py_func, codegen.magic_tuple()
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        versions = (sys.implementation.cache_tag, sys.abiflags, numba.__version__, llvmlite.__version__)
        source = (_digest_of_file(function.__code__.co_filename), _digest_of_loops())
        key = repr((place, str(signature), processor if level == HOST else (processor[0], level), versions, source))
        return f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.loop"


def compile_into(folder: Path, level: str) -> None:
    """Compile all loops of this process into `folder`, in the form of `COMPILED`, and use no other cache.

    level: one of LEVELS, with numba's settings of `settings_of` in the environment, or HOST.
    """
    _output[:] = [(folder, level)]


def settings_of(level: str) -> dict[str, str]:
    """Return the environment variables by which numba compiles for a level: its instructions and no others."""
    if level == HOST:
        return {}
    wanted = LEVELS[level] | {"64bit"}  # a feature of every x86-64, which not every LLVM lists
    names = sorted(wanted.union(binding.get_host_cpu_features()))
    features = ",".join(f"{'+' if name in wanted else '-'}{name}" for name in names)
    return {"NUMBA_CPU_NAME": _TUNED_FOR[level], "NUMBA_CPU_FEATURES": features}


@functools.cache
def _levels() -> tuple[str, ...]:
    """Return the levels of x86-64 that this processor has; none where the user chose a processor for numba."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return ()
    has = {name for name, is_there in binding.get_host_cpu_features().items() if is_there}
    return tuple(level for level, features in LEVELS.items() if features <= has)


def _compile(function: Function, **options: Any) -> Function:
    _name_by_closure(function)
    loop: Function = njit(nogil=True, **options)(function)
    loop._cache = LoopCache(function)  # type: ignore[attr-defined]
    return loop


def _name_by_closure(function: Function) -> None:
    """Add a digest of the values that a function closes over to its name, and so to its symbol's.

    numba names symbols by function, argument types, and a number that each process counts for itself. Two loops of one
    name that two processes compiled may have the same number, and a loop that calls one of them then gets the other: a
    wrong result without any error.
    """
    if function.__closure__:
        function.__qualname__ += f"_{hashlib.sha256(_describe(function).encode()).hexdigest()[:16]}"


def _describe(value: Any) -> str:
    """Describe a function by its place and its closure, anything else by its value; sources are in the stamp."""
    value = getattr(value, "py_func", value)
    if not isinstance(value, FunctionType):
        return f"{type(value).__name__} {value!r}"
    closed = ", ".join(_describe(cell.cell_contents) for cell in value.__closure__ or ())
    return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}({closed})"


@functools.cache
def _digest_of_loops() -> str:
    """Digest of all sources of compiled functions: one that is inlined is a part of its callers' machine code."""
    paths = [Path(__file__), *sorted(Path(__file__).parent.glob("cpu_loops/*.py"))]
    return hashlib.sha256("".join(map(_digest_of_file, map(str, paths))).encode()).hexdigest()


@functools.cache
def _digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class _Announcer(event.Listener):  # type: ignore[misc]
    """Reports once that loops are being compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def on_start(self, event: event.Event) -> None:
        say, self._say = self._say, None
        if say is not None:
            then = (
                "this is done once." if _is_cached[0] else "no folder can hold them, so that every process does this."
            )
            say(f"Compiling loops for this processor, which takes up to a minute; {then}")

    def on_end(self, event: event.Event) -> None:
        return None


@contextmanager
def announced(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` once when a loop must be compiled inside; not for loops that are cached on disk."""
    listener = _Announcer(say)
    event.register("numba:compile", listener)
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)
