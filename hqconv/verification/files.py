"""The `files` check: manifest, files, headers and source against each other; no weight is decoded.

Expected files and tensors are recomputed from the manifest's facts, whoever wrote the artifact.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hqconv import __version__
from hqconv.artifact.manifest import Manifest, ManifestLayer, sealed
from hqconv.artifact.model_card import is_own_card, is_own_sums
from hqconv.artifact.reader import Artifact, Header
from hqconv.conversion.stages import Meter
from hqconv.errors import VerificationError, differences, plural
from hqconv.io.checkpoint_files import WEIGHT_FOLDERS, WEIGHT_SUFFIXES
from hqconv.io.pipeline import stop_threads
from hqconv.models.source_protocol import Source
from hqconv.schemas import artifact_names as names
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.input_schema import NAMED_INPUTS, LayerSpec
from hqconv.schemas.untrusted_files import parse_json
from hqconv.schemas.weight_schema import is_misnamed
from hqconv.verification.accounting import Placed, check_accounting, consistent_layers
from hqconv.verification.against_source import check_source
from hqconv.verification.content_sums import check_copied
from hqconv.verification.rank_headers import SUFFIX, check_packed, check_rank_scales, check_ranks
from hqconv.verification.result import CheckResult, compare_dicts, compare_names, read_json

_METADATA = {"format": "pt"}  # of an ordinary shard


def _is_foreign(path: str) -> bool:
    is_hidden = any(part.startswith(".") for part in path.split("/"))
    return is_hidden or path == names.MANIFEST or path.endswith(names.PARTIAL)


def check_files(
    artifact: Artifact, source: Source | None, num_threads: int, meter: Meter | None = None
) -> CheckResult:
    """Check everything but the weights' values: sizes, digests, headers, names, layout, config, copied tensors.

    Without `source`, comparisons with the source are left out, and a note says so. Raises nothing for a
    damaged artifact: every fault is a finding. meter: counts hashed bytes.
    """
    result = CheckResult("files")
    with ThreadPoolExecutor(max(1, num_threads), "hqconv-verify") as pool:
        check_manifest(artifact, result)
        _check_disk(artifact, num_threads, meter, result)
        check_beside(artifact, result)
        headers = _read_headers(artifact, result)
        layers = consistent_layers(artifact, result)
        _note_versions(artifact, result)
        if artifact.manifest.is_kernel:
            check_ranks(artifact, layers, headers, result)
            check_rank_scales(artifact, layers.values(), result)
        shards = {path: header for path, header in headers.items() if artifact.is_shard(path)}
        _check_shards(artifact, shards, result)
        inside = _placed(shards, result)
        experts = check_packed(artifact, layers, inside, result)
        copied = {name: place for name, place in inside.items() if name not in experts}
        config = _check_config(artifact, source, result)
        check_accounting(artifact, layers, copied, config if source is None else None, result)
        if source is None:
            check_copied(artifact, copied, pool, result)
            what = "copied tensors have the conversion's content sums; they and copied files"
            result.notes.append(f"{what} were not compared with the source: it was not given")
        else:
            check_source(artifact, source, copied, pool, result)
            if not result.findings:  # the comparison with the source names faults better
                check_copied(artifact, copied, pool, result)
    return result


# --- the disk ----------------------------------------------------------------------------------------------


def _check_disk(
    artifact: Artifact, num_threads: int, meter: Meter | None, result: CheckResult
) -> None:
    """Check that every file of the manifest exists with its size and digest."""
    present = []
    for path, entry in artifact.manifest.files.items():
        if _is_foreign(path):
            result.add(path, "The manifest lists a file that no artifact has.")
            continue
        size = artifact.size_of(path)
        if size is None:
            result.add(
                path,
                "A file of the manifest is missing.",
                f"{entry.size_bytes} bytes",
                "no such file",
            )
        elif path == names.CARD:  # people may edit it: `check_beside` notes it
            continue
        elif size != entry.size_bytes:
            result.add(path, "A file has another size.", entry.size_bytes, size)
        else:
            present.append(path)

    num_told = sum(map(artifact.is_proven_by_hub, present))
    if num_told:
        note = f"of {plural(num_told, 'file')} the Hub's own digests were compared: their bytes were not read"
        result.notes.append(f"{note}, but for their headers")
    digests = _hash_files(artifact, present, num_threads, meter)
    for path in present:
        if digests[path] != (expected := artifact.manifest.files[path].sha256):
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
        found = {path: pool.submit(digest, path) for path in by_size}
        return {path: future.result() for path, future in found.items()}
    finally:
        is_over.set()  # after an interrupt: the threads are waited for
        stop_threads(pool)


# --- the layout that the manifest's facts imply ------------------------------------------------------------


def _note_versions(artifact: Artifact, result: CheckResult) -> None:
    """Note other versions: the installed Humming recomputes the layout, whatever version wrote it."""
    made_with = artifact.manifest.humming_kernels_version
    with suppress(PackageNotFoundError):
        installed = version("humming-kernels")
        if made_with != installed:
            note = (
                f"made with humming-kernels {made_with}, checked against the layout of {installed}"
            )
            note += "; where the fingerprints differ, install the former or convert again"
            result.notes.append(note)


def _read_headers(artifact: Artifact, result: CheckResult) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for path in artifact.manifest.files:
        if path.endswith(SUFFIX) and artifact.size_of(path) is not None:
            try:
                headers[path] = artifact.header(path)
            except VerificationError as error:
                result.add(
                    path,
                    "A safetensors file is damaged.",
                    error.expected,
                    f"{error.what}: {error.found}",
                )
    return headers


# --- index and config --------------------------------------------------------------------------------------


def _check_shards(artifact: Artifact, shards: Mapping[str, Header], result: CheckResult) -> None:
    """Check that ordinary shards are numbered without gaps, and that the index names exactly their tensors."""
    listed = sorted(filter(artifact.is_shard, artifact.manifest.files))
    total = len(listed)
    expected = [names.shard_name(i, total) for i in range(1, total + 1)]
    compare_names(names.MANIFEST, "file", listed, expected, result)
    if names.INDEX not in artifact.manifest.files:
        if total > 1:
            result.add(
                names.INDEX,
                "There is no index of the shards.",
                "listed in the manifest",
                "not listed",
            )
        return
    index = read_json(artifact.root / names.INDEX, result)
    if index is None:
        return
    found = index.get("weight_map")
    weight_map = {name: path for path, (entries, _) in shards.items() for name in entries}
    what = "The index and the shards disagree."
    compare_dicts(f"{names.INDEX}: weight_map", what, weight_map, found, result)
    size = sum(ref.num_bytes for entries, _ in shards.values() for ref in entries.values())
    others = {key: value for key, value in index.items() if key != "weight_map"}
    compare_dicts(names.INDEX, what, {"metadata": {"total_size": size}}, others, result)


def _placed(shards: Mapping[str, Header], result: CheckResult) -> dict[str, Placed]:
    """Tensors of the shards by name; each must be in one shard only, and every shard in torch's format."""
    inside: dict[str, Placed] = {}
    for path, (entries, metadata) in shards.items():
        compare_dicts(
            f"{path}: metadata",
            "A shard's metadata are not a conversion's.",
            _METADATA,
            metadata,
            result,
        )
        for name, entry in entries.items():
            first, _ = inside.setdefault(name, (path, entry))
            if first != path:
                what = "A tensor is in more than one shard."
                result.add(f"{path}, tensor {name}", what, f"in {first} only", "here too")
    return inside


