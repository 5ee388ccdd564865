"""Folder of kernels that were compiled beforehand, and their installation in a server.

A compiled kernel is a program, and Humming's cache, where a kernel goes, serves every model of this user. Owners and
permissions say nothing about who made one: `git clone` or `tar x` make a stranger's files one's own. So a folder must
be vouched for: by the person who starts the server, with `HQCONV_WARM_KERNELS` (1 means the folder beside the artifact,
any other text is the folder); or, for the folder beside the artifact, by a keyed digest of its manifest. The key
belongs to this user, and `hqconv warm` makes it. The manifest lists the digest of each kernel, and the bytes that were
compared are the ones in use: so it does not matter who else can write into the folder.

Humming finds a kernel by a digest over its source, its flags and the places and times of its headers, which no other
machine has. So the folder holds sources, and each kernel goes to where Humming here looks for that source: through
Humming's own `Compiler.compile`, with its locks, of a class whose compiling is copying. A kernel that a server does
not ask for is never looked at; one that is missing is compiled as ever.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hqconv.kernel_layout.kernel_sources import AGREE, KernelSource, identity, kernel_compiler
from hqconv.schemas.untrusted_files import parse_json, read_regular

VARIABLE = "HQCONV_WARM_KERNELS"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_OFF = ("0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_NAME = re.compile(r"[0-9a-f]{64}")
# names of a folder's files
STORED = re.compile(rf"({re.escape(MANIFEST)}|[0-9a-f]{{64}}\.(cu|cubin))(\.partial)?")
_NUM_THREADS = 8
_one_at_a_time = threading.Lock()
_HEADER_TIMES = "cuh_last_update_time"  # of Humming's compiler
_MAX_FILE_BYTES = 64 << 20
_MAX_MANIFEST_BYTES = 16 << 20
_MAX_KERNELS = 10_000
_SIGNATURE = "hmac_sha256"
_KEY_BYTES = 32


def folder_beside(artifact: Path) -> Path:
    """`OUT-kernels`, beside `OUT`. Not inside: an artifact may be read-only, and `verify` knows every file in it."""
    artifact = Path(os.path.abspath(artifact))  # noqa: PTH100 - of a link, its own name
    return artifact.with_name(f"{artifact.name}-kernels")


class UnusableError(Exception):
    """Reason why a folder of kernels is not used."""


class AbsentError(UnusableError):
    """No folder of kernels at all, which is the usual case."""


@dataclass(frozen=True)
class Kernel(KernelSource):
    """One compiled kernel of a folder, all its bytes checked."""

    cubin: bytes


def install(artifact: Path | None, sm_version: int, log: logging.Logger) -> Mapping[str, Any]:
    """Have Humming in this process find the kernels of a folder, if it is vouched for and all agrees.

    artifact: the artifact's folder; None: a repo on the Hub. sm_version: the artifact's target, 90. log: gets one line,
    which says why kernels are not used. To be called once the process has its CUDA device and before its first forward.
    Safe in any number of processes at once; the folder is only read.

    Returns the folder's tuning tables, none without kernels. Raises nothing: without kernels Humming compiles.
    """
    value = os.environ.get(VARIABLE, "")
    level = logging.WARNING
    try:
        folder = _folder_of(artifact, value)
        document = read_store_manifest(folder)
        if value == "":
            check_signature(folder, document)
        here = identity(sm_version)
        for key, name in AGREE.items():
            if document.get(key) != here[key]:
                raise UnusableError(
                    f"The kernels were compiled for another {name}: {document.get(key)}; here it is {here[key]}."
                )
        # all of them, before the first is used
        _install_all(read_kernels(folder, document))
    except AbsentError as error:
        reason = str(error)
        if value.lower() in ("", *_OFF):
            level = logging.INFO
    except UnusableError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a start must not fail for a cache
        reason = f"The kernels in {folder} cannot be used: {type(error).__name__}: {error}"
    else:
        log.info("Kernels that were compiled beforehand are in use")
        return tuning_tables(document)
    log.log(level, "Kernels are compiled as they are needed: %s", reason)
    return {}


def _folder_of(artifact: Path | None, value: str) -> Path:
    """Return the folder that the value of the variable names. Raises AbsentError where it names none."""
    if value.lower() in _OFF:
        raise AbsentError(f"{VARIABLE} is {value}.")
    if value.lower() not in ("", *_ON):
        return Path(value)
    if artifact is None:
        raise AbsentError(
            f"{VARIABLE} names no folder, and there is none beside a model on the Hub."
        )
    return folder_beside(artifact)


# --- the key


def _key_path() -> Path:
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".config") / "hqconv/warm.key"
    except RuntimeError as error:
        raise UnusableError("This user has no home folder, and so no key for kernels.") from error


def _read_key() -> bytes:
    """Read this user's key. Raises UnusableError without one, and for a file that others can read or have created."""
    path = _key_path()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            key = file.read(_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise UnusableError(f"This user's key {path} cannot be read: {error.strerror}.") from error
    user = os.geteuid()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != user or mode & 0o077 or len(key) != _KEY_BYTES:
        raise UnusableError(
            f"The key {path} is not used: expected {_KEY_BYTES} bytes of user {user} with mode 600, found {len(key)} "
            f"of user {status.st_uid} with mode {mode:o}. Remove it: `hqconv warm` makes another."
        )
    return key


def make_key() -> None:
    """Make this user's key, where there is none. One of several processes makes it. Raises UnusableError."""
    path = _key_path()
    if os.path.lexists(path):
        return
    try:
        above = next(folder for folder in path.parents if folder.exists())
        if above.stat().st_uid != os.geteuid():  # as with sudo, which may keep HOME
            raise UnusableError(f"The key {path} is not made: {above} belongs to another user.")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".warm.key-{os.urandom(8).hex()}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
                file.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):
                os.link(new, path)  # whole, or not at all
        finally:
            new.unlink()
    except OSError as error:
        raise UnusableError(f"The key {path} cannot be made: {error.strerror}.") from error


