"""A delta for a server that runs: comparison with the served artifact, and where its bytes belong. No torch.

The served artifact stays the base: its files and the delta together are the new artifact.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hqconv.artifact.delta_manifest import PAYLOADS, DeltaFile, bad_delta, is_delta, read_delta
from hqconv.errors import RequestError, VerificationError
from hqconv.schemas import artifact_names as names
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import ArtifactView, open_artifact_view
from hqconv.serving.other_artifact import check_config, check_views, is_shard
from hqconv.serving.rank_file import RankFile, check_sha256

__all__ = ["DeltaOnBase", "Patch", "bytes_of", "check_base", "check_delta", "is_delta", "overlaps"]
_APPLY = "Run `hqconv apply BASE DELTA -o NEW`, and load NEW. This server has its weights of before."


@dataclass(frozen=True)
class Patch:
    """New bytes for one rank file. ranges: [begin, end] in that file; `path` holds their bytes one after the other."""

    path: Path
    name: str
    ranges: Sequence[Sequence[int]]


@dataclass(frozen=True)
class DeltaOnBase:
    """A delta that was checked. base, result: SHA-256 of the manifests. patches: rank file → its changed bytes."""

    base: str
    result: str
    patches: dict[str, Patch]


def check_delta(
    served: ArtifactView, served_sha256: str, root: Path, held: Iterable[RankFile], *, digests: bool
) -> DeltaOnBase:
    """Check that a delta can be written over the served artifact's weights, and is whole for the rank files `held`.

    served_sha256: of the manifest of what is served, which is the result of the last delta if there was one.

    Raises RequestError for a delta of another base, or one that changes more than the values of experts,
    VerificationError if it is damaged.
    """
    manifest = read_delta(root)
    if manifest.base != served_sha256:
        raise RequestError(
            "The delta was made for another base.",
            where=str(root),
            expected=f"sha256 {manifest.base}",
            found=f"{served_sha256}, which is served",
            remedy="Load the artifact that was the OLD of `hqconv diff` first, then its deltas one after the other.",
        )
    view = open_artifact_view(ArtifactLocation(str(root / PAYLOADS)))
    if view.manifest_sha256 != manifest.result:
        raise bad_delta(root / PAYLOADS / names.MANIFEST, f"sha256 {manifest.result}", view.manifest_sha256)
    check_views(served, view)
    check_config(served, view)
    _check_other_layers(root, served, view)
    patches = {}
    for file in held:
        entry = manifest.files[file.name]
        if entry.payload is not None or entry.base != file.name:
            patches[file.name] = _patch(root, file, entry, digests=digests)
    return DeltaOnBase(manifest.base, manifest.result, patches)


def _check_other_layers(root: Path, served: ArtifactView, view: ArtifactView) -> None:
    before, after = ({path: entry[1] for path, entry in one.others.items() if is_shard(path)} for one in (served, view))
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            raise _more_than_values(root / PAYLOADS / path, f"sha256 {before.get(path)}", after.get(path))


def _patch(root: Path, file: RankFile, entry: DeltaFile, *, digests: bool) -> Patch:
    first = min(ref.offset_bytes for ref in file.tensors.values())
    ranges, path, name = entry.ranges or [], root / PAYLOADS / file.name, f"{PAYLOADS}/{file.name}"
    if entry.base != file.name or entry.payload is None or (ranges and ranges[0][0] < first):
        raise _more_than_values(path, "the served file's header", "another header, or another file")
    if not path.is_file() or path.stat().st_size != entry.payload.size_bytes:
        raise bad_delta(path, f"{entry.payload.size_bytes} bytes", path.stat().st_size if path.is_file() else None)
    if digests:
        check_sha256(path, name, entry.payload.sha256)
    return Patch(path, name, ranges)


def _more_than_values(where: Path, expected: str, found: object) -> RequestError:
    return RequestError(
        "The delta changes more than the values of experts, which only a whole artifact can.",
        where=str(where),
        expected=expected,
        found=found,
        remedy=_APPLY,
    )


def check_base(served: ArtifactView) -> None:
    """Check that the base is still there: after a failure its bytes are needed again. Raises RequestError if not."""
    found = open_artifact_view(served.location)
    if found.manifest_sha256 != served.manifest_sha256:
        raise RequestError(
            "The base of the delta is another artifact meanwhile.",
            where=served.location.name,
            expected=f"sha256 {served.manifest_sha256}",
            found=found.manifest_sha256,
            remedy=_APPLY,
        )


def bytes_of(file: RankFile, patches: Iterable[Patch], begin: int, num_bytes: int) -> bytes:
    """Read bytes of a rank file on which patches lie, the last one above. Raises VerificationError."""
    try:
        data = bytearray(_read(file.path, begin, num_bytes))
        for patch in patches:
            for first, offset, size in overlaps(patch, begin, begin + num_bytes):
                data[first - begin : first - begin + size] = _read(patch.path, offset, size)
    except OSError as error:
        what = "A file of the served artifact, or of its deltas, cannot be read."
        raise VerificationError(what, where=file.name, found=error.strerror or str(error), remedy=_APPLY) from error
    return bytes(data)


def overlaps(patch: Patch, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (byte in the rank file, byte in the patch, number of bytes) of a patch's bytes between two positions."""
    position = 0
    for first, last in patch.ranges:
        lower, upper = max(first, begin), min(last, end)
        if lower < upper:
            yield lower, position + lower - first, upper - lower
        position += last - first


def _read(path: Path, begin: int, num_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, num_bytes, begin)
    finally:
        os.close(descriptor)
