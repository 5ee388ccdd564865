"""Opens whatever can be converted, as what it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.checkpoint.gguf import holds_gguf
from hqconv.errors import InputError, RequestError
from hqconv.schemas.artifact import KERNEL

if TYPE_CHECKING:
    from hqconv.sources.source import Source


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


@without_gc()
def open_source(src: str | Path, revision: str | None = None, *, headers_only: bool = False) -> Source:
    """Opens what can be converted: a model folder, a Hub repo (`org/name`), a folder with GGUF files, an artifact.

    A context manager that closes it. With `headers_only` no weights of a repo are downloaded, and none can be read.
    Raises RequestError, InputError, VerificationError (of a damaged artifact) or NetworkError.
    """
    try:
        return _open(src, revision, headers_only=headers_only)
    except OSError as error:  # from a look at a folder; reading a file has messages of its own
        what, where = "The source cannot be read.", str(error.filename or src)
        raise InputError(what, where=where, found=error.strerror or error) from error


def _open(src: str | Path, revision: str | None, *, headers_only: bool) -> Source:
    from hqconv.sources.safetensors import SafetensorsSource

    path = Path(src)
    if is_unfinished(path):
        raise RequestError(
            "The source is an unfinished conversion of hqconv, not a checkpoint.",
            where=str(src),
            remedy="Finish it with --resume, or give the model folder it is made from.",
        )
    if revision is None and is_artifact(path) and read_manifest(path)["layout"] == KERNEL:
        from hqconv.artifact.source import ArtifactSource

        return ArtifactSource(path, name=path.resolve().name)
    if str(src) and revision is None and holds_gguf(path):
        from hqconv.sources.gguf import open_with_gguf

        return open_with_gguf(path)
    return SafetensorsSource.open(str(src), revision, headers_only=headers_only)
