"""The `files` check: manifest, files and headers, against what request and source imply; no weight is decoded.

Structure is derived again and compared (`artifact/expected`), whoever wrote the artifact. Digests prove bytes. With a
source, copied tensors and other files are compared with it. Static activation scales of rank files are compared with
the manifest's, and these with the source's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from hqconv.artifact.expected import (
    ExpectedArtifact,
    expected_artifact,
    header_differences,
    sentence,
)
from hqconv.artifact.manifest import ManifestSource, differences, structure
from hqconv.artifact.model_card import is_own_card, is_own_sums
from hqconv.artifact.reader import Artifact
from hqconv.conversion.collect_input_scales import reduce_scales
from hqconv.conversion.stages import Meter
from hqconv.errors import HqconvError, NetworkError, VerificationError, plural, short_text
from hqconv.io.checkpoint_files import WEIGHT_FOLDERS, WEIGHT_SUFFIXES
from hqconv.io.file_access import sha256_of
from hqconv.io.pipeline import stop_threads
from hqconv.layout_decoder.codes import Array
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import ReferenceTensor, Source, SourceReference
from hqconv.schemas.artifact_names import (
    CARD,
    COMPANIONS,
    CONFIG,
    GEMMS,
    INDEX,
    INPUT_SCALE,
    JOURNAL,
    MANIFEST,
    SUMS,
    input_scale,
    journal_part,
    rank_file,
)
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_json
from hqconv.verification.result import OTHER_SOURCE, CheckResult, Finding

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
        result.add(f"{MANIFEST}: digest", *artifact.manifest.alteration)
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
    _check_listed(artifact, expected, result)
    if artifact.manifest.is_kernel:
        check_rank_scales(artifact, result)
    if source is None:
        result.notes.append(
            "copied tensors and copied files were not compared with the source: it was not given"
        )
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
        origin = "source" if source is not None else MANIFEST
        result.add_error(error, f"{origin}: ")
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:  # Humming's
        result.add(
            MANIFEST,
            "The manifest describes a layout that Humming does not have.",
            "",
            f"{type(error).__name__}: {error}",
        )
    return None


def _check_documents(artifact: Artifact, expected: ExpectedArtifact, result: CheckResult) -> None:
    """Compare the manifest's structure, config.json and the index of the shards."""
    documents = [
        (MANIFEST, expected.manifest, structure(artifact.manifest)),
        (CONFIG, expected.config, _json_object(artifact, CONFIG, result)),
    ]
    if expected.index is not None:
        index = _json_object(artifact, INDEX, result)
        documents.append((INDEX, expected.index, index))
    for path, planned, found in documents:
        _add_differences(result, f"{path}: ", differences(planned, found))


def _add_differences(
    result: CheckResult, where: str, found: Iterable[tuple[str, object, object]]
) -> None:
    """Add a finding for each key that differs. where: begin of the findings' places."""
    for key, value, other in found:
        # of another hqconv: `check_search` says where that matters
        if key != "quantizer_version":
            result.add(f"{where}{key}", sentence(key), short_text(value), short_text(other))


def check_beside_experts(artifact: Artifact, source: Source, num_threads: int) -> CheckResult:
    """Compare config.json and every copied tensor with the source's; no file is hashed and no expert is read."""
    result = CheckResult("files")
    expected = _expected(artifact, source, result)
    if expected is not None:
        config = _json_object(artifact, CONFIG, result)
        _add_differences(result, f"{CONFIG}: ", differences(expected.config, config))
    with ThreadPoolExecutor(max(1, num_threads), "hqconv-verify") as pool:
        _compare_copied(artifact, source, source.reference(), pool, result)
    return result


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
            result.add(
                path,
                "A file has another size than its tensors need.",
                file.size_bytes,
                entry.size_bytes,
            )
        try:
            _add_differences(result, f"{path}, ", header_differences(artifact, file))
        except VerificationError as error:
            result.add(
                path,
                "A safetensors file is damaged.",
                error.expected,
                f"{error.what}: {error.found}",
            )


def _check_listed(
    artifact: Artifact, expected: ExpectedArtifact | None, result: CheckResult
) -> None:
    """Check that the manifest lists the documents of every artifact, and no weights but the planned ones."""
    documents = [CONFIG, CARD]
    if expected is not None and expected.index is not None:
        documents.append(INDEX)
    for name in documents:
        if name not in artifact.manifest.files:
            result.add(name, "The manifest does not list a document.", "listed", "absent")
    if expected is None:
        return
    copied = set(artifact.manifest.files) - expected.files.keys() - {*documents, SUMS}
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
        elif path == CARD:  # people may edit it: a note says so
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
            result.add(
                path,
                "A file's bytes are not those the manifest records.",
                f"sha256 {expected}",
                digests[path],
            )


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
    root = artifact.root
    manifest = artifact.manifest
    listed = {MANIFEST, *manifest.files}
    paths = artifact.paths()
    has_card = CARD in manifest.files and (root / CARD).is_file()
    if has_card and not is_own_card(root, manifest):
        result.notes.append(f"{CARD} was edited since the conversion")
    if (root / SUMS).is_file() and not is_own_sums(root, manifest):
        result.notes.append(f"{SUMS} does not say what the manifest does")
    if JOURNAL in paths:
        result.notes.append(
            "a killed conversion left its journal: repeat its command with --resume to tidy up"
        )
    folders = {folder.as_posix() for path in listed for folder in Path(path).parents}
    allowed = {*listed, *folders, JOURNAL}
    for path in paths:
        is_companion = path.split("/")[0] in COMPANIONS or journal_part(path)
        if path not in allowed and not is_companion:
            result.add(path, "A file is not in the manifest.", "no such file", "present")