def _signature(document: Mapping[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != _SIGNATURE}
    message = b"hqconv warm\n" + json.dumps(content, sort_keys=True).encode()
    return hmac.new(_read_key(), message, "sha256").hexdigest()


def signed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the keyed digest of its content; the first one makes the key. Raises UnusableError."""
    make_key()
    return {**document, _SIGNATURE: _signature(document)}


def check_signature(folder: Path, document: Mapping[str, Any]) -> None:
    """Check that `hqconv warm` of this user made a manifest. Raises UnusableError."""
    reason = f"`hqconv warm` of this user did not make {folder}."
    try:
        found = str(document.get(_SIGNATURE)).encode()
        if hmac.compare_digest(found, _signature(document).encode()):
            return
    except UnusableError as error:
        reason = str(error)
    raise UnusableError(
        f"{reason} Kernels are programs: if you trust {folder}, start the server with {VARIABLE}=1."
    )


# --- the folder


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise UnusableError(f"{path} cannot be read: {error.strerror}.") from error


def read_store_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder of kernels. Raises AbsentError without a folder, UnusableError for damage."""
    if not folder.exists():
        raise AbsentError(f"{folder} cannot be read: there is no such folder.")
    path = folder / MANIFEST
    try:
        document = parse_json(_read(path, _MAX_MANIFEST_BYTES))
    except ValueError as error:
        raise UnusableError(f"{path} is damaged: {error}.") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise UnusableError(
            f"{path} has format version {version}, this hqconv reads {FORMAT_VERSION}."
        )
    kernels = document.get("kernels")
    if not isinstance(kernels, dict) or len(kernels) > _MAX_KERNELS:
        raise UnusableError(f"{path} is damaged: it lists no kernels.")
    return dict(document)


def tuning_tables(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tuning tables in a manifest of `read_store_manifest`, by name; empty if it has none."""
    found = document.get("tuning")
    return found if isinstance(found, dict) else {}


def read_kernels(folder: Path, document: Mapping[str, Any]) -> list[Kernel]:
    """Read every kernel that a manifest lists. Raises UnusableError for the first that differs from its entry."""
    listed = document["kernels"]
    with ThreadPoolExecutor(_NUM_THREADS, "hqconv-kernels") as pool:
        return list(pool.map(partial(read_kernel, folder), listed, listed.values()))


def read_kernel(folder: Path, name: str, entry: Any) -> Kernel:
    """Read one kernel of a manifest's list. Raises UnusableError if a file differs from the manifest."""
    if not (_NAME.fullmatch(name) and isinstance(entry, dict)):
        raise UnusableError(f"{folder / MANIFEST} is damaged: {name!r} is no kernel.")
    source = _read(folder / f"{name}.cu", _MAX_FILE_BYTES)
    cubin = _read(folder / f"{name}.cubin", _MAX_FILE_BYTES)
    if sha256(cubin).hexdigest() != entry.get("cubin_sha256") or not cubin.startswith(b"\x7fELF"):
        raise UnusableError(f"{folder / name}.cubin is not the file that the manifest lists.")
    try:
        kernel = Kernel(
            source.decode(),
            str(entry["expression"]),
            str(entry["architecture"]),
            bool(entry["without_fast_math"]),
            _leave,
            cubin,
        )
    except (ValueError, KeyError) as error:
        raise UnusableError(f"{folder / name}.cu is damaged: {error}.") from error
    if kernel.name != name:
        raise UnusableError(f"{folder / name}.cu is not the source that the manifest lists.")
    return kernel


# --- Humming's cache


def _install_all(kernels: list[Kernel]) -> None:
    """Write kernels to the paths where Humming looks for their sources; existing ones stay."""
    compiler = kernel_compiler()
    variants = {(kernel.architecture, kernel.without_fast_math) for kernel in kernels}
    # in this thread, whose GPU is the server's
    flags = {variant: compiler.get_flags(*variant) for variant in variants}
    with _headers_seen_once(compiler), ThreadPoolExecutor(_NUM_THREADS, "hqconv-kernels") as pool:
        # Humming writes five small files for each kernel: threads wait side by side.
        list(pool.map(lambda kernel: _install(kernel, compiler, flags), kernels))


@contextmanager
def _headers_seen_once(compiler: Any) -> Iterator[None]:
    """Keep the times of Humming's headers, which are a part of every kernel's key; they do not change meanwhile."""
    owner = next(cls for cls in compiler.__mro__ if _HEADER_TIMES in vars(cls))
    with _one_at_a_time:
        original = vars(owner)[_HEADER_TIMES]
        known = getattr(owner, _HEADER_TIMES)()
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
        postprocess_cubin=kernel.patch,
    )


def _leave(_: str) -> None:
    """Do nothing: the kernel was patched when it was compiled; the presence of a patch is part of Humming's key."""
