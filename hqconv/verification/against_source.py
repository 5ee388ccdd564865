"""The `files` check against the source: its identity, its layers and accounting, the tensors copied from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hqconv import __version__
from hqconv.artifact.manifest import (
    Ancestor,
    FileEntry,
    Manifest,
    ManifestSource,
    SourceFileEntry,
    read_manifest,
)
from hqconv.artifact.model_card import card_bytes
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError, NetworkError, VerificationError, differences, plural
from hqconv.formats.source_format import DIRECT, DIRECT_ROUNDED
from hqconv.io.file_access import sha256_of
from hqconv.layout_decoder.codes import Array
from hqconv.models.expert_map import ExpertMap
from hqconv.models.source_protocol import MADE, NOT_MADE, Source
from hqconv.planning.layer_encoding import quantizer_version
from hqconv.planning.notices import request_warnings, source_warnings
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.model_config import attention_heads
from hqconv.schemas.options import QUANTIZERS, RTN
from hqconv.schemas.tensors import TensorRef
from hqconv.verification.accounting import Placed, as_converted, compare_layers
from hqconv.verification.gguf_reference import PublishedModel, StoredTokenizer, is_role
from hqconv.verification.result import OTHER_SOURCE, CheckResult, Finding, compare_names, read_json

CHUNK_BYTES = 8 << 20
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"


def check_source(
    artifact: Artifact,
    source: Source,
    copied: Mapping[str, Placed],
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Check source identity, layers and accounting, copied tensors byte for byte, and the other files.

    For the source of an ancestor artifact, layers and tensors are compared as far as they are the same.
    """
    lineage = Lineage.of(artifact, source)
    if (another := other_source(lineage.made.source, source)) is not None:
        result.put_first(another)
    _check_identity(lineage.made.source, source, pool, result)
    try:
        experts = as_converted(artifact, source.map_experts(), source.tensors)
    except HqconvError as error:
        what = f"The source cannot be mapped: {error.what}"
        result.add(f"source: {error.where}", what, error.expected, error.found)
        return
    compare_layers(artifact, experts, "the source", result, is_own=lineage.is_own)
    if lineage.is_own:
        _check_ancestors(artifact, source, result)
        if artifact.manifest.hqconv_version == __version__:
            _check_warnings(artifact, experts, source, result)
            _check_card(artifact, source, result)
        else:
            made_by = f"hqconv {artifact.manifest.hqconv_version} made the artifact"
            result.notes.append(f"{made_by}: its warnings and model card were not compared")
    elif lineage.between:
        result.notes.append(
            f"the source is that of the artifact {plural(len(lineage.between), 'step')} before"
        )
    _compare_accounting(artifact, experts, result, is_own=lineage.is_own)
    stored = source.stored_model
    model = None if stored is None else PublishedModel(stored, source.config)
    _compare_copied(artifact, source, model, experts.copied, copied, pool, result)
    if model is not None:
        _check_made_config(artifact, model, result)
    _check_gguf_roles(artifact, result)
    others = {
        path
        for path in artifact.manifest.files
        if path not in (names.CONFIG, names.INDEX, names.CARD, names.SUMS)
        and not path.endswith(".safetensors")
    }
    made = others.intersection(source.made.names)
    others -= made
    compare_names("files copied from the source", "file", others, source.other_files, result)
    source.fetch(sorted(others.intersection(source.other_files)))
    for path in sorted(others.intersection(source.other_files)):
        expected, found = sha256_of(source.root / path), artifact.manifest.files[path].sha256
        if expected != found:
            result.add(path, "A file is not the source's.", f"sha256 {expected}", found)
    if made or any(text.startswith(MADE) for text in artifact.manifest.warnings or ()):
        _check_made(artifact, source, result)


def _check_made(artifact: Artifact, source: Source, result: CheckResult) -> None:
    """Make the tokenizer again, and compare it: other versions than the conversion's may write other bytes."""
    if any(text.startswith(MADE) for text in artifact.manifest.warnings or ()):
        missing = set(source.made.names) - artifact.manifest.files.keys()
        compare_names("files made from the source's metadata", "file", (), missing, result)
    _check_words(artifact, source, result)
    made, remark = source.make_files()
    if remark not in (artifact.manifest.warnings or ()):
        result.notes.append(
            f"the tokenizer was not compared with the source's metadata. Here: {remark or 'none'}"
        )
        return
    for path, data in made.items():
        expected, file = hashlib.sha256(data).hexdigest(), artifact.manifest.files.get(path)
        found = "no such file" if file is None else file.sha256
        if found != expected:
            result.add(
                path,
                "A file is not the one made from the source's metadata.",
                f"sha256 {expected}",
                found,
            )


