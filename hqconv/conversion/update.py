"""Recognition of a finished artifact that the same request would make of the same source again, for `--update`.

A conversion records the state of its source's files (sizes, times, inodes) in an extended attribute of the manifest's
file. The attribute is no part of the artifact: a copy does not have it. It may be missing, too, where the file system
has no attributes; then the recorded digests of the source decide.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from hqconv.artifact.build import artifact_config, first_difference
from hqconv.artifact.manifest import Manifest, json_bytes, read_manifest
from hqconv.artifact.model_card import card_bytes
from hqconv.io.durable_files import size_of
from hqconv.io.file_access import sha256_of
from hqconv.models.source_protocol import NOT_MADE, Source
from hqconv.planning.plan import ConversionPlan
from hqconv.schemas.artifact_names import CARD, CONFIG, INDEX, MANIFEST, SUMS

_ATTRIBUTE = "user.hqconv.source"


def record_source(out: Path, source: Source) -> None:
    """Record the state of the source's files at a finished artifact. Nothing is recorded where that is impossible."""
    if is_of_state(out, source):
        return  # the manifest's times are those of a source, too
    with suppress(OSError):
        os.setxattr(out / MANIFEST, _ATTRIBUTE, _state_digest(source).encode())


def is_of_state(out: Path, source: Source) -> bool | None:
    """Return whether the source's files have the state that an artifact was made of; None where none is recorded."""
    try:
        return os.getxattr(out / MANIFEST, _ATTRIBUTE) == _state_digest(source).encode()
    except OSError:
        return None


def _state_digest(source: Source) -> str:
    """Return a digest of the names, sizes, times and inodes of all files that the source was read from."""
    names = [CONFIG, INDEX, *(file.name for file in source.files), *source.other_files]
    return hashlib.sha256(json.dumps(source.guard.states(names)).encode()).hexdigest()


def why_not_current(
    source: Source, plan: ConversionPlan, out: Path | None, manifest: Manifest
) -> str:
    """Return why the artifact at `out` is to be made anew; "" if this request and source would give it again.

    out: None for a complete artifact elsewhere, of which only the manifest is here.
    """
    difference = first_difference(source, plan, manifest)
    if difference is not None:
        key, expected, found = difference
        return f"{key} differs: {expected} is now {found}"
    failed = any(text.startswith(NOT_MADE) for text in manifest.warnings or ())
    planned = {*plan.paths} - {SUMS, MANIFEST, *(plan.made_files if failed else ())}
    if planned != manifest.files.keys():
        return "the source has other files beside its weights"
    if out is not None and (missing := manifest.missing_files(lambda name: size_of(out / name))):
        return f"{missing[0]} is missing or has another size"
    if manifest.alteration is not None:
        return "the manifest was altered"
    return _why_not_same_source(source, plan, out, manifest)


def _why_not_same_source(
    source: Source, plan: ConversionPlan, out: Path | None, manifest: Manifest
) -> str:
    """Return why the source's bytes are not known to be those of the conversion; names and headers are the same."""
    if source.repo_id is not None:  # the commit is the same
        return ""
    if source.guard.is_held:  # the source is an artifact, whose manifest has all digests
        ancestor = manifest.ancestors[0].manifest_sha256 if manifest.ancestors else ""
        return (
            ""
            if ancestor == read_manifest(source.root).sha256
            else "the source is another artifact"
        )
    if out is not None and is_of_state(out, source):
        return ""
    files = {file.name: file.sha256 for file in manifest.source.files}
    if not all(files.values()):
        return "the source's files have other times, or none are recorded, and the artifact has no digests of them"
    expected = files | {name: manifest.files[name].sha256 for name in plan.other_files}
    changed = next(
        (name for name, sha256 in expected.items() if sha256_of(source.root / name) != sha256), None
    )
    if changed is not None:
        return f"{changed} of the source has other bytes"
    config = hashlib.sha256(json_bytes(artifact_config(source, plan))).hexdigest()
    if config != manifest.files[CONFIG].sha256:
        return f"{CONFIG} of the source has other bytes"
    card = hashlib.sha256(card_bytes(manifest, source.loose.card, is_artifact=False)).hexdigest()
    if CARD in manifest.files and card != manifest.files[CARD].sha256:
        return f"{CARD} of the source has other bytes"
    return ""
