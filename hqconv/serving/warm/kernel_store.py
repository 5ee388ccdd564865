"""Folder of kernels that were compiled beforehand, and their installation in a server.

A compiled kernel is a program. Digests in its own folder show damage, not malice, and Humming's cache, where a kernel
goes, serves every model of this user. So a folder must be vouched for: by the person who starts the server, with
`HQCONV_WARM_KERNELS` (1 means the folder beside the artifact, any other text is the folder); or, for the folder beside
the artifact, by its owner and its permissions: all of it belongs to the server's user, and nobody else can write there.

Owners are checked on open files: of the folder's descriptor, and of each file opened in it without following links, and
the bytes that were read are the ones in use. A file or folder that takes their place later is not looked at. So folders
above do not matter: who can write there can only put another folder of the same user in this place, and a kernel is
used for its own source only.

Humming finds a kernel by a digest over its source, its flags and the places and times of its headers, which no other
machine has. So the folder holds sources, and each kernel goes to where Humming here looks for that source: through
Humming's own `Compiler.compile`, with its locks, of a class whose compiling is copying. A kernel that a server does
not ask for is never looked at; one that is missing is compiled as ever.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

VARIABLE = "HQCONV_WARM_KERNELS"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")
_NAME = re.compile(r"[0-9a-f]{64}")
_NUM_THREADS = 8
_one_at_a_time = threading.Lock()
_HEADER_TIMES = "cuh_last_update_time"  # of Humming's compiler
_MAX_FILE_BYTES, _MAX_MANIFEST_BYTES, _MAX_KERNELS = 64 << 20, 16 << 20, 10_000
# User to whom Linux ascribes files of users that it does not know: in containers, and on network disks.
_OVERFLOW_USER, _USUAL_OVERFLOW_USER = Path("/proc/sys/kernel/overflowuid"), 65534


def folder_beside(artifact: Path) -> Path:
    """`OUT-kernels`, beside `OUT`. Not inside: an artifact may be read-only, and `verify` knows every file in it."""
    artifact = Path(os.path.abspath(artifact))  # noqa: PTH100 - of a link, its own name
    return artifact.with_name(f"{artifact.name}-kernels")


class UnusableError(Exception):
    """Reason why a folder of kernels is not used."""


class AbsentError(UnusableError):
    """No folder of kernels at all, which is the usual case."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of a folder, all its bytes checked."""

    code: str
    expression: str
    architecture: str
    without_fast_math: bool
    cubin: bytes


@dataclass(frozen=True)
class WarmKernels:
    """Result of `use_warm_kernels`. reason: sentence why no kernels are used; None if they are.

    level: of `logging`, for a line with the reason. tuning: tables of the folder.
    """

    reason: str | None = None
    level: int = logging.WARNING
    tuning: Mapping[str, Any] = field(default_factory=dict)


def use_warm_kernels(artifact: Path | None, sm: int) -> WarmKernels:
    """Have Humming in this process find the kernels of a folder, if it is vouched for and all agrees.

    artifact: the artifact's folder; None: a repo on the Hub. sm: the artifact's target, 90. To be called once the
    process has its CUDA device and before its first forward. Safe in any number of processes at once; the folder is
    only read. Raises nothing: without kernels Humming compiles.
    """
    value = os.environ.get(VARIABLE, "")
    if value.lower() in _OFF:
        return WarmKernels(f"{VARIABLE} is {value}.", logging.DEBUG)
    is_asked_for = value != ""
    level = logging.WARNING if is_asked_for else logging.INFO
    if artifact is None and value.lower() in ("", *_ON):
        return WarmKernels(f"{VARIABLE} names no folder, and there is none beside a model on the Hub.", level)
    folder = Path(value) if artifact is None or value.lower() not in ("", *_ON) else folder_beside(artifact)
    try:
        with opened(folder, must_be_own=not is_asked_for) as there:
            document = read_store_manifest(there)
            _check_agreement(document, sm)
            kernels = read_kernels(there, document)  # all of them, before the first is used
        _install_all(list(kernels.values()))
    except AbsentError as error:
        return WarmKernels(str(error), level)
    except UnusableError as error:
        return WarmKernels(str(error))
    except Exception as error:  # noqa: BLE001 - a start must not fail for a cache
        return WarmKernels(f"The kernels in {folder} cannot be used: {type(error).__name__}: {error}")
    return WarmKernels(tuning=tuning_tables(document))


