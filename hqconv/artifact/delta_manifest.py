"""Read the description of a delta: the bytes in which one artifact differs from another of the same plan.

`hqconv diff` writes it; `hqconv apply` and servers read it. It comes from others: names and ranges are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hqconv.artifact.manifest import Entry, FileEntry, digest_of, is_path_inside
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.schemas.artifact_names import DELTA, MANIFEST
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, parse_json, read_regular

DELTA_VERSION = 1
PAYLOADS = "files"  # folder of the bytes
_AGAIN = "Copy the delta again from where it is whole, or make it again with `hqconv diff`."


@dataclass(frozen=True, kw_only=True)
class DeltaFile(Entry):
    """A file of the result. base: the base's file that it is made from; None for a file that the delta has whole.

    ranges: [begin, end] of the bytes that come from the delta, in order. payload: the delta's file with these bytes.
    """

    size_bytes: int
    sha256: str
    base: str | None = None
    ranges: list[list[int]] | None = None
    payload: FileEntry | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaManifest(Entry):
    """The description of a delta. base, result: SHA-256 of both artifacts' hqconv.json. files: all of the result."""

    kind: str
    format_version: int
    hqconv_version: str
    base: str
    result: str
    files: dict[str, DeltaFile]
    digest: str | None = None


def is_delta(root: Path) -> bool:
    """Return whether a folder holds a finished delta."""
    return (root / DELTA).is_file()


def read_delta(root: Path) -> DeltaManifest:
    """Read and check the manifest of a delta. Raises RequestError if there is none, VerificationError if damaged."""
    path = root / DELTA
    if not is_delta(root):
        raise RequestError(
            "This is not a delta.",
            where=str(root),
            expected=f"a folder with {DELTA}",
            remedy="Name the folder that `hqconv diff` wrote; an unfinished one is made again by the same command.",
        )
    try:
        raw = read_regular(path, MAX_LIST_BYTES)
        manifest = DeltaManifest.from_dict(parse_json(raw), DELTA)
    except (OSError, ValueError) as error:
        raise bad_delta(path, "a JSON document", error) from error
    except HqconvError as error:
        raise bad_delta(f"{root}/{error.where}", error.expected, error.found) from error
    if manifest.kind != "delta" or manifest.format_version != DELTA_VERSION:
        what, found = "The delta was made by another version of hqconv.", f"{manifest.kind} {manifest.format_version}"
        raise RequestError(what, where=str(path), expected=DELTA_VERSION, found=found, remedy="Upgrade hqconv.")
    if manifest.digest is None or manifest.digest != digest_of(raw):
        raise bad_delta(path, f"the digest {manifest.digest}", digest_of(raw))
    for name, file in manifest.files.items():
        _check_file(path, name, file)
    if manifest.files.get(MANIFEST, DeltaFile(size_bytes=0, sha256="")).sha256 != manifest.result:
        raise bad_delta(path, f"{MANIFEST} with the digest of the result", "another")
    return manifest


def _check_file(path: Path, name: str, file: DeltaFile) -> None:
    """Check names and ranges: they come from a file of others."""
    where, position, num_bytes = f"{path}: {name}", 0, 0
    for one in (name, file.base or name):
        if not is_path_inside(one):
            raise bad_delta(where, "a path inside the artifact", repr(one)[:80])
    for span in file.ranges or ():
        if len(span) != 2 or not position <= span[0] < span[1] <= file.size_bytes:
            raise bad_delta(where, "ranges in order, inside the file", str(span)[:80])
        position, num_bytes = span[1], num_bytes + span[1] - span[0]
    is_covered = file.base is not None or num_bytes == file.size_bytes
    if not is_covered or num_bytes != (0 if file.payload is None else file.payload.size_bytes):
        raise bad_delta(where, "ranges that fit the bytes of the file", num_bytes)


def bad_delta(where: object, expected: str, found: object) -> VerificationError:
    """Error for a delta whose bytes are not those that `diff` wrote."""
    return VerificationError("The delta is damaged.", where=str(where), expected=expected, found=found, remedy=_AGAIN)