def _note_versions(artifact: Artifact, result: CheckResult) -> None:
    """Note other versions: the installed Humming derives the layout again, whatever version wrote it."""
    made_with = artifact.manifest.humming_kernels_version
    with suppress(PackageNotFoundError):
        installed = version("humming-kernels")
        if made_with != installed:
            result.notes.append(
                f"made with humming-kernels {made_with}, checked against {installed}"
            )


def is_static(artifact: Artifact, layer: str) -> bool:
    """Return whether a layer's activations have static scales; False for an invalid manifest."""
    try:
        return artifact.layer_spec_of(layer).inputs.is_static
    except HqconvError:  # a finding of the `files` check
        return False


def check_rank_scales(artifact: Artifact, result: CheckResult) -> None:
    """Check that the manifest's scales are valid numbers, and that all rank files have them."""
    for layer in artifact.layers:
        if not is_static(artifact, layer):
            continue
        recorded = _recorded(artifact, layer)
        for gemm, scale in recorded.items():
            if not _is_scale(scale):
                result.add(
                    f"{MANIFEST}: {layer}: {gemm}: {INPUT_SCALE}",
                    "A static activation scale is not one that a conversion writes.",
                    "a float32 above zero",
                    scale,
                )
        _compare(artifact, layer, recorded, "manifest", result)


def check_source_scales(
    artifact: Artifact, layer: str, source: Source, original: MoeLayer, result: CheckResult
) -> None:
    """Check that the manifest has the scales that follow from the source's layer `original`."""
    with ThreadPoolExecutor(8, "hqconv-verify") as pool:
        try:
            expected = reduce_scales(source, original, pool)
        except NetworkError:
            raise
        except HqconvError as error:
            result.add_error(error, "source: ")
            return
    for gemm, scale in _recorded(artifact, layer).items():
        if scale != expected.get(gemm):
            result.add(
                f"{MANIFEST}: {layer}: {gemm}: {INPUT_SCALE}",
                "A static activation scale is not the source's.",
                expected.get(gemm, "none"),
                scale,
            )
    _compare(artifact, layer, expected, "source", result)


def _recorded(artifact: Artifact, layer: str) -> dict[str, float | None]:
    entries = {gemm: artifact.layers[layer].gemm(gemm) for gemm in GEMMS}
    return {gemm: None if entry is None else entry.input_scale for gemm, entry in entries.items()}


def _is_scale(number: Any) -> bool:
    if not isinstance(number, float) or not math.isfinite(number):
        return False
    return 0 < number == float(np.float32(number))


def _compare(
    artifact: Artifact, layer: str, expected: Mapping[str, Any], owner: str, result: CheckResult
) -> None:
    """Compare every rank's scale of each GEMM with the expected one."""
    for tp_rank, ep_rank in artifact.grid.ranks:
        for gemm in GEMMS:
            name = input_scale(layer, gemm, artifact.layer_spec_of(layer).inputs)
            where = f"{rank_file(layer, tp_rank, ep_rank)}, tensor {name}"
            try:
                found = artifact.read_input_scale(layer, gemm, tp_rank, ep_rank)
            except (HqconvError, OSError) as error:
                result.add(where, "An activation scale cannot be read.", "F32 [1]", error)
                continue
            if found != expected.get(gemm):
                result.add(
                    where,
                    f"A static activation scale is not the {owner}'s.",
                    expected.get(gemm, "none"),
                    found,
                )


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
            result.add(
                f"{MANIFEST}: source, file {name}",
                _NOT_CONVERTED,
                f"sha256 {sha256}",
                f"sha256 {digest}",
            )


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
        found = tensors.dropped.get(name, "absent")
        result.add(
            f"source: {name}",
            "A tensor of the source's files is in no tensor of the artifact.",
            "in a model shard",
            found,
        )
    for layer in artifact.layers:
        with suppress(VerificationError):  # a finding of the structure's check
            for role, slices in artifact.moe_layer(layer).slices.items():
                weight = slices["weight"]
                if not reference.is_projection(role, weight.template, weight.view.index):
                    result.add(
                        f"{MANIFEST}: {layer}: source_parts: {role}",
                        "A projection is another tensor of the source's files.",
                        role,
                        weight.template,
                    )


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
    own = (CONFIG, INDEX, CARD, SUMS)
    listed = artifact.manifest.files
    others = {path for path in listed if path not in own and Path(path).suffix != ".safetensors"}
    others -= set(source.sidecar_files.generated)
    theirs = set(source.sidecar_files.names)
    for path in sorted(theirs - others):
        result.add(path, "A file of the source was not copied.", "in the manifest", "absent")
    for path in sorted(others - theirs):
        result.add(path, "A copied file is not the source's.", "absent", "in the manifest")
    source.fetch(sorted(others & theirs))
    for path in sorted(others & theirs):
        expected = sha256_of(source.root / path)
        found = artifact.manifest.files[path].sha256
        if expected != found:
            result.add(path, "A file is not the source's.", f"sha256 {expected}", found)
