"""Folder of kernels that were compiled beforehand, and their installation in a server.

A compiled kernel is a program. Digests in its own folder show damage, not malice, and Humming's cache, where a kernel
goes, serves every model of this user. So nothing is used before the person who starts the server asks for it with
`HQCONV_WARM_KERNELS`: 1 means the folder beside the artifact, anything else is the folder.

Humming finds a kernel by a digest over its source, its flags and the places and times of its headers, which no other
machine has. So the folder holds sources, and each kernel goes to where Humming here looks for that source: through
Humming's own `Compiler.compile`, with its locks, of a class whose compiling is copying. A kernel that a server does
not ask for is never looked at; one that is missing is compiled as ever.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

VARIABLE = "HQCONV_WARM_KERNELS"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_OFF = ("", "0", "false", "no", "off")
_NAME = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES, _MAX_MANIFEST_BYTES, _MAX_KERNELS = 64 << 20, 16 << 20, 10_000


def kernels_folder(artifact: Path) -> Path:
    """Folder of an artifact's kernels: from the environment, or `OUT-kernels` beside the artifact.

    Not inside: an artifact may be read-only, and `verify` knows every file in it.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() not in (*_OFF, "1", "true", "yes", "on"):
        return Path(wanted)
    return folder_beside(artifact)


def folder_beside(artifact: Path) -> Path:
    """`OUT-kernels`, beside `OUT`."""
    artifact = Path(os.path.abspath(artifact))  # noqa: PTH100 - of a link, its own name
    return artifact.with_name(f"{artifact.name}-kernels")


class UnusableError(Exception):
    """Reason why a folder of kernels is not used."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of a folder, all its bytes checked."""

    code: str
    expression: str
    architecture: str
    without_fast_math: bool
    cubin: bytes


def use_warm_kernels(folder: Path, sm: int) -> str | None:
    """Have Humming in this process find the kernels of `folder`, if the environment allows it and all agrees.

    folder: of `kernels_folder`. sm: the artifact's target, 90. To be called once the process has its CUDA device and
    before its first forward. Safe in any number of processes at once; the folder is only read.

    Returns None if they are in use, else the reason why not, as one sentence. Raises nothing: without them Humming
    compiles.
    """
    if os.environ.get(VARIABLE, "").lower() in _OFF:
        return f"{VARIABLE} is not set."
    try:
        document = read_store_manifest(folder)
        _check_agreement(document, sm)
        kernels = read_kernels(folder, document)  # all of them, before the first is used
        for kernel in kernels.values():
            _install(kernel)
    except UnusableError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a start must not fail for a cache
        return f"The kernels in {folder} cannot be used: {type(error).__name__}: {error}"
    return None


def _read(path: Path, max_bytes: int) -> bytes:
    """A regular file, not through a link, not larger than it may be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
                raise UnusableError(f"{path} is no file of kernels.")
            return file.read(max_bytes + 1)
    except OSError as error:
        raise UnusableError(f"{path} cannot be read: {error.strerror}.") from error


def read_store_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder of kernels. Raises UnusableError if there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        document = json.loads(_read(path, _MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path} is damaged: {error}.") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise UnusableError(f"{path} has format version {version}, this hqconv reads {FORMAT_VERSION}.")
    kernels = document.get("kernels")
    if not isinstance(kernels, dict) or len(kernels) > _MAX_KERNELS:
        raise UnusableError(f"{path} is damaged: it lists no kernels.")
    return dict(document)


def tuning_tables(folder: Path) -> dict[str, Any]:
    """Read the tuning tables in a kernel folder, by name; empty if the folder's manifest is unusable."""
    try:
        found = read_store_manifest(folder).get("tuning")
    except UnusableError:
        return {}
    return found if isinstance(found, dict) else {}


def _check_agreement(document: dict[str, Any], sm: int) -> None:
    from hqconv.humming_layout.compiler import AGREE, identity

    here = identity(sm)
    for key, name in AGREE.items():
        if document.get(key) != here[key]:
            raise UnusableError(
                f"The kernels were compiled for another {name}: {document.get(key)}; here it is {here[key]}."
            )


def read_kernels(folder: Path, document: dict[str, Any]) -> dict[str, Kernel]:
    """Read every kernel that a manifest lists. Raises UnusableError for the first that differs from its entry."""
    return {name: read_kernel(folder, name, entry) for name, entry in document["kernels"].items()}


def read_kernel(folder: Path, name: str, entry: Any) -> Kernel:
    """Read one kernel of a manifest's list. Raises UnusableError if a file differs from the manifest."""
    from hqconv.humming_layout.kernel_sources import kernel_name

    if not (_NAME.fullmatch(name) and isinstance(entry, dict)):
        raise UnusableError(f"{folder / MANIFEST} is damaged: {name!r} is no kernel.")
    source, cubin = (_read(folder / f"{name}.{kind}", _MAX_FILE_BYTES) for kind in ("cu", "cubin"))
    if sha256(cubin).hexdigest() != entry.get("cubin_sha256") or not cubin.startswith(b"\x7fELF"):
        raise UnusableError(f"{folder / name}.cubin is not the file that the manifest lists.")
    try:
        code = source.decode()
        facts = str(entry["expression"]), str(entry["architecture"]), bool(entry["without_fast_math"])
    except (ValueError, KeyError) as error:
        raise UnusableError(f"{folder / name}.cu is damaged: {error}.") from error
    if kernel_name(code, *facts) != name:
        raise UnusableError(f"{folder / name}.cu is not the source that the manifest lists.")
    return Kernel(code, *facts, cubin)


def _install(kernel: Kernel) -> None:
    """Write a kernel to the path where Humming looks for its source; an existing one stays."""
    from hqconv.humming_layout.compiler import kernel_compiler

    compiler = kernel_compiler()

    def copy(cls: Any, source_path: Any, folder: Any, *_: Any) -> tuple[int, str, str]:
        (Path(folder) / "kernel_tmp.cubin").write_bytes(kernel.cubin)
        return 0, f"copied from a folder of kernels, see {VARIABLE}\n", ""

    # The compiler's name is part of Humming's key.
    copying = type(compiler.__name__, (compiler,), {"_compile": classmethod(copy)})
    copying.compile(  # type: ignore[attr-defined]
        kernel.code,
        kernel.architecture,
        kernel.expression,
        disable_fast_math=kernel.without_fast_math,
        postprocess_cubin=_leave,
    )


def _leave(_: str) -> None:
    """Do nothing: the kernel was patched when it was compiled; the presence of a patch is part of Humming's key."""