# --- the folder


@dataclass(frozen=True)
class OpenFolder:
    """Folder of kernels by its descriptor: `read` takes files from it wherever its path leads by then."""

    path: Path
    descriptor: int
    must_be_own: bool

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a regular file, not through a link. Raises UnusableError for any other, larger or distrusted one."""
        path, flags = self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
                    raise UnusableError(f"{path} is no file of kernels.")
                if self.must_be_own:
                    _check_own(self.path, path, status)
                return file.read(max_bytes + 1)
        except OSError as error:
            raise UnusableError(f"{path} cannot be read: {error.strerror}.") from error


@contextmanager
def opened(folder: Path, *, must_be_own: bool = False) -> Iterator[OpenFolder]:
    """Open a folder of kernels.

    must_be_own: nobody vouched for it, so that folder and files must belong to this process's user, be writable by no
    other, and the folder be neither a link nor a download. Raises AbsentError without a folder, UnusableError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if must_be_own else 0)
    try:
        descriptor = os.open(folder, flags)
    except FileNotFoundError as error:
        raise AbsentError(f"{folder} cannot be read: there is no such folder.") from error
    except OSError as error:
        if must_be_own and folder.is_symlink():
            raise _distrusted(folder, f"{folder} is a link.") from error
        raise UnusableError(f"{folder} cannot be read: {error.strerror}.") from error
    try:
        if must_be_own:
            _check_own(folder, folder, os.fstat(descriptor))
            if _is_download(folder):
                raise _distrusted(folder, f"{folder} was downloaded from the Hub.")
        yield OpenFolder(folder, descriptor, must_be_own)
    finally:
        os.close(descriptor)


def _check_own(folder: Path, path: Path, status: os.stat_result) -> None:
    """Check that an open file or folder is this user's alone. Access lists count: their mask stands for the group."""
    user = os.geteuid()
    if status.st_uid != user:
        raise _distrusted(folder, f"{path} belongs to user {status.st_uid}, and this process to user {user}.")
    if user == _overflow_user():
        raise _distrusted(folder, f"{path} belongs to user {user}, as files of unknown users do.")
    if status.st_mode & OTHERS_WRITE:
        who = "others" if status.st_mode & stat.S_IWOTH else "its group"
        raise _distrusted(folder, f"{path} can be written by {who} (chmod go-w takes that away).")


