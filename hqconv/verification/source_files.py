"""The `files` check of what an artifact takes unchanged: the source's identity, copied tensors, other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from hqconv.artifact.manifest import ManifestSource
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError, NetworkError, VerificationError
from hqconv.io.file_access import sha256_of
from hqconv.layout_decoder.codes import Array
from hqconv.models.source_protocol import ReferenceTensor, Source, SourceReference
from hqconv.schemas import artifact_names as names
from hqconv.schemas.tensors import TensorRef
from hqconv.verification.result import OTHER_SOURCE, CheckResult, Finding

CHUNK_BYTES = 8 << 20
_NOT_CONVERTED = "The source is not the one that was converted."


def check_source_files(
    artifact: Artifact, source: Source, pool: ThreadPoolExecutor, result: CheckResult
) -> None:
    """Check the recorded digests of the source's files, every copied tensor byte for byte, and the copied files."""
    another = other_source(artifact.manifest.source, source)
    if another is not None:
        result.put_first(another)
    _check_identity(artifact.manifest.source, source, pool, result)
    reference = source.reference()
    _compare_copied(artifact, source, reference, pool, result)
    if reference is not None:
        _check_stored(artifact, reference, result)
    _compare_other_files(artifact, source, result)


def other_source(recorded: ManifestSource, source: Source) -> Finding | None:
    """Return the finding for a source that has none of the recorded files; None if it has one of them."""
    found = {file.name: (file.size_bytes, file.header_sha256) for file in source.files}
    for file in recorded.files:
        if found.get(file.name) == (file.size_bytes, file.header_sha256):
            return None
    expected_bytes = sum(file.size_bytes for file in recorded.files)
    found_bytes = sum(file.size_bytes for file in source.files)
    expected_text = f"{recorded.name}: {len(recorded.files)} weight files, {expected_bytes} bytes"
    name = source.repo_id or source.name
    found_text = f"{name}: {len(source.files)} weight files, {found_bytes} bytes"
    return Finding("--source", OTHER_SOURCE, expected_text, found_text)


def _check_identity(
    recorded: ManifestSource, source: Source, pool: ThreadPoolExecutor, result: CheckResult
) -> None:
    """Compare the bytes of the source's files for which the manifest has digests; headers are compared elsewhere."""
    present = {file.name for file in source.files}
    listed = []
    for file in recorded.files:
        for sha256 in dict.fromkeys((file.sha256, file.hub_sha256)):
            if file.name in present and sha256 is not None:
                listed.append((file.name, sha256))
    digests = pool.map(lambda name: _digest_of(source, name), [name for name, _ in listed])
    for (name, sha256), digest in zip(listed, digests, strict=True):
        if digest not in (None, sha256):
            where = f"{names.MANIFEST}: source, file {name}"
            result.add(where, _NOT_CONVERTED, f"sha256 {sha256}", f"sha256 {digest}")


def _digest_of(source: Source, name: str) -> str | None:
    """Return a file's SHA-256: of the local file, else as the Hub lists it."""
    if source.is_here(name) or source.listing is None:
        return sha256_of(source.root / name)
    return source.listing.digests.get(name)


# --- copied tensors ----------------------------------------------------------------------------------------