def _check_words(artifact: Artifact, source: Source, result: CheckResult) -> None:
    """Check that a tokenizer that was made has the words of the first GGUF file, by id; not of a file on the Hub."""
    path = source.root / source.files[0].name
    if (
        _TOKENIZER not in source.made.names
        or _TOKENIZER not in artifact.manifest.files
        or not path.is_file()
    ):
        return
    document = read_json(artifact.fetched(_TOKENIZER), result) or {}
    try:
        vocabulary = document["model"]["vocab"]
        by_id = (
            {number: word for word, number in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {}
        )
        by_id = by_id or {number: word for number, (word, *_) in enumerate(vocabulary)}
        by_id |= {one["id"]: one["content"] for one in document["added_tokens"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        result.add(_TOKENIZER, "The file is no tokenizer.", "words by id", repr(error))
        return
    stored = StoredTokenizer(path)
    merges = [
        one if isinstance(one, str) else " ".join(one)
        for one in document["model"].get("merges") or ()
    ]
    if stored.merges is not None and merges != list(stored.merges):
        result.add(
            _TOKENIZER,
            "The merges are not those of the GGUF file.",
            len(stored.merges),
            len(merges),
        )
    template = artifact.manifest.files.get(_TEMPLATE)
    if (
        template is not None
        and template.sha256 != hashlib.sha256(str(stored.template).encode()).hexdigest()
    ):
        result.add(
            _TEMPLATE, "The chat template is not that of the GGUF file.", str(stored.template)[:80]
        )
    expected = dict(enumerate(stored.words or ()))
    for number in sorted(expected.keys() | by_id.keys()):
        if expected.get(number) != by_id.get(number):
            where, what = f"{_TOKENIZER}: word {number}", "A word is not that of the GGUF file."
            result.add(where, what, repr(expected.get(number)), repr(by_id.get(number)))


def _check_card(artifact: Artifact, source: Source, result: CheckResult) -> None:
    """Check that the model card is made of the manifest's text and the source's card."""
    manifest, card = artifact.manifest, source.loose.card
    if names.CARD not in manifest.files:
        return
    found = manifest.files[names.CARD]
    where = f"{names.MANIFEST}: files: {names.CARD}"
    try:
        made = card_bytes(manifest, card, is_artifact=source.guard.is_held)
    except (ArithmeticError, ValueError) as error:
        result.add(where, "No model card can be made of the manifest.", "", type(error).__name__)
        return
    expected = FileEntry(size_bytes=len(made), sha256=hashlib.sha256(made).hexdigest())
    if found != expected:
        what = "The model card is not of this manifest and the source's card."
        result.add(
            where,
            what,
            *(f"sha256 {one.sha256}, {one.size_bytes} bytes" for one in (expected, found)),
        )


def _check_ancestors(artifact: Artifact, source: Source, result: CheckResult) -> None:
    """Check that `derived_from` is what the source's manifest says: nothing, where it is no artifact."""
    expected: list[Ancestor] = []
    if source.guard.is_held:
        parent = read_manifest(source.root, is_sealed=True)
        expected = [parent.as_ancestor(), *parent.ancestors]
    if (found := list(artifact.manifest.ancestors)) != expected:
        where, texts = (
            f"{names.MANIFEST}: derived_from",
            ([one.to_dict() for one in of] for of in (expected, found)),
        )
        result.add(
            where,
            "The artifact does not come from the artifacts that its manifest names.",
            *differences(*texts),
        )


def _check_warnings(
    artifact: Artifact, experts: ExpertMap, source: Source, result: CheckResult
) -> None:
    """Check that the manifest has the warnings of this request and source, and no others of ours.

    What is left out may lie beside the source today and not then; the tokenizer's remark depends on the machine.
    """
    spec, heads = artifact.spec, attention_heads(source.config)
    # No manifest says whether codes had to be kept (`--schema source`), and of which GEMMs another schema was named.
    ways: list[dict[str, Any]] = [{}]
    if not spec.encoding.keeps_scales or not any(
        DIRECT_ROUNDED in one.conversion for one in artifact.layers.values()
    ):
        some = ((), names.GEMMS, *((gemm,) for gemm in names.GEMMS))
        renamed = [{(layer, gemm) for layer in spec.of_layers for gemm in gemms} for gemms in some]
        ways += [{"must_be_direct": True, "renamed": frozenset(one)} for one in renamed]
    possible = [
        list(request_warnings(experts, replace(spec, **way), source.config, heads)) for way in ways
    ]
    known, found = source_warnings(source), list(artifact.manifest.warnings or ())
    remarks = [text for text in found if text.startswith((MADE, NOT_MADE))]
    found = [text for text in found if text not in (*known, *remarks) and " left out: " not in text]
    if len(remarks) != bool(source.made.origin):
        what = "The manifest does not say whether a tokenizer was made."
        result.add(
            f"{names.MANIFEST}: warnings",
            what,
            "one warning" if source.made.origin else "none",
            remarks,
        )
    if found not in possible:
        result.add(
            f"{names.MANIFEST}: warnings",
            "The warnings are not those of this conversion.",
            possible[0],
            found,
        )


def other_source(recorded: ManifestSource, source: Source) -> Finding | None:
    """Return the finding for a source that has none of the recorded files; None if it has one of them."""
    found = {file.name: (file.size_bytes, file.header_sha256) for file in source.files}
    if any(
        found.get(file.name) == (file.size_bytes, file.header_sha256) for file in recorded.files
    ):
        return None
    names_and_sizes = (
        (recorded.name, [file.size_bytes or 0 for file in recorded.files]),
        (source.repo_id or source.name, [file.size_bytes for file in source.files]),
    )
    texts = (
        f"{name}: {len(sizes)} weight files, {sum(sizes)} bytes" for name, sizes in names_and_sizes
    )
    return Finding("--source", OTHER_SOURCE, *texts)


def _check_identity(
    recorded: ManifestSource, source: Source, pool: ThreadPoolExecutor, result: CheckResult
) -> None:
    """Check that the source is the recorded one: its files, and repo and commit if both have them; no folder names."""
    what = "The source is not the one that was converted."
    where = f"{names.MANIFEST}: source"
    if recorded.revision is not None and source.revision is not None:
        if recorded.name != source.repo_id:
            result.add(f"{where}: name", what, recorded.name, source.repo_id)
        if recorded.revision != source.revision:
            result.add(f"{where}: revision", what, recorded.revision, source.revision)
    texts = [
        json.dumps(one, sort_keys=True)
        for one in (source.quantization, recorded.quantization_config)
    ]
    if texts[0] != texts[1]:
        result.add(f"{where}: quantization_config", what, *texts)
    if recorded.index_sha256 != source.index_sha256:
        result.add(f"{where}: index_sha256", what, recorded.index_sha256, source.index_sha256)
    found = {file.name: (file.size_bytes, file.header_sha256) for file in source.files}
    expected = {file.name: (file.size_bytes, file.header_sha256) for file in recorded.files}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            texts = [_size_and_header(one.get(name)) for one in (expected, found)]
            result.add(f"{where}, file {name}", what, *texts)
    _check_digests(recorded.files, source, pool, result)


def _size_and_header(file: tuple[int | None, str | None] | None) -> str:
    return "no such file" if file is None else f"{file[0]} bytes, header sha256 {file[1]}"


def _check_digests(
    recorded: Sequence[SourceFileEntry],
    source: Source,
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Check the bytes of the source's files for which the manifest has digests."""
    found = {file.name for file in source.files}
    listed = [
        (file.name, sha256)
        for file in recorded
        for sha256 in dict.fromkeys((file.sha256, file.hub_sha256))
        if file.name in found and sha256 is not None
    ]
    digests = pool.map(lambda name: _digest_of(source, name), [name for name, _ in listed])
    for (name, sha256), digest in zip(listed, digests, strict=True):
        if digest not in (None, sha256):
            what = "The source is not the one that was converted."
            result.add(
                f"{names.MANIFEST}: source, file {name}",
                what,
                f"sha256 {sha256}",
                f"sha256 {digest}",
            )


def _digest_of(source: Source, name: str) -> str | None:
    """Return a file's SHA-256: of the local file, else as the Hub lists it."""
    if source.is_here(name) or source.listing is None:
        return sha256_of(source.root / name)
    return source.listing.digests.get(name)


def _compare_accounting(
    artifact: Artifact, experts: ExpertMap, result: CheckResult, *, is_own: bool
) -> None:
    """Compare tensor names; for an ancestor's source only copied tensors, since experts have other names now."""
    tensors = artifact.manifest.tensors
    if not is_own:
        what = f"{names.MANIFEST}: tensors: copied (against the source)"
        compare_names(what, "tensor", tensors.copied, experts.copied, result)
        return
    for kind in ("converted", "copied", "dropped"):
        what = f"{names.MANIFEST}: tensors: {kind} (against the source)"
        compare_names(what, "tensor", getattr(tensors, kind), getattr(experts, kind), result)
    is_ours = (
        artifact.manifest.hqconv_version == __version__
    )  # another version may phrase reasons differently
    for kind, what, expected, recorded in (
        (
            "converted",
            "A tensor was converted for another layer.",
            experts.converted,
            tensors.converted,
        ),
        (
            "dropped",
            "A tensor was dropped for another reason.",
            experts.dropped if is_ours else {},
            tensors.dropped,
        ),
    ):
        for name, value in expected.items():
            if (found := recorded.get(name, value)) != value:
                result.add(f"{names.MANIFEST}: tensors: {kind}, tensor {name}", what, value, found)


def _compare_copied(
    artifact: Artifact,
    source: Source,
    model: PublishedModel | None,
    expected: Collection[str],
    copied: Mapping[str, Placed],
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Compare dtype, shape and bytes of every copied tensor; names of others are compared elsewhere.

    model: of GGUF files, whose tensors no artifact has as they are: the reference's are compared, and each stored
    tensor beside the experts must be in one of them, or be left out with reason.
    """
    for name in sorted(set(expected) - copied.keys()):
        result.add(
            f"tensor {name}", "A tensor of the source was not copied.", "in a model shard", "absent"
        )
    compared = sorted(copied.keys() & set(expected), key=lambda name: -copied[name][1].num_bytes)
    found = pool.map(
        lambda name: _difference(artifact, source, model, name, copied[name]), compared
    )
    for name, difference in sorted(zip(compared, found, strict=True)):
        if difference is not None:
            result.add(f"{copied[name][0]}, tensor {name}", *difference)
    if model is None:
        return
    used, tensors = (
        {part.name for name in compared for part in model.parts(name)},
        artifact.manifest.tensors,
    )
    for name, ref in model.stored.tensors.items():
        is_lost = (
            ref.name in tensors.dropped and not model.may_be_left_out(name) and "_exps." not in name
        )
        if is_lost or (
            ref.name not in used and ref.name not in {**tensors.converted, **tensors.dropped}
        ):
            what = "A tensor of the GGUF files is in no tensor of the artifact."
            result.add(
                f"source: {ref.name}",
                what,
                "in a model shard",
                tensors.dropped.get(ref.name, "absent"),
            )


def _difference(
    artifact: Artifact, source: Source, model: PublishedModel | None, name: str, place: Placed
) -> tuple[str, str, str] | None:
    """Return the finding about a copied tensor, with the expected and found texts; None for one that is right."""
    (path, entry), ref = place, source.tensors[name]
    if model is not None and not model.parts(name):
        return "A tensor is in no GGUF file.", "one with its values", "none"
    form = (ref.dtype, ref.shape) if model is None else model.form(name)
    if form != (entry.dtype, entry.shape):
        what = "A copied tensor has another dtype or shape than the source's."
        return what, f"{form[0]} {list(form[1])}", f"{entry.dtype} {list(entry.shape)}"
    start = count = first = 0
    try:
        for theirs in (
            _source_bytes(source, ref)
            if model is None
            else _published_bytes(model, ref.name, form[0])
        ):
            ours = np.empty(len(theirs), np.uint8)
            artifact.read(path, ours.data, entry.offset_bytes + start)
            wrong = np.flatnonzero(ours != theirs)
            first = first if count or not len(wrong) else start + int(wrong[0])
            start, count = start + len(theirs), count + len(wrong)
    except NetworkError:
        raise
    except HqconvError as error:
        return f"A copied tensor cannot be compared: {error.what}", "", str(error.found)
    found = f"{count} bytes differ, the first at byte {first}"
    return ("A copied tensor is not the source's.", "the source's bytes", found) if count else None


def _source_bytes(source: Source, ref: TensorRef) -> Iterator[Array]:
    for start in range(0, ref.num_bytes, CHUNK_BYTES):
        data = np.empty(min(CHUNK_BYTES, ref.num_bytes - start), np.uint8)
        source.read_into(ref, data.data, start)
        yield data


def _published_bytes(model: PublishedModel, name: str, dtype: str) -> Iterator[Array]:
    for values in model.values(name):
        yield torch.from_numpy(values).to(torch_dtype(dtype)).view(torch.uint8).numpy().reshape(-1)


def _check_made_config(artifact: Artifact, model: PublishedModel, result: CheckResult) -> None:
    """Check a config.json that was made of a GGUF file's metadata."""
    config = read_json(artifact.root / names.CONFIG, result) or {}
    config["rope_scaling.factor"] = (config.get("rope_scaling") or {}).get("factor")
    for key, expected in {} if model.stored.has_config else model.config().items():
        found = config.get(key, expected)
        pair = (expected, found)
        if isinstance(expected, float) and isinstance(found, float):
            pair = (float(np.float32(expected)), float(np.float32(found)))
        if pair[0] != pair[1]:
            what = "The config is not that of the GGUF files' metadata."
            result.add(f"{names.CONFIG}: {key}", what, expected, found)


def _check_gguf_roles(artifact: Artifact, result: CheckResult) -> None:
    """Check that gate, up and down are the GGUF tensors of these names."""
    for name in artifact.layers:
        with suppress(VerificationError):  # reported already
            for role, parts in artifact.moe_layer(name).parts.items():
                template = parts["weight"].template
                if ".gguf:" in template and not is_role(role, template, parts["weight"].view.index):
                    where = f"{names.MANIFEST}: {name}: source_parts: {role}"
                    result.add(
                        where, "A projection is another tensor of the GGUF files.", role, template
                    )


# --- the source of an ancestor ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """Artifact that was converted from the given source, and the artifacts converted since.

    An artifact that was cut from an artifact has the codes of the first conversion, if every later one kept them: then
    it is compared with the first source as if that were its own.

    made: recorded facts of the artifact converted from the source. between: facts of the artifacts converted since,
    the nearest first; empty if the source is the artifact's own. is_original: the artifact's own source was quantized,
    and the given one is another: at best its original.
    """

    made: Manifest | Ancestor
    between: tuple[Manifest | Ancestor, ...] = ()
    is_original: bool = False

    @classmethod
    def of(cls, artifact: Artifact, source: Source) -> Lineage:
        """Find the source by its files, or else by their names; the artifact's own source if no step lists them."""
        steps, own = artifact.manifest.steps, artifact.manifest.source
        for keys in (("name", "header_sha256"), ("name",)):
            found = {tuple(getattr(file, key) for key in keys) for file in source.files}
            for number, step in enumerate(steps):
                listed = {tuple(getattr(file, key) for key in keys) for file in step.source.files}
                if number + len(keys) > 1 and listed == found:
                    return cls(step, steps[:number])
        is_original = (
            own.quantization_config is not None and own.quantization_config != source.quantization
        )
        return cls(
            artifact.manifest, is_original=is_original and other_source(own, source) is not None
        )

    @property
    def is_own(self) -> bool:
        """True if the artifact itself was converted from the source."""
        return not self.between and not self.is_original

    def why_not_comparable(self, artifact: Artifact) -> str:
        """Return why the artifact's codes are not comparable with the source's; "" if they are."""
        if self.is_own:
            return ""
        if self.is_original:
            return "the artifact was made from a quantized checkpoint, whose original this may be"
        quantizer = self.made.quantizer or RTN
        if quantizer not in QUANTIZERS:
            return "the first conversion was calibrated, which cannot be repeated here"
        if quantizer != RTN and self.made.quantizer_version != quantizer_version(quantizer):
            return "the first conversion searched with another version of the search"
        if self.made.dtype != artifact.param_dtype:
            return f"its parameters were {self.made.dtype} at first, and are {artifact.param_dtype} now"
        for name in artifact.layers:
            for step in self.between:
                layer = step.blocks.get(name)
                conversion = None if layer is None else layer.conversion
                if conversion != DIRECT:
                    return (
                        f"{name} was {conversion} from an artifact: its codes are not the source's"
                    )
            layer = self.made.blocks.get(name)
            schema = (layer and layer.weight_schema) or self.made.weight_schema
            if schema != artifact.schema_of(name).to_dict():
                return f"{name} had another schema at first: its codes are not the source's"
        return ""
