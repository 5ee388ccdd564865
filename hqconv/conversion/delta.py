"""Deltas: the bytes in which one artifact differs from another of the same plan, and the way back to that artifact.

A delta is a folder: `hqconv-delta.json`, written last, and below `files/` one file for each changed file of the result,
with the bytes of its changed ranges one after the other. Both folders are built beside their place and renamed when
complete. The same command continues a killed run: finished files are kept if they have their digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv import __version__
from hqconv.artifact.delta_manifest import DELTA_VERSION, PAYLOADS, DeltaFile, DeltaManifest, bad_delta, read_delta
from hqconv.artifact.manifest import FileEntry, Manifest, read_manifest, sealed
from hqconv.errors import HqconvError, InputError, OutputError, RequestError, VerificationError, first_few
from hqconv.io.durable_files import (
    FileRecord,
    check_space,
    make_folder,
    output_errors,
    partial,
    size_of,
    sync_above,
    sync_folders,
)
from hqconv.io.file_access import sha256_of
from hqconv.io.safetensors_header import LENGTH_BYTES, read_header
from hqconv.schemas.artifact_names import CARD, DELTA, EXPERTS_FOLDER, MANIFEST, PARTIAL, SUMS
from hqconv.schemas.untrusted_files import open_regular

_BLOCK_BYTES = 1 << 20  # of a tensor outside of the experts: the smallest range that is compared by itself
_CHUNK_BYTES = 4 << 20
_OWN = (MANIFEST, SUMS, CARD)  # files that no manifest lists, or that people edit: always whole
_CONTINUE = "Free the space or mend the folder, then run the same command again: it goes on."


# --- the delta of two artifacts -----------------------------------------------------------------------------


def diff(old: Path, new: Path, out: Path, *, num_threads: int = 1) -> dict[str, Any]:
    """Write the delta from `old` to `new` to the folder `out`; return a document about it.

    Files with equal digests in both manifests are not read. Others are compared: rank files tensor by tensor and expert
    by expert, other tensors in blocks of a MiB; other files are taken whole.

    Raises RequestError for artifacts of different plans, VerificationError for a damaged artifact, OutputError if `out`
    exists or cannot be written.
    """
    before, after = (read_manifest(root, is_sealed=True) for root in (old, new))
    _check_plans(old, new, before, after)
    listed = _all_files(new, after)
    by_digest = {entry.sha256: path for path, entry in before.files.items() if path not in _OWN}
    changed = [path for path, entry in listed.items() if path in _OWN or entry.sha256 not in by_digest]
    names = {DELTA, *(f"{PAYLOADS}/{path}" for path in changed)}
    with _building(out, names, "diff") as side:
        check_space(side, 0)

        def compare(path: str) -> DeltaFile:
            base = path if path in before.files and path not in _OWN else None
            return _compared(side, _Side(old, before.files), _Side(new, listed), path, base)

        files: dict[str, DeltaFile] = {}
        with ThreadPoolExecutor(num_threads) as pool:
            files |= zip(changed, pool.map(compare, changed), strict=True)
        for path in listed.keys() - files.keys():
            entry = listed[path]
            same = before.files.get(path)
            base = path if same is not None and same.sha256 == entry.sha256 else by_digest[entry.sha256]
            files[path] = DeltaFile(size_bytes=entry.size_bytes, sha256=entry.sha256, base=base)
        manifest = DeltaManifest(
            kind="delta",
            format_version=DELTA_VERSION,
            hqconv_version=__version__,
            base=before.sha256,
            result=after.sha256,
            files={path: files[path] for path in sorted(files)},
        )
        _write(side, DELTA, [sealed(manifest.to_dict())])
    return _described(out, manifest)


def _check_plans(old: Path, new: Path, before: Manifest, after: Manifest) -> None:
    keys = ("layout", "weight_schema", "activation_schema", "dtype", "target", "cuda", "left_blocks")
    ranks = ("tp", "tp_split", "ep", "expert_placement", "redundant_experts")
    facts = {key: (getattr(before, key), getattr(after, key)) for key in (*keys, *ranks)}
    facts["blocks"] = (sorted(before.blocks), sorted(after.blocks))
    for key, (expected, found) in facts.items():
        if expected != found:
            raise RequestError(
                "The artifacts are not of the same plan.",
                where=f"{old}, {new}: {key}",
                expected=expected,
                found=found,
                remedy="Convert both with the same options; else publish the new artifact whole.",
            )


def _all_files(root: Path, manifest: Manifest) -> dict[str, FileEntry]:
    """Return all files of an artifact; those that its manifest does not decide are hashed."""
    files = dict(manifest.files)
    for name in _OWN:
        size_bytes = size_of(root / name)
        if size_bytes is not None:
            files[name] = FileEntry(size_bytes=size_bytes, sha256=sha256_of(root / name))
    return files


@dataclass(frozen=True)
class _Side:
    """One of two artifacts that are compared: its folder, and its files by the manifest."""

    root: Path
    files: Mapping[str, FileEntry]

    def check(self, path: str, digest: str) -> None:
        if digest != self.files[path].sha256:
            expected = f"sha256 {self.files[path].sha256}"
            raise _damaged(self.root / path, expected, digest)


def _compared(side: Path, old: _Side, new: _Side, path: str, base: str | None) -> DeltaFile:
    """Write the changed ranges of one file; a file without a base, or of another size or header, is one range."""
    size_bytes, sha256 = new.files[path].size_bytes, new.files[path].sha256
    if size_of(new.root / path) != size_bytes:
        raise _damaged(new.root / path, f"{size_bytes} bytes", size_of(new.root / path))
    is_ranked = path.startswith(f"{EXPERTS_FOLDER}/")
    blocks = [] if base is None else _blocks(old.root / path, new.root / path, is_ranked=is_ranked)
    base = base if blocks else None
    ranges: list[list[int]] = []
    digests = [hashlib.sha256(), hashlib.sha256()]

    def chunks() -> Iterator[bytes]:
        with ExitStack() as stack:
            pair = [stack.enter_context(_reading(one.root / path)) for one in (old, new) if one is new or base]
            for begin, end in blocks or [(0, size_bytes)]:
                for piece in _changed(pair, begin, end, digests):
                    _add(ranges, *piece[0])
                    yield piece[1]
        new.check(path, digests[-1].hexdigest())
        if base:
            old.check(path, digests[0].hexdigest())

    record = _write(side, f"{PAYLOADS}/{path}", chunks())
    payload = FileEntry(size_bytes=record.size_bytes, sha256=record.sha256)
    return DeltaFile(size_bytes=size_bytes, sha256=sha256, base=base, ranges=ranges, payload=payload)


def _changed(pair: list[int], begin: int, end: int, digests: list[Any]) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Hash a block of both files, and yield the new bytes of those pieces of it that differ; one file: all of them.

    An expert's block is one piece unless it is larger than _CHUNK_BYTES.
    """
    while begin < end:
        length = min(end - begin, _CHUNK_BYTES)
        data = [os.pread(descriptor, length, begin) for descriptor in pair]
        for digest, one in zip(digests[-len(data) :], data, strict=True):
            digest.update(one)
        if len(data) == 1 or data[0] != data[1]:
            yield (begin, begin + len(data[-1])), data[-1]
        if len(data[-1]) != length:
            return  # the digest will tell
        begin += length


