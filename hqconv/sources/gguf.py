"""GGUF files as a source: of a whole model, or of the experts for safetensors in the same folder.

Each tensor has a ggml type, which the gguf library decodes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.errors import InputError, RequestError, first_few
from hqconv.io import checkpoint_files
from hqconv.io.checkpoint_files import check_text, has_tokenizer, holds_safetensors
from hqconv.io.durable_files import source_errors
from hqconv.io.gguf_header import (
    COPY_AGAIN,
    GgufHeader,
    StoredModel,
    Value,
    metadata_alone,
    parse_header,
    read_header,
)
from hqconv.io.hub import Listing
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.expert_map import ExpertMap
from hqconv.models.family_choice import looks_like_expert
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import MadeFiles, SourceFile
from hqconv.schemas.artifact_names import CONFIG
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import open_regular, unicode_name
from hqconv.sources.derived_tensor import check_decoder, dequantize, dequantize_rows
from hqconv.sources.gguf_experts import is_expert, map_gguf
from hqconv.sources.gguf_model import Metadata, check_config, map_others, model_config
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    import numpy as np
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.source_matrix import SourceMatrix

_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_FETCHED_BYTES = 4 << 20  # of a header on the Hub at a time: a tokenizer's words are most of it
_OTHER_MODELS = ("mmproj", "imatrix")  # in names of files that hold no language model


def open_with_gguf(
    root: Path,
    chosen: str | None = None,
    *,
    repo_id: str | None = None,
    listing: Listing | None = None,
) -> SafetensorsSource:
    """Open GGUF files: a whole model, or the experts for the safetensors in the same folder, unless these have experts.

    chosen: a file or a part of its name, for a whole model of these files alone. repo_id, listing: of a Hub repo, with
    its snapshot at `root`. Raises RequestError without the gguf library, for an unclear choice, and for a model
    that is not known; InputError for unreadable or contradictory files.
    """
    if (
        chosen is not None
        or listing is not None
        or not holds_safetensors([path.name for path in root.iterdir()])
    ):
        return GgufModelSource(root, chosen, repo_id=repo_id, listing=listing)
    source = SafetensorsSource(root)
    if any(looks_like_expert(name, len(ref.shape)) for name, ref in source.tensors.items()):
        return source
    source.close()
    return GgufSource(root)


class GgufSource(SafetensorsSource):
    """A checkpoint whose experts lie in GGUF files. Their tensors are named `<file>.gguf:<tensor>`."""

    reads_ahead = False

    def __init__(self, root: Path) -> None:
        """Read the headers of the safetensors and the GGUF files; see `open_with_gguf`."""
        super().__init__(root)
        self._safetensors = dict(self.tensors)
        self._gguf: dict[str, TensorRef] = {}
        files = list(self.files)
        paths = sorted(root.glob("*.gguf"))
        names = [path.name for path in paths]
        _check_split(names, str(root))
        for path in paths:
            status = self.guard.look(path.name)
            header = read_header(path, len(files))
            self._add(header)
            self.tensors |= {ref.name: ref for ref in header.tensors.values()}
            files.append(SourceFile(path.name, status.st_size, header.sha256, status.st_mtime_ns))
        self.files = tuple(files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())

    def _add(self, header: GgufHeader) -> None:
        """Add the tensors of one file. Raises InputError for a tensor of two files."""
        for tensor, ref in header.tensors.items():
            if tensor in self._gguf:
                what, found = "A tensor is in two GGUF files.", f"also {self._gguf[tensor].name}"
                remedy = "Keep the files of one quantization in the folder."
                raise InputError(what, where=ref.name, expected="one", found=found, remedy=remedy)
            self._gguf[tensor] = ref

    def map_experts(self) -> ExpertMap:
        """Map the MoE layers in the GGUF files, and every tensor to its use. Raises as `map_gguf`."""
        experts = map_gguf(self._gguf, self._safetensors, self.config)
        for name in experts.converted:
            check_decoder(self.tensors[name])
        return experts

    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one expert to float32; only their bytes are read. Raises InputError as `read_into`."""
        import torch

        from hqconv.formats.source_matrix import SourceMatrix

        matrices = {}
        for role in roles:
            refs = layer.sources[expert][role]
            names = {part: f"{ref.name}, expert {expert}" for part, ref in refs.items()}
            (rows, columns), weight = layer.shape(role), refs["weight"]
            floats = dequantize_rows(self._bytes(weight).reshape(rows, -1), weight.dtype, columns)
            if "scale_2" in refs:
                floats *= self._numbers(refs["scale_2"])
            bias = (
                torch.from_numpy(self._numbers(refs["bias"])).to(device) if "bias" in refs else None
            )
            matrices[role] = SourceMatrix(
                names, floats=torch.from_numpy(floats).to(device), bias=bias
            )
        return matrices

    def _bytes(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        import numpy as np

        raw = np.empty(ref.num_bytes, np.uint8)
        self.read_into(ref, raw.data)
        return raw

    def _numbers(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        return dequantize(self._bytes(ref), ref.dtype).reshape(ref.shape)


class GgufModelSource(GgufSource):
    """A whole model in GGUF files.

    Experts are named `<file>.gguf:<tensor>`, every other tensor as in the published model: `read_into` decodes it.
    """

    def __init__(
        self,
        root: Path,
        chosen: str | None = None,
        *,
        repo_id: str | None = None,
        listing: Listing | None = None,
    ) -> None:
        """Read headers, and the config.json beside the files if it is a whole one; see `open_with_gguf`."""
        self._begin(root, repo_id, listing)
        self.metadata, self.index_sha256, self.quantization = (), None, None
        names = _chosen_files(root, chosen, listing)
        is_one_file = chosen is not None and repo_id is None
        if is_one_file:
            self.place, match = root / names[0], _SPLIT.fullmatch(names[0])
            self.name = unicode_name(match[1] if match else names[0].removesuffix(".gguf"))
        self._gguf = {}
        headers = [self._read_gguf(number, name) for number, name in enumerate(names)]
        self.files = tuple(file for file, _ in headers)
        meta = Metadata(names[0], headers[0][1].metadata)
        own = None if is_one_file else self._own_config(meta)
        self.config = model_config(meta, self._gguf) if own is None else own
        self.stored_model = StoredModel(
            headers[0][1].metadata, self._gguf, super().read_into, own is not None
        )
        others = {tensor: ref for tensor, ref in self._gguf.items() if not is_expert(tensor)}
        self._derived, self._dropped = map_others(meta, others, self.config, own is not None)
        for derived in self._derived.values():
            for part in derived.parts:
                check_decoder(part)
        # In the order of the files: derived ones by their own names, experts as they lie there.
        by_part = {derived.parts[0].name: derived.ref for derived in self._derived.values()}
        later = {part.name for derived in self._derived.values() for part in derived.parts[1:]}
        refs = [by_part.get(ref.name, ref) for ref in self._gguf.values() if ref.name not in later]
        self.tensors = {ref.name: ref for ref in refs}
        self._finish(None if is_one_file else root)
        if not has_tokenizer(self.other_files):
            made = tokenizer_files(names[0], headers[0][1].metadata)
            self.made = replace(
                made, names=tuple(name for name in made.names if name not in self.other_files)
            )

    def map_experts(self) -> ExpertMap:
        """Map the MoE layers, and every tensor to its use. Raises as `map_gguf`."""
        experts = {tensor: ref for tensor, ref in self._gguf.items() if is_expert(tensor)}
        found = map_gguf(
            experts, {name: derived.ref for name, derived in self._derived.items()}, self.config
        )
        for name in found.converted:
            check_decoder(self.tensors[name])
        because = found.chosen_because.replace(
            "experts from GGUF files", "all tensors from GGUF files"
        )
        return replace(found, chosen_because=because, dropped={**found.dropped, **self._dropped})

    def _own_config(self, meta: Metadata) -> dict[str, Any] | None:
        """Return the publisher's config.json beside the files, without its quantization; None for none or a stub."""
        if not (self.root / CONFIG).is_file():
            return None
        self.guard.look(CONFIG)
        config = checkpoint_files.read_config(self.root)
        if "hidden_size" not in config and "text_config" not in config:
            return None  # repos of GGUF files often have a model_type alone there
        check_config(config, meta)
        return {key: value for key, value in config.items() if key != "quantization_config"}

    def _read_gguf(self, number: int, name: str) -> tuple[SourceFile, GgufHeader]:
        path = self.root / name
        if self.listing is not None and not path.is_file():
            size = self._size(name)
            header = parse_header(
                f"{self.repo_id}/{name}", name, _HubFile(self.listing, name, size), size, number
            )
            file = SourceFile(name, size, header.sha256, 0)
        else:
            status = self.guard.look(name)
            header = read_header(path, number)
            file = SourceFile(
                name, status.st_size, header.sha256, 0 if self.repo_id else status.st_mtime_ns
            )
        self._add(header)
        return file, header

    def make_files(self) -> tuple[dict[str, bytes], str]:
        """Make the tokenizer from the first file's metadata, which is read again. Raises as `Source.make_files`."""
        if not self.made.origin:
            return {}, ""
        if self.made.obstacle:
            return make_tokenizer(self.made, b"")
        first = self.files[0]
        path = self.guard.path_of(first.name)
        if self.listing is not None and not path.is_file():
            remote = _HubFile(self.listing, first.name, first.size_bytes)
            raw, sha256 = metadata_alone(f"{self.repo_id}/{first.name}", remote, first.size_bytes)
        else:
            with source_errors(path), open(open_regular(path), "rb") as opened:  # noqa: PTH123 - of a descriptor
                raw, sha256 = metadata_alone(str(path), opened, first.size_bytes)
        if sha256 != first.header_sha256:
            what, remedy = (
                "The header of a GGUF file changed since the source was opened.",
                COPY_AGAIN,
            )
            expected, found = f"sha256 {first.header_sha256}", sha256
            raise InputError(what, where=str(path), expected=expected, found=found, remedy=remedy)
        return make_tokenizer(self.made, raw)

    def _header_sha256(self, path: Path) -> str:
        return read_header(path).sha256

    # --- bytes

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill `buffer` with bytes of a tensor from byte `start` on, decoded; see `SafetensorsSource.read_into`."""
        derived = self._derived.get(ref.name)
        if derived is None:
            super().read_into(ref, buffer, start)
            return
        view = memoryview(buffer).cast("B")
        if start < 0 or start + view.nbytes > ref.num_bytes:
            raise ValueError(
                f"{ref.name}: bytes {start} + {view.nbytes} are outside of {ref.num_bytes}"
            )
        if view.nbytes:
            derived.read(super().read_into, view, ref.offset_bytes + start)

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor, as `read_into`."""
        for ref, buffer in pieces:
            self.read_into(ref, buffer)


class _HubFile:
    """A file of a Hub repo that is read from its start on, by range requests."""

    def __init__(self, listing: Listing, name: str, size: int) -> None:
        self._listing, self._name, self._size = listing, name, size
        self._ahead, self._reached = memoryview(b""), 0

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        parts = [bytes(self._ahead[:num_bytes])]
        self._ahead = self._ahead[num_bytes:]
        missing = num_bytes - len(parts[0])
        while missing and self._reached < self._size:
            end = min(self._reached + max(missing, _FETCHED_BYTES), self._size)
            fetched = memoryview(self._listing.read(self._name, self._reached, end))
            self._reached = end
            parts.append(bytes(fetched[:missing]))
            self._ahead = fetched[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


def _chosen_files(root: Path, chosen: str | None, listing: Listing | None) -> list[str]:
    """Return the files of one model: of the folder's or repo's only one, or of the one that `chosen` names."""
    found = [path.name for path in root.glob("*.gguf")] if listing is None else list(listing.sizes)
    if listing is None and chosen is not None and (root / chosen).is_file():
        found.append(chosen)
    models: dict[str, list[str]] = {}
    for name in sorted(set(found)):
        if name.endswith(".gguf") and not any(
            word in name.rpartition("/")[2].lower() for word in _OTHER_MODELS
        ):
            match = _SPLIT.fullmatch(name)
            models.setdefault(match[1] if match else name.removesuffix(".gguf"), []).append(name)
    where = str(root) if listing is None else listing.repo_id
    fitting = list(models)
    if chosen is not None:
        exact = [model for model, names in models.items() if chosen in names]
        word = re.compile(rf"(?:^|[^a-z0-9]){re.escape(chosen.lower())}(?:$|[^a-z0-9_])")
        fitting = exact or [model for model in models if word.search(model.lower())]
    if len(fitting) != 1:
        example = (
            models[fitting[0]][0] if fitting else next(iter(models.values()), ["model.gguf"])[0]
        )
        path = f"{where}/{example}"
        raise RequestError(
            "There is not one GGUF model to take.",
            where=where if chosen is None else f"{where}: {chosen}",
            expected="one model, of one file or of all files of a split one",
            found=first_few(fitting) or f"none of {first_few(sorted(models))}",
            remedy=f"Name the file, such as {path}.",
        )
    names = models[fitting[0]]
    _check_split(names, where)
    return names


def _check_split(names: list[str], where: str) -> None:
    """Check the names of files, and that of a split file all are present. Raises InputError."""
    for name in sorted(names):
        check_text(name, where)
        if (
            "{" in name or "}" in name
        ):  # braces are placeholders in the names that a manifest records
            raise InputError(
                "A GGUF file's name has braces.", where=name, remedy="Rename the file."
            )
        match = _SPLIT.fullmatch(name)
        for number in range(1, int(match[3]) + 1) if match else ():
            partner = f"{match[1]}-{number:05d}-of-{match[3]}.gguf" if match else name
            if partner not in names:
                what, remedy = "A file of a split GGUF file is missing.", "Copy or download it."
                expected = f"all {match and match[3]}"
                raise InputError(what, where=f"{where}/{partner}", expected=expected, remedy=remedy)


# --- tokenizer: a file has its words, and the names of the rules that cut texts. What these do is known for `_RULES`
# alone: transformers takes GPT-2's for every name that it does not know.

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_NFC, _WHOLE_WORDS = "unicode form C", "whole words first"
# tokenizer.ggml.pre → what published tokenizers of the name do, and transformers' reading of GGUF files leaves out.
_RULES = {
    "gpt-2": (),
    "gpt-4o": (),
    "minimax-m2": (),
    "qwen2": (_NFC,),
    "llama-bpe": (_WHOLE_WORDS,),
    "tekken": (_WHOLE_WORDS,),
}
_CONTROL, _USER_DEFINED = 3, 4
_INSTALL = "run: pip install 'transformers>=5.23'"


def tokenizer_files(name: str, metadata: Mapping[str, Value]) -> MadeFiles:
    """Say which files the metadata of a file give, from its header; loads no transformers."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    names: tuple[str, ...] = (TOKENIZER, TOKENIZER_CONFIG)
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        names = (TEMPLATE, *names)
    if kind == "gpt2" and pre not in _RULES:
        return MadeFiles(
            name,
            obstacle=f"the rules of its tokenizer.ggml.pre, {pre or 'no value'}, are not known",
        )
    if kind not in ("gpt2", "llama"):
        return MadeFiles(
            name, obstacle=f"its tokenizer.ggml.model, {kind or 'no value'}, is not known"
        )
    if find_spec("transformers") is None:
        return MadeFiles(name, names, f"transformers is not installed ({_INSTALL})")
    return MadeFiles(name, names)


def make_tokenizer(made: MadeFiles, metadata_file: bytes) -> tuple[dict[str, bytes], str]:
    """Return the files, and a sentence about how they were made; no files, and the reason, where that is impossible.

    metadata_file: a GGUF file with the metadata alone.
    """
    if made.obstacle:
        return {}, made.failed(made.obstacle)
    try:
        with tempfile.TemporaryDirectory(prefix="hqconv-tokenizer-") as folder:
            path = Path(folder) / "metadata.gguf"
            path.write_bytes(metadata_file)
            saved = Path(folder) / "tokenizer"
            _convert(path).save_pretrained(saved)
            files = {name: (saved / name).read_bytes() for name in made.names}
    except ImportError as error:
        return {}, made.failed(
            f"transformers {_version('transformers')} cannot ({error}; {_INSTALL})"
        )
    except Exception as error:  # noqa: BLE001 - of a library, about contents that it does not expect
        return {}, made.failed(
            f"transformers {_version('transformers')}: {type(error).__name__}: {error}"[:500]
        )
    versions = f"transformers {_version('transformers')} and tokenizers {_version('tokenizers')}"
    return files, made.succeeded(versions)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of no known version"


def _convert(path: Path) -> Any:
    """Build transformers' tokenizer. Raises ValueError where its ids are not those of the file."""
    from tokenizers.normalizers import NFC
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, words, config = get_gguf_tokenizer(str(path))
    backend, more = convert_gguf_tokenizer(architecture, words)
    rules = _RULES[words["pre_tokenizer_type"]] if words["tokenizer_type"] == "gpt2" else ()
    if _NFC in rules:
        backend.normalizer = NFC()
    if _WHOLE_WORDS in rules:
        backend.model.ignore_merges = True
        config.setdefault("add_bos_token", True)  # as llama.cpp does for the same names
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config, **more)
    _check_ids(tokenizer.get_vocab(), words)
    return tokenizer


def _check_ids(vocabulary: Mapping[str, int], words: Mapping[str, Any]) -> None:
    """Check that each id of the file is one word, and that special words have the file's ids."""
    tokens, types = words["tokens"], words.get("token_type") or [1] * len(words["tokens"])
    if sorted(vocabulary.values()) != list(range(len(tokens))):
        raise ValueError(f"{len(vocabulary)} words are made of the {len(tokens)} of the file")
    for number, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED) and vocabulary.get(text) != number:
            raise ValueError(
                f"the special word {text!r} gets the id {vocabulary.get(text)} instead of {number}"
            )
