"""Opens whatever can be converted, as what it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hqconv.artifact.as_source import as_source
from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.checkpoint.gguf import holds_gguf
from hqconv.checkpoint.naming import named
from hqconv.errors import InputError, RequestError
from hqconv.schemas.artifact import KERNEL
from hqconv.schemas.gpu_target import Target, parse_target

if TYPE_CHECKING:
    from hqconv.sources.source import Headers, Source

Opened = TypeVar("Opened", bound="Headers")


@contextmanager
def without_gc() -> Iterator[None]:
    """Pauses cycle collection: walking 70,000 tensors' objects again and again would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _refusing(src: str | Path) -> Iterator[None]:
    try:
        with as_source():
            yield
    except OSError as error:  # from a look at a folder; reading a file has messages of its own
        what, where = "The source cannot be read.", str(error.filename or src)
        raise InputError(what, where=where, found=error.strerror or error) from error


def _held(source: Opened, *, is_whole: bool = True) -> Opened:
    """An artifact's files held to its manifest, whichever layout it has; closed where they are not those."""
    try:
        if is_artifact(source.root):
            source.guard.hold_to(read_manifest(source.root, is_sealed=True)["files"], is_whole=is_whole)
    except BaseException:
        source.close()
        raise
    return source


@without_gc()
def open_source(src: str | Path, revision: str | None = None) -> Source:
    """Opens what can be converted: a model folder, a Hub repo (`org/name`), a folder with GGUF files, an artifact.

    A context manager that closes it. Raises RequestError, InputError (also of a damaged artifact) or NetworkError.
    """
    from hqconv.sources.safetensors import SafetensorsSource

    with _refusing(src):
        src, revision = named(str(src), revision)
        kind, path = _kind(src, revision), Path(src)
        if kind == "artifact":
            from hqconv.artifact.source import ArtifactSource

            return _held(ArtifactSource(path, name=path.resolve().name))
        if kind == "gguf":
            from hqconv.sources.gguf import open_with_gguf

            return _held(open_with_gguf(path))
        return _held(SafetensorsSource.open(str(src), revision), is_whole=path.is_dir())


@without_gc()
def open_headers(src: str | Path, revision: str | None = None) -> Headers:
    """Opens it as `open_source` does, for a look: loads no torch, and of a repo downloads no weights."""
    from hqconv.sources.headers import SafetensorsHeaders

    with _refusing(src):
        src, revision = named(str(src), revision)
        kind, path = _kind(src, revision), Path(src)
        if kind == "artifact":
            from hqconv.artifact.headers import ArtifactHeaders

            return _held(ArtifactHeaders(path, name=path.resolve().name))
        if kind == "gguf":
            from hqconv.sources.gguf_headers import GgufHeaders, open_with_gguf_as

            return _held(open_with_gguf_as(path, SafetensorsHeaders, GgufHeaders))
        headers = SafetensorsHeaders.open(str(src), revision, headers_only=True)
        return _held(headers, is_whole=path.is_dir())


def own_target(source: Headers) -> Target | None:
    """The target that an artifact in the kernel layout was made for; None of any other source."""
    if not is_artifact(source.root):
        return None
    words = read_manifest(source.root)
    return parse_target(words["target"], words.get("cuda")) if words["layout"] == KERNEL else None


def _kind(src: str | Path, revision: str | None) -> str:
    path = Path(src)
    if is_unfinished(path):
        raise RequestError(
            "The source is an unfinished conversion of hqconv, not a checkpoint.",
            where=str(src),
            remedy="Finish it with --resume, or give the model folder it is made from.",
        )
    if revision is None and is_artifact(path) and read_manifest(path)["layout"] == KERNEL:
        return "artifact"
    return "gguf" if str(src) and revision is None and holds_gguf(path) else "safetensors"
