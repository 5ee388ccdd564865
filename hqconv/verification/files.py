"""The `files` check: manifest, files and headers, against what request and source imply; no weight is decoded.

Structure is derived again and compared (`artifact/expected`), whoever wrote the artifact. Digests prove bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hqconv.artifact.expected import (
    ExpectedArtifact,
    expected_artifact,
    header_differences,
    sentence,
)
from hqconv.artifact.manifest import differences, structure
from hqconv.artifact.model_card import is_own_card, is_own_sums
from hqconv.artifact.reader import Artifact
from hqconv.conversion.stages import Meter
from hqconv.errors import HqconvError, NetworkError, VerificationError, plural, short_text
from hqconv.io.checkpoint_files import WEIGHT_FOLDERS, WEIGHT_SUFFIXES
from hqconv.io.pipeline import stop_threads
from hqconv.models.source_protocol import Source
from hqconv.schemas import artifact_names as names
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_json
from hqconv.verification.activation_scales import check_rank_scales
from hqconv.verification.result import CheckResult
from hqconv.verification.source_files import check_source_files

_SAFETENSORS = ".safetensors"


def check_files(
    artifact: Artifact, source: Source | None, num_threads: int, meter: Meter | None = None
) -> CheckResult:
    """Check everything but the weights' values: sizes, digests, headers, names, layout, config, copied tensors.

    Without `source`, the artifact's own records stand for it, and a note says so. Every fault of the artifact is a
    finding. meter: counts hashed bytes.
    """
    result = CheckResult("files")
    if artifact.manifest.alteration is not None:
        result.add(f"{names.MANIFEST}: digest", *artifact.manifest.alteration)
    _check_disk(artifact, num_threads, meter, result)
    _check_beside(artifact, result)
    _note_versions(artifact, result)
    with ThreadPoolExecutor(max(1, num_threads), "hqconv-verify") as pool:
        if source is not None:
            check_source_files(artifact, source, pool, result)
        expected = _expected(artifact, source, result)
        if expected is not None:
            _check_documents(artifact, expected, result)
            _check_headers(artifact, expected, result)
    _check_listed(artifact, source, expected, result)
    if artifact.manifest.is_kernel:
        check_rank_scales(artifact, result)
    if source is None:
        what = "copied tensors and copied files were not compared with the source: it was not given"
        result.notes.append(what)
    return result


# --- structure ---------------------------------------------------------------------------------------------


def _expected(
    artifact: Artifact, source: Source | None, result: CheckResult
) -> ExpectedArtifact | None:
    """Return what the artifact must be; None and a finding where its records contradict each other."""
    try:
        return expected_artifact(artifact, source)
    except NetworkError:
        raise
    except HqconvError as error:
        origin = "source" if source is not None else names.MANIFEST
        result.add_error(error, f"{origin}: ")
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:  # Humming's
        what = "The manifest describes a layout that Humming does not have."
        result.add(names.MANIFEST, what, "", f"{type(error).__name__}: {error}")
    return None


def _check_documents(artifact: Artifact, expected: ExpectedArtifact, result: CheckResult) -> None:
    """Compare the manifest's structure, config.json and the index of the shards."""
    documents: list[tuple[str, object, object]] = [
        (names.MANIFEST, expected.manifest, structure(artifact.manifest)),
        (names.CONFIG, expected.config, _json_object(artifact, names.CONFIG, result)),
    ]
    if expected.index is not None:
        index = _json_object(artifact, names.INDEX, result)
        documents.append((names.INDEX, expected.index, index))
    for path, planned, found in documents:
        for key, value, other in differences(planned, found):
            result.add(f"{path}: {key}", sentence(key), short_text(value), short_text(other))


def _json_object(artifact: Artifact, path: str, result: CheckResult) -> dict[str, Any]:
    try:
        document = read_json(artifact.fetched(path), MAX_LIST_BYTES)
    except (OSError, ValueError) as error:
        result.add(path, "A file cannot be read as JSON.", "a JSON object", error)
        return {}
    if not isinstance(document, dict):
        result.add(path, "A file cannot be read as JSON.", "a JSON object", type(document).__name__)
        return {}
    return document


def _check_headers(artifact: Artifact, expected: ExpectedArtifact, result: CheckResult) -> None:
    """Compare the size and every byte of the header of each safetensors file."""
    for path, file in expected.files.items():
        entry = artifact.manifest.files.get(path)
        if entry is None:
            result.add(path, "A file of the plan is missing.", "listed in the manifest", "absent")
            continue
        if artifact.size_of(path) is None:
            continue
        if entry.size_bytes != file.size_bytes:
            what = "A file has another size than its tensors need."
            result.add(path, what, file.size_bytes, entry.size_bytes)
        try:
            for key, value, other in header_differences(artifact, file):
                result.add(f"{path}, {key}", sentence(key), short_text(value), short_text(other))
        except VerificationError as error:
            what = "A safetensors file is damaged."
            result.add(path, what, error.expected, f"{error.what}: {error.found}")