def _add(ranges: list[list[int]], begin: int, end: int) -> None:
    if ranges and ranges[-1][1] == begin:
        ranges[-1][1] = end
    else:
        ranges.append([begin, end])


def _blocks(old: Path, new: Path, *, is_ranked: bool) -> list[tuple[int, int]]:
    """Blocks of a file that are compared by themselves, in order; none if the two files have different headers."""
    if new.suffix != ".safetensors":
        return []
    try:
        (tensors, _, _), (others, _, _) = read_header(new), read_header(old)
    except (InputError, OSError) as error:
        raise _damaged(new, "readable safetensors files", error) from error
    if tensors != others:
        return []
    data = min((ref.offset_bytes for ref in tensors.values()), default=LENGTH_BYTES)
    blocks, end = [(0, data)], data
    for ref in sorted(tensors.values(), key=lambda ref: ref.offset_bytes):
        if not ref.num_bytes:
            continue
        step = ref.num_bytes // ref.shape[0] if is_ranked and ref.shape else _BLOCK_BYTES
        end = ref.offset_bytes + ref.num_bytes
        blocks += [(begin, min(begin + step, end)) for begin in range(ref.offset_bytes, end, max(step, 1))]
    return blocks if end == size_of(new) == size_of(old) else []


def _described(out: Path, manifest: DeltaManifest) -> dict[str, Any]:
    changed = [file for file in manifest.files.values() if file.payload is not None]
    return {
        "kind": "delta",
        "delta": str(out),
        "base_manifest_sha256": manifest.base,
        "manifest_sha256": manifest.result,
        "num_files": len(manifest.files),
        "num_changed_files": len(changed),
        "num_ranges": sum(len(file.ranges or ()) for file in changed),
        "num_bytes": sum(file.payload.size_bytes for file in changed if file.payload is not None),
        "num_bytes_of_artifact": sum(file.size_bytes for file in manifest.files.values()),
    }


