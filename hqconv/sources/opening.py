"""Open a source to convert: a safetensors folder, a Hub repo, a folder with GGUF files, or an artifact."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.errors import RequestError
from hqconv.io import hub_snapshot
from hqconv.io.checkpoint_files import readable
from hqconv.io.gguf_header import holds_gguf
from hqconv.io.hub import Listing
from hqconv.io.source_names import named, refuse_what_is_no_model
from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.gpu_target import GpuTarget, parse_target
from hqconv.sources.artifact import ArtifactSource, as_input_error
from hqconv.sources.gguf import open_with_gguf
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from hqconv.models.source_protocol import Source


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause cycle collection: walking 70,000 tensors' objects again and again would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class SourceLocation:
    """The folder of a source and its kind: artifact, gguf or safetensors.

    repo_id: of a Hub repo, of which `root` is the snapshot in the cache. listing: the repo's files; None offline.
    """

    root: Path
    kind: str
    repo_id: str | None = None
    listing: Listing | None = None


def locate_source(src: str | Path, revision: str | None = None) -> SourceLocation:
    """Find the folder and kind of a source; of a Hub repo only small files are downloaded. Raises as `open_source`."""
    src, revision = named(str(src), revision)
    root = Path(src)
    if src and not root.exists() and hub_snapshot.is_repo_id(src):
        root, listing = hub_snapshot.look(src, revision)
        is_kernel = is_artifact(root) and read_manifest(root)["layout"] == KERNEL
        return SourceLocation(root, "artifact" if is_kernel else "safetensors", src, listing)
    if is_unfinished(root):
        raise RequestError(
            "The source is an unfinished conversion of hqconv, not a checkpoint.",
            where=src,
            remedy="Finish it with --resume, or give the model folder it is made from.",
        )
    if revision is None and is_artifact(root) and read_manifest(root)["layout"] == KERNEL:
        return SourceLocation(root, "artifact")
    if src and revision is None and holds_gguf(root):
        return SourceLocation(root, "gguf")
    refuse_what_is_no_model(root)
    if not (src and root.is_dir()):  # Path("") is the current folder
        raise hub_snapshot.no_repo(src)
    if revision is not None:
        what, remedy = "A local folder has no revisions.", "Leave the revision out."
        raise RequestError(what, where=src, found=f"revision {revision}", remedy=remedy)
    return SourceLocation(root, "safetensors")


@without_gc()
def open_source(src: str | Path, revision: str | None = None, *, is_lazy: bool = False) -> Source:
    """Open a model folder, a Hub repo (`org/name`), a folder with GGUF files or an artifact. Loads no torch.

    is_lazy: download no weights of a checkpoint on the Hub; `read_into` reads ranges, `fetch` downloads files. The
    weights of an artifact on the Hub are never downloaded here.
    HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the token have their meaning in huggingface_hub.
    A context manager that closes the source. Raises RequestError for an unknown folder, repo or revision, or one
    without access; InputError for broken, missing or contradictory files and damaged artifacts; NetworkError where
    the Hub fails.
    """
    with readable(src), as_input_error():
        return open_location(locate_source(src, revision), is_lazy=is_lazy)


def open_location(location: SourceLocation, *, is_lazy: bool = False) -> Source:
    """Open a located source, as `open_source` does. The files of an artifact are checked against its manifest."""
    root, repo_id, listing = location.root, location.repo_id, location.listing
    if location.kind == "gguf":
        source = open_with_gguf(root)
    elif location.kind == "artifact":
        source = ArtifactSource(root, repo_id=repo_id, listing=listing)
    else:
        if repo_id is not None and listing is not None and not is_lazy:
            hub_snapshot.download(repo_id, listing.commit)
            listing = None
        source = SafetensorsSource(root, repo_id=repo_id, listing=listing)
    try:
        _check_against_manifest(source)
    except BaseException:
        source.close()
        raise
    return source


def _check_against_manifest(source: Source) -> None:
    """Have an artifact's files, in whichever layout, compared with its manifest."""
    if not is_artifact(source.root):
        return
    listing, names = source.listing, [*source.other_files, *(file.name for file in source.files)]
    sizes = {} if listing is None else {name: listing.sizes[name] for name in names}
    digests = {} if listing is None else listing.digests
    listed = read_manifest(source.root, is_sealed=True)["files"]
    source.guard.hold_to(listed, sizes, digests, is_whole=source.repo_id is None)


def own_target(source: Source) -> GpuTarget | None:
    """The target that an artifact in the kernel layout was made for; None for any other source."""
    if not is_artifact(source.root):
        return None
    manifest = read_manifest(source.root)
    return parse_target(manifest["target"], manifest.get("cuda")) if manifest["layout"] == KERNEL else None