def _check_config(
    artifact: Artifact, source: Source | None, result: CheckResult
) -> dict[str, Any] | None:
    """Check that config.json is the source's plus the manifest's schema; return it, None if it cannot be read."""
    config = read_json(artifact.root / names.CONFIG, result)
    if names.CONFIG not in artifact.manifest.files:
        result.add(names.CONFIG, "The manifest does not list the config.", "listed", "not listed")
    if config is None:
        return None
    where = f"{names.CONFIG}: quantization_config"
    try:
        spec = artifact.spec
    except VerificationError:  # reported already
        return config
    own = artifact.manifest.source.quantization_config
    expected = names.hqconv_quantization_config(
        spec.layer_spec, own, is_mixed=artifact.manifest.is_mixed
    )
    if spec.layout == names.CHECKPOINT:
        layers = list(artifact.layers)
        expected = ENGINE.checkpoint_config(spec.schema, layers, artifact.left)
    what = "The config does not describe the manifest's quantization."
    compare_dicts(where, what, expected, config.get("quantization_config"), result)
    plain = config
    if spec.layout == names.KERNEL:
        plain = names.admit_transformers(config)
        what = "The config does not keep transformers away from all of the model."
        compare_dicts(names.CONFIG, what, names.refuse_transformers(plain), config, result)
    if source is not None:
        ours, theirs = (
            {k: v for k, v in c.items() if k != "quantization_config"}
            for c in (plain, source.config)
        )
        compare_dicts(names.CONFIG, "The config is not the source's.", theirs, ours, result)
    return config


def check_beside(artifact: Artifact, result: CheckResult) -> None:
    """Check that the folder holds no file that the manifest does not list; links to folders are not followed.

    Allowed are files of publishing, and the journal of a conversion that was killed when all was written.
    """
    listed = {names.MANIFEST, *artifact.manifest.files}
    paths = artifact.paths()
    tops = {path.split("/")[0] for path in paths} | {path.name for path in artifact.root.iterdir()}
    beside = [name for name in names.COMPANIONS if name not in listed and name in tops]
    others = [name for name in beside if name != names.SUMS]
    if others:
        result.notes.append(f"beside the artifact's own files: {', '.join(others)}")
    _note_edited(artifact, result)
    if names.JOURNAL in paths:
        result.notes.append(
            "a killed conversion left its journal: repeat its command with --resume to tidy up"
        )
    listed |= {names.JOURNAL}
    for path in paths:
        if path.split("/")[0] in beside or names.journal_part(path):
            continue
        inside = (
            any(file.startswith(f"{path}/") for file in listed)
            if (artifact.root / path).is_dir()
            else False
        )
        if path not in listed and not inside:
            result.add(path, "A file is not in the manifest.", "no such file", "present")