def _check_listed(
    artifact: Artifact,
    source: Source | None,
    expected: ExpectedArtifact | None,
    result: CheckResult,
) -> None:
    """Check that the manifest lists the documents of every artifact, and no weights but the planned ones."""
    documents = [names.CONFIG, names.CARD]
    if expected is not None and expected.index is not None:
        documents.append(names.INDEX)
    for name in documents:
        if name not in artifact.manifest.files:
            result.add(name, "The manifest does not list a document.", "listed", "absent")
    if expected is None:
        return
    copied = set(artifact.manifest.files) - expected.files.keys() - {*documents, names.SUMS}
    for path in sorted(copied):
        is_weights = path.endswith((*WEIGHT_SUFFIXES, ".index.json"))
        if is_weights or path.split("/")[0] in WEIGHT_FOLDERS or path.endswith(_SAFETENSORS):
            result.add(path, "The manifest lists weights that no plan has.", "absent", "listed")


# --- the disk ----------------------------------------------------------------------------------------------


def _check_disk(
    artifact: Artifact, num_threads: int, meter: Meter | None, result: CheckResult
) -> None:
    """Check that every file of the manifest exists with its size and digest."""
    present = []
    for path, entry in artifact.manifest.files.items():
        size = artifact.size_of(path)
        if size is None:
            expected = f"{entry.size_bytes} bytes"
            result.add(path, "A file of the manifest is missing.", expected, "no such file")
        elif path == names.CARD:  # people may edit it: a note says so
            continue
        elif size != entry.size_bytes:
            result.add(path, "A file has another size.", entry.size_bytes, size)
        else:
            present.append(path)
    num_proven = sum(map(artifact.is_proven_by_hub, present))
    if num_proven:
        note = f"of {plural(num_proven, 'file')} the Hub's own digests were compared"
        result.notes.append(f"{note}: their bytes were not read, but for their headers")
    digests = _hash_files(artifact, present, num_threads, meter)
    for path in present:
        expected = artifact.manifest.files[path].sha256
        if digests[path] != expected:
            what = "A file's bytes are not those the manifest records."
            result.add(path, what, f"sha256 {expected}", digests[path])


def _hash_files(
    artifact: Artifact, paths: Sequence[str], num_threads: int, meter: Meter | None
) -> dict[str, str]:
    """SHA-256 of files by path, or the reason why one is unreadable; the largest is begun first."""
    is_over = threading.Event()

    def keep_on() -> None:
        if is_over.is_set():
            raise CancelledError

    def digest(path: str) -> str:
        try:
            return artifact.digest_of(path, keep_on)
        except OSError as error:
            return f"unreadable: {error.strerror}"
        finally:
            if meter is not None:
                meter.advance(path, artifact.manifest.files[path].size_bytes)
                meter.finish(path)

    pool = ThreadPoolExecutor(max(1, num_threads), "hqconv-digests")
    by_size = sorted(paths, key=lambda path: -artifact.manifest.files[path].size_bytes)
    try:
        futures = {path: pool.submit(digest, path) for path in by_size}
        return {path: future.result() for path, future in futures.items()}
    finally:
        is_over.set()  # after an interrupt: the threads are waited for
        stop_threads(pool)


def _check_beside(artifact: Artifact, result: CheckResult) -> None:
    """Check that the folder holds no file that the manifest does not list; links to folders are not followed.

    Allowed are companions of publishing, and the journal of a conversion that was killed when all was written.
    """
    root, manifest = artifact.root, artifact.manifest
    listed = {names.MANIFEST, *manifest.files}
    paths = artifact.paths()
    has_card = names.CARD in manifest.files and (root / names.CARD).is_file()
    if has_card and not is_own_card(root, manifest):
        result.notes.append(f"{names.CARD} was edited since the conversion")
    if (root / names.SUMS).is_file() and not is_own_sums(root, manifest):
        result.notes.append(f"{names.SUMS} does not say what the manifest does")
    if names.JOURNAL in paths:
        note = "a killed conversion left its journal: repeat its command with --resume to tidy up"
        result.notes.append(note)
    folders = {folder.as_posix() for path in listed for folder in Path(path).parents}
    allowed = {*listed, *folders, names.JOURNAL}
    for path in paths:
        is_companion = path.split("/")[0] in names.COMPANIONS or names.journal_part(path)
        if path not in allowed and not is_companion:
            result.add(path, "A file is not in the manifest.", "no such file", "present")


def _note_versions(artifact: Artifact, result: CheckResult) -> None:
    """Note other versions: the installed Humming derives the layout again, whatever version wrote it."""
    made_with = artifact.manifest.humming_kernels_version
    with suppress(PackageNotFoundError):
        installed = version("humming-kernels")
        if made_with != installed:
            note = f"made with humming-kernels {made_with}, checked against {installed}"
            result.notes.append(note)