def _compare_copied(
    artifact: Artifact,
    source: Source,
    reference: SourceReference | None,
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Compare dtype, shape and bytes of every copied tensor, with the reference's where the source has one.

    Missing and extra names are differences of structure.
    """
    places: dict[str, tuple[str, TensorRef]] = {}
    for path in artifact.manifest.files:
        if artifact.is_shard(path):
            with suppress(VerificationError):  # a finding of the headers' check
                places |= {name: (path, ref) for name, ref in artifact.header(path)[0].items()}
    copied = {name: places[name] for name in artifact.manifest.tensors.copied if name in places}
    compared = sorted(copied.keys() & source.tensors.keys())
    by_size = sorted(compared, key=lambda name: -copied[name][1].num_bytes)
    faults = pool.map(
        lambda name: _difference(artifact, source, reference, name, *copied[name]), by_size
    )
    for name, fault in sorted(zip(by_size, faults, strict=True)):
        if fault is not None:
            result.add(f"{copied[name][0]}, tensor {name}", *fault)


def _check_stored(artifact: Artifact, reference: SourceReference, result: CheckResult) -> None:
    """Check that no tensor of the source's files is lost, and that each projection is of the right one."""
    tensors = artifact.manifest.tensors
    for name in reference.lost(tensors.copied, tensors.converted, tensors.dropped):
        what = "A tensor of the source's files is in no tensor of the artifact."
        found = tensors.dropped.get(name, "absent")
        result.add(f"source: {name}", what, "in a model shard", found)
    for layer in artifact.layers:
        with suppress(VerificationError):  # a finding of the structure's check
            for role, slices in artifact.moe_layer(layer).slices.items():
                weight = slices["weight"]
                if not reference.is_projection(role, weight.template, weight.view.index):
                    where = f"{names.MANIFEST}: {layer}: source_parts: {role}"
                    what = "A projection is another tensor of the source's files."
                    result.add(where, what, role, weight.template)


def _difference(
    artifact: Artifact,
    source: Source,
    reference: SourceReference | None,
    name: str,
    path: str,
    entry: TensorRef,
) -> tuple[str, str, str] | None:
    """Return the finding about a copied tensor, with the expected and found texts; None for one that is right."""
    ref = source.tensors[name]
    tensor = ReferenceTensor(ref.dtype, ref.shape, _source_bytes(source, ref))
    if reference is not None:
        derived = reference.tensor(name)
        if derived is None:
            return "A tensor is in no file of the source.", "one with its values", "none"
        tensor = derived
    if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
        what = "A copied tensor has another dtype or shape than the source's."
        expected_form = f"{tensor.dtype} {list(tensor.shape)}"
        return what, expected_form, f"{entry.dtype} {list(entry.shape)}"
    start = num_wrong = first_wrong = 0
    try:
        for expected in tensor.pieces:
            found = np.empty(len(expected), np.uint8)
            artifact.read(path, found.data, entry.offset_bytes + start)
            wrong = np.flatnonzero(found != expected)
            if len(wrong) and not num_wrong:
                first_wrong = start + int(wrong[0])
            num_wrong += len(wrong)
            start += len(expected)
    except NetworkError:
        raise
    except HqconvError as error:
        return f"A copied tensor cannot be compared: {error.what}", "", str(error.found)
    if not num_wrong:
        return None
    text = f"{num_wrong} bytes differ, the first at byte {first_wrong}"
    return "A copied tensor is not the source's.", "the source's bytes", text


def _source_bytes(source: Source, ref: TensorRef) -> Iterator[Array]:
    for start in range(0, ref.num_bytes, CHUNK_BYTES):
        data = np.empty(min(CHUNK_BYTES, ref.num_bytes - start), np.uint8)
        source.read_into(ref, data.data, start)
        yield data


# --- other files -------------------------------------------------------------------------------------------


def _compare_other_files(artifact: Artifact, source: Source, result: CheckResult) -> None:
    """Compare the files beside the weights, e.g. the tokenizer's; files that were generated are not made again."""
    own = (names.CONFIG, names.INDEX, names.CARD, names.SUMS)
    listed: Mapping[str, object] = artifact.manifest.files
    others = {path for path in listed if path not in own and Path(path).suffix != ".safetensors"}
    others -= set(source.sidecar_files.generated)
    theirs = set(source.sidecar_files.names)
    for path in sorted(theirs - others):
        result.add(path, "A file of the source was not copied.", "in the manifest", "absent")
    for path in sorted(others - theirs):
        result.add(path, "A copied file is not the source's.", "absent", "in the manifest")
    source.fetch(sorted(others & theirs))
    for path in sorted(others & theirs):
        expected, found = sha256_of(source.root / path), artifact.manifest.files[path].sha256
        if expected != found:
            result.add(path, "A file is not the source's.", f"sha256 {expected}", found)