def _note_edited(artifact: Artifact, result: CheckResult) -> None:
    """Note an edited model card and checksums of another manifest, which are no faults."""
    root, manifest = artifact.root, artifact.manifest
    files = manifest.files
    if names.CARD in files and (root / names.CARD).is_file() and not is_own_card(root, manifest):
        is_evaluated = is_own_card(root, manifest, with_evaluation=True)
        what = "has got an evaluation" if is_evaluated else "was edited"
        result.notes.append(f"{names.CARD} {what} since the conversion")
    if (
        names.SUMS not in files
        and (root / names.SUMS).is_file()
        and not is_own_sums(root, manifest)
    ):
        result.notes.append(f"{names.SUMS} does not say what the manifest does")


def check_manifest(artifact: Artifact, result: CheckResult) -> None:
    """Check the manifest: digest and bytes, the list of files, names of schemas, worst experts that exist."""
    _check_digest(artifact, result)
    _check_listed(artifact, result)
    _check_schemas(artifact, result)
    for name, layer in artifact.manifest.blocks.items():
        for role, error in layer.quantization_error.items():
            worst = error.worst_expert
            if worst >= layer.num_experts:
                where = f"{names.MANIFEST}: {name}: quantization_error: {role}: worst_expert"
                result.add(where, "The worst expert is none of the layer's.", "one of them", worst)


def _check_digest(artifact: Artifact, result: CheckResult) -> None:
    """Check the manifest's digest, and that its bytes are those that its values have in a manifest of this hqconv."""
    manifest = artifact.manifest
    if manifest.alteration is not None:
        result.add(f"{names.MANIFEST}: digest", *manifest.alteration)
        return
    raw, expected = manifest.path.read_bytes(), manifest.to_dict()
    try:
        is_ours = raw == sealed(expected)
    except UnicodeEncodeError:  # half of a surrogate pair
        is_ours = False
    if not is_ours:
        what = f"The manifest has keys or a form that hqconv {__version__} does not write."
        result.add(names.MANIFEST, what, *differences(expected, parse_json(raw)))


def _check_listed(artifact: Artifact, result: CheckResult) -> None:
    """Check that the model card is listed, and weights only in shards and rank files."""
    if names.CARD not in artifact.manifest.files:
        result.add(names.CARD, "The manifest does not list the model card.", "listed", "not listed")
    for path in artifact.manifest.files:
        is_weights = (
            path.endswith((*WEIGHT_SUFFIXES, ".index.json")) or path.split("/")[0] in WEIGHT_FOLDERS
        )
        is_own = path == names.INDEX or artifact.is_shard(path)
        is_ranks = artifact.manifest.is_kernel and "/" in path and path.endswith(".safetensors")
        if is_weights and not (is_own or is_ranks):
            result.add(
                path,
                "The manifest lists weights where no artifact has any.",
                "not listed",
                "listed",
            )


def _check_schemas(artifact: Artifact, result: CheckResult) -> None:
    """Check that schemas have all their fields, and those with a name of ours the fields of that name."""
    manifest, layers = artifact.manifest, artifact.layers
    own: list[tuple[str, Manifest | ManifestLayer, LayerSpec]] = [
        ("", manifest, manifest.layer_spec)
    ]
    own += [(f"{name}: ", layers[name], spec) for name, spec in manifest.overrides.items()]
    for inside, entry, spec in own:
        where, what = f"{names.MANIFEST}: {inside}", "The manifest does not spell out its schema."
        compare_dicts(
            f"{where}weight_schema", what, spec.schema.to_dict(), entry.weight_schema, result
        )
        if entry.activation_schema is not None:
            fields = spec.inputs.humming_fields()
            compare_dicts(
                f"{where}activation_schema", what, fields, entry.activation_schema, result
            )
        for schema in filter(is_misnamed, spec.schema.each):
            what, name = "The schema is not the one of this name.", schema.name
            result.add(
                f"{where}schema_name",
                what,
                f"the fields of {name}, or another name",
                schema.describe(),
            )
        if NAMED_INPUTS.get(spec.inputs.name, spec.inputs) != spec.inputs:
            what, name = "The activations are not those of this name.", spec.inputs.name
            texts = (json.dumps(one.humming_fields()) for one in (NAMED_INPUTS[name], spec.inputs))
            result.add(f"{where}input_schema", what, *texts)
