"""Opens whatever can be converted, as what it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.errors import RequestError
from hqconv.io.checkpoint_files import readable
from hqconv.io.gguf_header import holds_gguf
from hqconv.io.hub_snapshot import is_repo_id, look
from hqconv.io.source_names import named
from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.gpu_target import GpuTarget, parse_target
from hqconv.sources.artifact_headers import as_source

if TYPE_CHECKING:
    from hqconv.models.protocols import Source, SourceHeaders

Opened = TypeVar("Opened", bound="SourceHeaders")


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


@dataclass(frozen=True)
class SourceLocation:
    """Where a source lies, and what it is: kind is artifact, gguf or safetensors.

    words: of a repo on the Hub, as `Checkpoint` takes them; none of a folder.
    """

    root: Path
    kind: str
    words: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder's name, or the repo's without the organisation."""
        return self.words["repo_id"].split("/")[1] if self.words else self.root.resolve().name


def locate_source(src: str | Path, revision: str | None = None) -> SourceLocation:
    """Where a folder or a repo lies; of a repo the words are downloaded. Raises as `open_headers`."""
    root, words = Path(src), {}
    if str(src) and not root.exists() and is_repo_id(str(src)):
        root, listing = look(str(src), revision)
        words = {"repo_id": str(src), "revision": root.name, "listing": listing}
    elif is_unfinished(root):
        raise RequestError(
            "The source is an unfinished conversion of hqconv, not a checkpoint.",
            where=str(src),
            remedy="Finish it with --resume, or give the model folder it is made from.",
        )
    is_plain = bool(words) or revision is None  # a folder has no revisions, which opening it says
    if is_plain and is_artifact(root) and read_manifest(root)["layout"] == KERNEL:
        return SourceLocation(root, "artifact", words)
    is_gguf = bool(str(src)) and revision is None and not words and holds_gguf(root)
    return SourceLocation(root, "gguf" if is_gguf else "safetensors", words)


def _held(source: Opened, *, is_whole: bool = True) -> Opened:
    """An artifact's files held to its manifest, whichever layout it has; closed where they are not those."""
    try:
        if is_artifact(source.root):
            listing, names = source.listing, [*source.other_files, *(file.name for file in source.files)]
            sizes = {} if listing is None else {name: listing.sizes[name] for name in names}
            digests = {} if listing is None else listing.digests
            listed = read_manifest(source.root, is_sealed=True)["files"]
            source.guard.hold_to(listed, sizes, digests, is_whole=is_whole)
    except BaseException:
        source.close()
        raise
    return source


@without_gc()
def open_source(src: str | Path, revision: str | None = None, *, is_lazy: bool = False) -> Source:
    """Opens what can be converted: a model folder, a Hub repo (`org/name`), a folder with GGUF files, an artifact.

    is_lazy: of a model on the Hub no weights are downloaded until they are asked for, as never of an artifact there.
    A context manager that closes it. Raises RequestError, InputError (also of a damaged artifact) or NetworkError.
    """
    from hqconv.sources.safetensors import SafetensorsSource

    with readable(src), as_source():
        src, revision = named(str(src), revision)
        place = locate_source(src, revision)
        if place.kind == "artifact":
            from hqconv.sources.artifact import ArtifactSource

            return _held(ArtifactSource(place.root, name=place.name, **place.words), is_whole=not place.words)
        if place.kind == "gguf":
            from hqconv.sources.gguf import open_with_gguf

            return _held(open_with_gguf(place.root))
        if place.words and is_lazy:
            return _held(SafetensorsSource(place.root, name=place.name, **place.words), is_whole=False)
        return _held(SafetensorsSource.open(src, revision), is_whole=not place.words)


@without_gc()
def open_headers(src: str | Path, revision: str | None = None) -> SourceHeaders:
    """Opens it as `open_source` does, for a look: loads no torch, and of a repo downloads no weights."""
    from hqconv.sources.safetensors_headers import SafetensorsHeaders

    with readable(src), as_source():
        src, revision = named(str(src), revision)
        place = locate_source(src, revision)
        if place.kind == "artifact":
            from hqconv.sources.artifact_headers import ArtifactHeaders

            return _held(
                ArtifactHeaders(place.root, name=place.name, **place.words), is_whole=not place.words
            )
        if place.kind == "gguf":
            from hqconv.sources.gguf_headers import GgufHeaders, open_with_gguf_as

            return _held(open_with_gguf_as(place.root, SafetensorsHeaders, GgufHeaders))
        if place.words:
            return _held(SafetensorsHeaders(place.root, name=place.name, **place.words), is_whole=False)
        return _held(SafetensorsHeaders.open(src, revision))


def own_target(source: SourceHeaders) -> GpuTarget | None:
    """The target that an artifact in the kernel layout was made for; None of any other source."""
    if not is_artifact(source.root):
        return None
    words = read_manifest(source.root)
    return parse_target(words["target"], words.get("cuda")) if words["layout"] == KERNEL else None