# --- base and delta to the new artifact ---------------------------------------------------------------------


def apply_delta(base: Path, delta: Path, out: Path, *, num_threads: int = 1) -> dict[str, Any]:
    """Write the artifact that a delta makes of its base to the folder `out`; return a document about it.

    Every file is compared with its SHA-256 while it is written, so that the result has the bytes of the artifact that
    the delta was made from. If `out` holds that artifact already, nothing is done.

    Raises RequestError for another base, before anything is written; VerificationError for a damaged base or delta,
    OutputError if `out` exists or cannot be written.
    """
    manifest = read_delta(delta)
    words = {"kind": "applied", "out": str(out), "manifest_sha256": manifest.result, "num_files": len(manifest.files)}
    words["num_bytes"] = sum(file.size_bytes for file in manifest.files.values())
    if size_of(out / MANIFEST) is not None and sha256_of(out / MANIFEST) == manifest.result:
        return {**words, "was_finished": True}
    found = read_manifest(base, is_sealed=True)
    if found.sha256 != manifest.base:
        raise RequestError(
            "The delta was made for another base.",
            where=str(base / MANIFEST),
            expected=f"sha256 {manifest.base}",
            found=found.sha256,
            remedy="Name the artifact that was the OLD of `hqconv diff`.",
        )
    _check_parts(base, found, delta, manifest)
    with _building(out, set(manifest.files), "apply") as side:
        left = [path for path in manifest.files if not _is_whole(side / path, manifest.files[path])]
        check_space(side, sum(manifest.files[path].size_bytes for path in left))
        with ThreadPoolExecutor(num_threads) as pool:
            others = [path for path in left if path != MANIFEST]
            list(pool.map(lambda path: _make(side, base, delta, path, manifest.files[path]), others))
        _make(side, base, delta, MANIFEST, manifest.files[MANIFEST])
    return {**words, "was_finished": False}


def _check_parts(base: Path, found: Manifest, delta: Path, manifest: DeltaManifest) -> None:
    """Compare the sizes of all files that will be read, before anything is written."""
    for name, file in manifest.files.items():
        if file.base is not None:
            entry = found.files.get(file.base)
            if entry is None or size_of(base / file.base) != entry.size_bytes:
                expected = "no such file" if entry is None else f"{entry.size_bytes} bytes"
                raise _damaged(base / file.base, expected, size_of(base / file.base))
        if file.payload is not None and size_of(place := delta / PAYLOADS / name) != file.payload.size_bytes:
            raise bad_delta(place, f"{file.payload.size_bytes} bytes", size_of(place))


