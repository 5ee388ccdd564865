"""Open a source to convert: a safetensors folder, a Hub repo, GGUF files, or an artifact."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.errors import RequestError, plural
from hqconv.io import hub
from hqconv.io.checkpoint_files import readable
from hqconv.io.gguf_header import holds_gguf
from hqconv.io.hub import Listing
from hqconv.schemas.artifact_names import INDEX, SINGLE
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.sources.artifact import ArtifactSource, as_input_error
from hqconv.sources.gguf import open_with_gguf
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from hqconv.models.source_protocol import Source

_LOG = logging.getLogger(__name__)

_NUM_DOWNLOADS = 4  # at a time

_SCHEMES = re.compile(
    r"(?:hf://(?:models/)?|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<rest>.*)", re.IGNORECASE
)
_REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/[\w.-]+?)(?:@(?P<at>[^\s?#]+)|/(?:tree|blob|resolve)/(?P<tree>[^/\s?#]+)(?P<file>/[^?#]*)?)?/?",
    re.ASCII,
)
# One GGUF model of a repo: `org/name:Q4_K_M`, `org/name/file.gguf`, or the file's URL.
_IN_REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/[\w.-]+?)"
    r"(?::(?P<word>[\w.-]+)|/(?:blob|resolve)/(?P<tree>[^/\s?#]+)/(?P<path>[^?#]+\.gguf)(?:\?[^#]*)?|/(?P<file>[^@:?#]+\.gguf))"
    r"(?:@(?P<at>[^\s?#]+))?",
    re.ASCII,
)
_IN_CACHE = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json")
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


def locate_source(src: str | Path, revision: str | None = None) -> SourceLocation:
    """Find the folder and kind of a source; of a Hub repo only small files are downloaded. Raises as `open_source`."""
    src, revision, chosen = _split_gguf_name(str(src), revision)
    src, revision = parse_source_name(src, revision)
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
    if src and revision is None and holds_gguf(root):
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


def parse_source_name(src: str, revision: str | None = None) -> tuple[str, str | None]:
    """Split a typed source into folder or repo and revision: `org/name@rev`, `hf://org/name`, or a URL of the Hub.

    An existing path is returned as it is. Raises RequestError for the URL of one file, and for two revisions.
    """
    if not src or Path(src).exists():
        return src, revision
    link = _SCHEMES.fullmatch(src)
    match = _REPO.fullmatch(link["rest"] if link else src)
    if match is None or (link is None and match["tree"]):
        return src, revision
    if match["file"] and match["file"] != "/":
        raise RequestError(
            "This is the address of one file.",
            where=src,
            expected="a model folder or a Hub repo",
            remedy=f"Name the repo: {match['repo']}.",
        )
    given = match["at"] or match["tree"]
    if given and revision not in (None, given):
        raise RequestError(
            "Two revisions are named.",
            where=src,
            expected=f"revision {revision}",
            found=given,
            remedy="Name one of them.",
        )
    return match["repo"], given or revision


def _split_gguf_name(src: str, revision: str | None) -> tuple[str, str | None, str | None]:
    """Split a typed source into folder or repo, revision, and the GGUF model in it, None for a source without one."""
    path = Path(src)
    if path.is_file() and path.name.endswith(".gguf"):
        return str(path.parent), revision, path.name
    link = _SCHEMES.fullmatch(src)
    match = None if path.exists() else _IN_REPO.fullmatch(link["rest"] if link else src)
    if match is None or (link is None and match["tree"]):
        return src, revision, None
    given = match["at"] or match["tree"]
    if given and revision not in (None, given):
        raise RequestError(
            "Two revisions are named.",
            where=src,
            expected=f"revision {revision}",
            found=given,
            remedy="Name one of them.",
        )
    return match["repo"], given or revision, match["word"] or match["path"] or match["file"]


def _holds_gguf_only(root: Path, listing: Listing | None) -> bool:
    """Return True for a repo with GGUF files and without safetensors of a model."""
    if listing is None:
        return holds_gguf(root) and not any((root / name).is_file() for name in (SINGLE, INDEX))
    names = listing.sizes
    return any(name.endswith(".gguf") for name in names) and SINGLE not in names and INDEX not in names


def _refuse_common_mistakes(path: Path) -> None:
    """Raise RequestError for a path that users often confuse with a model's folder, and name the right one."""
    if path.is_file():
        is_known = path.name.lower().endswith(_FILES)
        remedy = f"Give the folder that it lies in: {path.parent}." if is_known else ""
        expected = "a model folder or a Hub repo id (org/name)"
        raise RequestError("This is a file.", where=str(path), expected=expected, remedy=remedy)
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        what = "This is an adapter (LoRA), not a model: it has no experts of its own."
        remedy = "Merge it into its base model first (peft: merge_and_unload, save_pretrained), and give that folder."
        raise RequestError(what, where=str(path), found=ADAPTER, remedy=remedy)
    cached = _IN_CACHE.fullmatch(path.name)
    if cached and (path / "snapshots").is_dir():
        remedy = f"Name the repo, {cached['org']}/{cached['name']}, or one of the folders in {path / 'snapshots'}."
        raise RequestError("This is a repo's place in the Hub's cache.", where=str(path), remedy=remedy)


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


def open_location(location: SourceLocation, *, is_lazy: bool = False) -> Source:
    """Open a located source, as `open_source` does. The files of an artifact are checked against its manifest."""
    root, repo_id, listing = location.root, location.repo_id, location.listing
    if location.kind == "gguf":
        source: Source = open_with_gguf(root, location.chosen, repo_id=repo_id, listing=listing)
    elif location.kind == "artifact":
        source = ArtifactSource(root, repo_id=repo_id, listing=listing)
    else:
        source = SafetensorsSource(root, repo_id=repo_id, listing=listing)
    try:
        if listing is not None and not is_lazy and location.kind != "artifact":
            names = (*(file.name for file in source.files), *source.other_files)
            with ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
                list(pool.map(lambda name: source.fetch([name]), names))
        _check_against_manifest(source)
    except BaseException:
        source.close()
        raise
    where = str(root) if repo_id is None else f"{repo_id} at commit {source.revision}"
    _LOG.info("Opened the source %s: %s, %d bytes.", where, plural(len(source.files), "file"), source.total_bytes)
    return source


def _check_against_manifest(source: Source) -> None:
    """Compare an artifact's files, in either layout, with its manifest; note the layers whose columns were sorted."""
    if not is_artifact(source.root):
        return
    listing, names = source.listing, [*source.other_files, *(file.name for file in source.files)]
    sizes = {} if listing is None else {name: listing.sizes[name] for name in names}
    digests = {} if listing is None else listing.digests
    manifest = read_manifest(source.root, is_sealed=True)
    source.sorted_layers = frozenset(name for name, layer in manifest.blocks.items() if layer.intermediate_order)
    source.guard.hold_to(manifest.files, sizes, digests, is_whole=source.repo_id is None)


def own_target(source: Source) -> GpuTarget | None:
    """Return the target that an artifact in the kernel layout was made for; None for any other source."""
    if not is_artifact(source.root):
        return None
    manifest = read_manifest(source.root, is_sealed=True)
    return manifest.kernel_spec.target if manifest.is_kernel else None