def _overflow_user() -> int:
    try:
        return int(_OVERFLOW_USER.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _USUAL_OVERFLOW_USER


def _is_download(folder: Path) -> bool:
    """Return True if `hf download --local-dir` put the folder there: what it fetches belongs to its user, too."""
    there = Path(os.path.realpath(folder))
    return any(
        (above / ".cache/huggingface/download" / there.relative_to(above) / f"{MANIFEST}.metadata").exists()
        for above in (there, *there.parents)
    )


def _distrusted(folder: Path, why: str) -> UnusableError:
    return UnusableError(f"{why} Kernels are programs: if you trust {folder}, start the server with {VARIABLE}=1.")


def read_store_manifest(folder: OpenFolder) -> dict[str, Any]:
    """Read the manifest of a folder of kernels. Raises UnusableError if there is none, or it is damaged."""
    path = folder.path / MANIFEST
    try:
        document = json.loads(folder.read(MANIFEST, _MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path} is damaged: {error}.") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise UnusableError(f"{path} has format version {version}, this hqconv reads {FORMAT_VERSION}.")
    kernels = document.get("kernels")
    if not isinstance(kernels, dict) or len(kernels) > _MAX_KERNELS:
        raise UnusableError(f"{path} is damaged: it lists no kernels.")
    return dict(document)


def tuning_tables(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tuning tables in a manifest of `read_store_manifest`, by name; empty if it has none."""
    found = document.get("tuning")
    return found if isinstance(found, dict) else {}


def _check_agreement(document: dict[str, Any], sm: int) -> None:
    from hqconv.kernel_layout.kernel_sources import AGREE, identity

    here = identity(sm)
    for key, name in AGREE.items():
        if document.get(key) != here[key]:
            raise UnusableError(
                f"The kernels were compiled for another {name}: {document.get(key)}; here it is {here[key]}."
            )


def read_kernels(folder: OpenFolder, document: dict[str, Any]) -> dict[str, Kernel]:
    """Read every kernel that a manifest lists. Raises UnusableError for the first that differs from its entry."""
    listed = document["kernels"]
    with ThreadPoolExecutor(_NUM_THREADS, "hqconv-kernels") as pool:
        return dict(zip(listed, pool.map(lambda name: read_kernel(folder, name, listed[name]), listed), strict=True))


def read_kernel(folder: OpenFolder, name: str, entry: Any) -> Kernel:
    """Read one kernel of a manifest's list. Raises UnusableError if a file differs from the manifest."""
    from hqconv.kernel_layout.kernel_sources import kernel_name

    if not (_NAME.fullmatch(name) and isinstance(entry, dict)):
        raise UnusableError(f"{folder.path / MANIFEST} is damaged: {name!r} is no kernel.")
    source, cubin = (folder.read(f"{name}.{kind}", _MAX_FILE_BYTES) for kind in ("cu", "cubin"))
    if sha256(cubin).hexdigest() != entry.get("cubin_sha256") or not cubin.startswith(b"\x7fELF"):
        raise UnusableError(f"{folder.path / name}.cubin is not the file that the manifest lists.")
    try:
        code = source.decode()
        facts = str(entry["expression"]), str(entry["architecture"]), bool(entry["without_fast_math"])
    except (ValueError, KeyError) as error:
        raise UnusableError(f"{folder.path / name}.cu is damaged: {error}.") from error
    if kernel_name(code, *facts) != name:
        raise UnusableError(f"{folder.path / name}.cu is not the source that the manifest lists.")
    return Kernel(code, *facts, cubin)


def _install_all(kernels: list[Kernel]) -> None:
    """Write kernels to the paths where Humming looks for their sources; existing ones stay."""
    from hqconv.kernel_layout.kernel_sources import kernel_compiler

    compiler = kernel_compiler()
    words = {(kernel.architecture, kernel.without_fast_math) for kernel in kernels}
    flags = {word: compiler.get_flags(*word) for word in words}  # in this thread, whose GPU is the server's
    with _headers_seen_once(compiler), ThreadPoolExecutor(_NUM_THREADS, "hqconv-kernels") as pool:
        # Humming writes five small files for each kernel: threads wait side by side.
        list(pool.map(lambda kernel: _install(kernel, compiler, flags), kernels))


@contextmanager
def _headers_seen_once(compiler: Any) -> Iterator[None]:
    """Keep the times of Humming's headers, which are a part of every kernel's key; they do not change meanwhile."""
    owner = next(cls for cls in compiler.__mro__ if _HEADER_TIMES in vars(cls))
    with _one_at_a_time:
        original, known = vars(owner)[_HEADER_TIMES], getattr(owner, _HEADER_TIMES)()
        setattr(owner, _HEADER_TIMES, staticmethod(lambda: known))
        try:
            yield
        finally:
            setattr(owner, _HEADER_TIMES, original)


def _install(kernel: Kernel, compiler: Any, flags: Mapping[tuple[str, bool], list[str]]) -> None:
    def copy(cls: Any, source_path: Any, folder: Any, *_: Any) -> tuple[int, str, str]:
        (Path(folder) / "kernel_tmp.cubin").write_bytes(kernel.cubin)
        return 0, f"copied from a folder of kernels, see {VARIABLE}\n", ""

    def known_flags(cls: Any, architecture: str, disable_fast_math: bool = False) -> list[str]:
        return flags[architecture, disable_fast_math]

    # The compiler's name is part of Humming's key.
    methods = {"_compile": classmethod(copy), "get_flags": classmethod(known_flags)}
    copying = type(compiler.__name__, (compiler,), methods)
    copying.compile(  # type: ignore[attr-defined]
        kernel.code,
        kernel.architecture,
        kernel.expression,
        disable_fast_math=kernel.without_fast_math,
        postprocess_cubin=_leave,
    )


def _leave(_: str) -> None:
    """Do nothing: the kernel was patched when it was compiled; the presence of a patch is part of Humming's key."""