def _make(side: Path, base: Path, delta: Path, name: str, file: DeltaFile) -> None:
    """Write one file of the result from the base's bytes and the delta's. Raises VerificationError for other bytes."""
    payload = delta / PAYLOADS / name

    def chunks() -> Iterator[bytes]:
        digest, position, taken = hashlib.sha256(), 0, 0
        with ExitStack() as stack:
            old = None if file.base is None else stack.enter_context(_reading(base / file.base))
            new = None if file.payload is None else stack.enter_context(_reading(payload))
            for begin, end in [*(file.ranges or ()), (file.size_bytes, file.size_bytes)]:
                for data in (*_bytes(old, position, begin), *_bytes(new, taken, taken + end - begin)):
                    digest.update(data)
                    yield data
                position, taken = end, taken + end - begin
        if digest.hexdigest() != file.sha256:
            raise _wrong_result(base, payload, name, file, digest.hexdigest())

    _write(side, name, chunks())


def _bytes(descriptor: int | None, begin: int, end: int) -> Iterator[bytes]:
    while descriptor is not None and begin < end:
        data = os.pread(descriptor, min(end - begin, _CHUNK_BYTES), begin)
        if not data:
            return  # the digest will tell
        yield data
        begin += len(data)


def _wrong_result(base: Path, payload: Path, name: str, file: DeltaFile, found: str) -> HqconvError:
    """Error for a file with other bytes: the delta's part is at fault, or else the base's."""
    if file.payload is not None and sha256_of(payload) != file.payload.sha256:
        return bad_delta(payload, f"sha256 {file.payload.sha256}", "other bytes")
    return _damaged(base / (file.base or name), f"bytes that give sha256 {file.sha256}", found)


# --- folders and files --------------------------------------------------------------------------------------


def side_of(out: Path, command: str) -> Path:
    """Return the folder in which the output of `diff` or `apply` is built."""
    return out.with_name(f".{out.name}.hqconv-{command}")


@contextmanager
def _building(out: Path, names: set[str], command: str) -> Iterator[Path]:
    """Folder beside `out` that becomes `out` at the end. names: of all files; older ones of these names may be there.

    Raises OutputError if `out` exists, another process is at work on it, or other files lie in the folder beside it.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(
            "The output folder cannot be used.",
            where=str(out),
            expected="no such folder, or an empty one",
            found="a folder with files" if out.is_dir() else "a file",
            remedy="Choose another with -o.",
        )
    side = side_of(out, command)
    with output_errors(side, _CONTINUE), ExitStack() as stack:
        make_folder(side)
        lock = os.open(side, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what, remedy = "Another process is at work on this folder.", "Wait for it, or choose another -o."
            raise OutputError(what, where=str(out), remedy=remedy) from error
        _tidy(side, names)
        yield side
        sync_folders(side, [path for path in side.rglob("*") if path.is_dir()])
        if out.exists():
            out.rmdir()  # empty
        side.rename(out)
        sync_above(out)


def _tidy(side: Path, names: set[str]) -> None:
    """Remove half-written files of a killed run. Raises OutputError for files that this command does not write."""
    found = {path.relative_to(side).as_posix(): path for path in side.rglob("*") if not path.is_dir()}
    foreign = sorted(path for path in found if path.removesuffix(PARTIAL) not in names)
    if foreign:
        raise OutputError(
            "The folder of an unfinished run holds other files.",
            where=str(side),
            found=first_few(foreign),
            remedy="It is of another run: run that command again, or remove the folder.",
        )
    for name, path in found.items():
        if name not in names:
            path.unlink()


def _is_whole(path: Path, file: DeltaFile) -> bool:
    return size_of(path) == file.size_bytes and sha256_of(path) == file.sha256


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    """Descriptor of a regular file. Raises VerificationError if it cannot be read."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise _damaged(path, "a readable file", error.strerror or error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(root: Path, name: str, chunks: Iterable[bytes]) -> FileRecord:
    """Write a file that gets its name when it is complete and `chunks` has raised nothing."""
    path = root / name
    digest, num_bytes = hashlib.sha256(), 0
    with output_errors(path, _CONTINUE):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial(path).open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                partial(path).unlink()
            raise
        partial(path).replace(path)
    return FileRecord(name, num_bytes, digest.hexdigest())


def _damaged(path: Path, expected: str, found: object) -> VerificationError:
    return VerificationError(
        "A file of an artifact is damaged.",
        where=str(path),
        expected=expected,
        found=found,
        remedy="Run `hqconv verify --checks files` on it, and copy it again from where it is whole.",
    )
