"""Open a source to convert: a safetensors folder, a Hub repo, GGUF files, or an artifact."""

from __future__ import annotations

import gc
import importlib
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.errors import InputError, RequestError, first_few, plural
from hqconv.io import hub
from hqconv.io.checkpoint_files import holds_safetensors, readable
from hqconv.io.durable_files import size_of
from hqconv.io.hub import Listing
from hqconv.schemas.artifact_names import COMPANIONS, CONFIG, INDEX
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.sources.artifact import ArtifactSource, as_input_error
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from hqconv.models.source_protocol import Source

_LOG = logging.getLogger(__name__)

_NUM_DOWNLOADS = 4  # at a time
# Kind of source → module and function that open it: of rooms that no other room imports.
_OPENERS = {"gguf": ("hqconv.gguf.source", "open_gguf")}

# A repo, one GGUF model of it (a part of the file's name, or the file), and a revision, which may have slashes.
_REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/[\w.-]+)(?::(?P<part>[\w.-]+)|/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[^\s:]+))?",
    re.ASCII,
)
_IN_CACHE = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
ADAPTER = "adapter_config.json"


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


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep cycle collection away from the objects that exist: a walk over those of a plan stops all threads."""
    is_new = not gc.get_freeze_count()  # objects that the caller has frozen stay frozen
    if is_new:
        gc.freeze()
    try:
        yield
    finally:
        if is_new:
            gc.unfreeze()


@dataclass(frozen=True)
class SourceLocation:
    """The folder of a source and its kind: artifact, gguf or safetensors.

    repo_id: of a Hub repo, of which `root` is the snapshot in the cache. listing: the repo's files; None offline.
    chosen: the GGUF file, or a part of its name, that a typed source names.
    """

    root: Path
    kind: str
    repo_id: str | None = None
    listing: Listing | None = None
    chosen: str | None = None


def locate_source(src: str | Path, revision: str | None) -> SourceLocation:
    """Find the folder and kind of a source; of a Hub repo only small files are downloaded. Raises as `open_source`."""
    src, revision, chosen = parse_source_name(str(src), revision)
    root = Path(src)
    if chosen is not None and root.is_dir() and revision is None:
        return SourceLocation(root, "gguf", chosen=chosen)
    if src and not root.exists() and hub.is_repo_id(src):
        root, listing = hub.open_repo(src, revision)
        if chosen is not None or (not is_artifact(root) and _holds_gguf_only(root, listing)):
            return SourceLocation(root, "gguf", src, listing, chosen)
        is_kernel = is_artifact(root) and read_manifest(root).is_kernel
        return SourceLocation(root, "artifact" if is_kernel else "safetensors", src, listing)
    if is_unfinished(root):
        raise RequestError(
            "The source is an unfinished conversion of hqconv, not a checkpoint.",
            where=src,
            remedy="Finish it with --resume, or give the model folder it is made from.",
        )
    if revision is None and is_artifact(root) and read_manifest(root).is_kernel:
        return SourceLocation(root, "artifact")
    if src and revision is None and root.is_dir() and any(root.glob("*.gguf")):
        return SourceLocation(root, "gguf")
    _refuse_common_mistakes(root)
    if not (src and root.is_dir()):  # Path("") is the current folder
        raise hub.no_repo(src)
    if revision is not None:
        raise RequestError(
            "A local folder has no revisions.",
            where=src,
            found=f"revision {revision}",
            remedy="Leave the revision out.",
        )
    return SourceLocation(root, "safetensors")


def parse_source_name(src: str, revision: str | None = None) -> tuple[str, str | None, str | None]:
    """Split a typed source into folder or repo, revision, and the GGUF model in it, each None where it names none.

    A repo is named as `org/name[:MODEL][@REV]` or `org/name/FILE.gguf[@REV]`. An existing path is returned as it is.
    Raises RequestError for two revisions.
    """
    path = Path(src)
    if path.is_file() and path.name.endswith(".gguf"):
        return str(path.parent), revision, path.name
    match = _REPO.fullmatch(src)
    if match is None or path.exists():
        return src, revision, None
    named = match["revision"]
    if named and revision not in (None, named):
        raise RequestError(
            "Two revisions are named.",
            where=src,
            expected=f"revision {revision}",
            found=named,
            remedy="Name one of them.",
        )
    return match["repo"], named or revision, match["part"] or match["file"]


def pinned_name(src: str, revision: str | None, source: Source) -> tuple[str, str | None]:
    """Return name and revision that open the opened source `src` again: of a repo, the same commit and GGUF model."""
    if source.repo_id is None:
        return src, revision
    chosen = parse_source_name(src)[2]
    joint = "/" if chosen and chosen.endswith(".gguf") else ":"
    return f"{source.repo_id}{joint}{chosen}" if chosen else source.repo_id, source.revision


def _holds_gguf_only(root: Path, listing: Listing | None) -> bool:
    """Return True for a repo with GGUF files and without safetensors of a model."""
    names = [path.name for path in root.iterdir()] if listing is None else listing.sizes
    return any(name.endswith(".gguf") for name in names) and not holds_safetensors(names)


def _refuse_common_mistakes(path: Path) -> None:
    """Raise RequestError for a path that users often confuse with a model's folder, and name the right one."""
    if path.is_file():
        raise RequestError(
            "This is a file.",
            where=path,
            expected="a model folder, a GGUF file or a Hub repo id (org/name)",
            remedy=f"Give the folder of the model, such as {path.parent}.",
        )
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        raise RequestError(
            "This is an adapter (LoRA), not a model: it has no experts of its own.",
            where=path,
            found=ADAPTER,
            remedy="Merge it into its base model first (peft: merge_and_unload, save_pretrained), and give that "
            "folder.",
        )
    cached = _IN_CACHE.fullmatch(path.name)
    if cached and (path / "snapshots").is_dir():
        raise RequestError(
            "This is a repo's place in the Hub's cache.",
            where=path,
            remedy=f"Name the repo, {cached['org']}/{cached['name']}, or one of the folders in {path / 'snapshots'}.",
        )


