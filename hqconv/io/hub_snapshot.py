"""What of a Hub repo is on this machine: its words alone, all that is needed, or what the cache has of it."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hqconv.errors import InputError, NetworkError, RequestError, first_few
from hqconv.io import checkpoint_files, hub
from hqconv.io.sidecar_files import WEIGHT_FOLDERS, WEIGHT_SUFFIXES
from hqconv.schemas.artifact_names import CARD, CONFIG, INDEX, MANIFEST, SINGLE
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES

# All that is needed besides headers to look at a repo.
WORDS = (CONFIG, *checkpoint_files.QUANTIZATION_FILES, INDEX, MANIFEST, CARD)


def is_repo_id(src: str) -> bool:
    """Whether it can be a repo's name, and is no path of this machine."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", src, re.ASCII) is not None and not Path(src).exists()


def look(repo_id: str, revision: str | None) -> tuple[Path, hub.Listing | None]:
    """The snapshot's folder with the repo's words in it, and what the repo holds; nothing else is downloaded.

    Offline, and where the Hub fails but all weights are in the cache, there is no listing: the folder is all there is.
    Raises RequestError, InputError or NetworkError as the Hub says, InputError where there is no config.
    """
    if hub.is_offline():
        return download(repo_id, revision), None
    try:
        listing = hub.Listing.of(repo_id, revision)
    except NetworkError:
        cached = hub.cached(repo_id, revision)
        if cached is None or not is_complete(cached):
            raise
        return cached, None
    wanted = [name for name in WORDS if name in listing.sizes]
    if CONFIG not in wanted:
        what, remedy = f"The Hub repo has no {CONFIG}.", "Give the repo of a transformers model."
        found = first_few(sorted(listing.sizes)) or "no files"
        raise InputError(what, where=f"{repo_id}, revision {listing.commit}", found=found, remedy=remedy)
    root = hub.fetch(repo_id, listing.commit, allow_patterns=_patterns(wanted))
    lacking = next((name for name in wanted if not (root / name).is_file()), None)
    if lacking is not None:
        what, remedy = "The Hub did not send a file that it has.", "Try again."
        raise NetworkError(what, where=f"{repo_id}/{lacking}", remedy=remedy)
    return root, listing


def download(repo_id: str, revision: str | None) -> Path:
    """Brings what is needed into the Hub cache, in two steps: all but weights, then the weights by name."""
    other_weights = [suffix for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors"]
    ignored = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES] + [
        f"*{suffix}.index.json" for suffix in other_weights
    ]
    ignored += [f"{folder}/*" for folder in WEIGHT_FOLDERS] + [".*", "*/.*"]
    root = hub.fetch(repo_id, revision, ignore_patterns=ignored)
    # Asked for along with the shards, as only the download tells whether it exists.
    names = {SINGLE, *_shards(root)}
    # By commit, as the branch may move between the steps.
    hub.fetch(repo_id, root.name, allow_patterns=_patterns(names))
    return root


def is_complete(root: Path) -> bool:
    """Whether a snapshot's folder has all weights that it speaks of, and of an artifact all files."""
    names = {CONFIG, *(set(_shards(root)) or {SINGLE})}
    if (root / MANIFEST).is_file():
        listed = checkpoint_files.read_json(root / MANIFEST, max_bytes=MAX_LIST_BYTES)[0].get("files")
        names = set(listed) if isinstance(listed, dict) else names
    return all((root / name).is_file() for name in names)


def no_repo(src: str) -> RequestError:
    """The error for what is neither a folder nor a repo's name."""
    expected = "a model folder or a Hub repo id (org/name)"
    found = "a file" if Path(src).exists() else "no such path"
    return RequestError("The checkpoint cannot be opened.", where=src, expected=expected, found=found)


def _shards(root: Path) -> Iterator[str]:
    """The shards that the index names, if there is one that names any."""
    if (root / INDEX).is_file():
        weight_map = checkpoint_files.read_json(root / INDEX, max_bytes=MAX_LIST_BYTES)[0].get("weight_map")
        yield from filter(
            checkpoint_files.is_plain_name, weight_map.values() if isinstance(weight_map, dict) else ()
        )


def _patterns(names: Iterable[str]) -> list[str]:
    """Names as patterns that match nothing else."""
    return [glob.escape(name) for name in sorted(names)]