@without_gc()
def open_source(src: str | Path, revision: str | None = None, *, is_lazy: bool = False) -> Source:
    """Open a model folder, a Hub repo (`org/name`), GGUF files or an artifact. Loads no torch.

    GGUF files: a file (of a split one any), a folder with one model, a repo, or one model of a repo
    (`org/name:Q4_K_M`, `org/name/file.gguf`).

    is_lazy: download no weights of a checkpoint on the Hub; `read_into` reads ranges, `fetch` downloads files. The
    weights of an artifact on the Hub are never downloaded here.
    HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the token have their meaning in huggingface_hub.
    A context manager that closes the source. Raises RequestError for an unknown folder, repo or revision, or one
    without access; InputError for broken, missing or contradictory files and damaged artifacts; NetworkError where
    the Hub fails.
    """
    with readable(src), as_input_error():
        return open_location(locate_source(src, revision), is_lazy=is_lazy)


def open_location(location: SourceLocation, *, is_lazy: bool) -> Source:
    """Open a located source, as `open_source` does. The files of an artifact are checked against its manifest."""
    root = location.root
    repo_id = location.repo_id
    listing = location.listing
    if location.kind in _OPENERS:
        module, function = _OPENERS[location.kind]
        opener = getattr(importlib.import_module(module), function)
        source: Source = opener(root, location.chosen, repo_id=repo_id, listing=listing)
    elif location.kind == "artifact":
        source = ArtifactSource(root, repo_id=repo_id, listing=listing)
    else:
        source = SafetensorsSource(root, repo_id=repo_id, listing=listing)
    try:
        if listing is not None and not is_lazy and location.kind != "artifact":
            names = (*(file.name for file in source.files), *source.sidecar_files.names)
            with ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
                list(pool.map(lambda name: source.fetch([name]), names))
        _check_against_manifest(source)
    except BaseException:
        source.close()
        raise
    where = str(root) if repo_id is None else f"{repo_id} at commit {source.revision}"
    _LOG.info("Opened the source %s: %s.", where, plural(len(source.files), "file"))
    return source


def _check_against_manifest(source: Source) -> None:
    """Compare an artifact's files, in either layout, with its manifest; note the layers whose columns were sorted.

    Files of weights and sidecar files are hashed later: each when what was made of it is published.
    """
    if not is_artifact(source.root):
        return
    manifest = read_manifest(source.root, is_sealed=True)
    snapshot = source.guard
    listing = source.listing
    snapshot.is_hashing = True
    snapshot.listed = {
        name: file.sha256 for name, file in manifest.files.items() if name not in COMPANIONS
    }
    wrong = {
        *source.sidecar_files.names,
        *(file.name for file in source.files),
    } - manifest.files.keys()
    if listing is None:
        missing = manifest.missing_files(lambda name: size_of(source.root / name))
    else:
        missing = manifest.missing_files(listing.sizes.get)
        found = listing.digests
        wrong.update(
            name for name, sha256 in snapshot.listed.items() if found.get(name, sha256) != sha256
        )
    wrong.update(snapshot.listed.keys() & missing)
    if wrong:
        raise InputError(
            "A file of the artifact is not what its manifest lists.",
            where=source.root / min(wrong),
            expected="every file of the manifest, with its size and digest, and no other that is read",
            found=first_few(sorted(wrong)),
            remedy="Take other files away; if they are the artifact's, copy it again, or convert the model again.",
        )
    for name in (CONFIG, INDEX):
        if snapshot.has_seen(name):
            snapshot.hash(name)
    source.sorted_layers = frozenset(
        name for name, layer in manifest.blocks.items() if layer.intermediate_order
    )


def own_target(source: Source) -> GpuTarget | None:
    """Return the target that an artifact in the kernel layout was made for; None for any other source."""
    if not is_artifact(source.root):
        return None
    manifest = read_manifest(source.root, is_sealed=True)
    return manifest.layer_spec.target if manifest.is_kernel else None
