"""GGUF files as a source: of a whole model, or of the experts for safetensors in the same folder.

Each tensor has a ggml type, which the gguf library decodes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.errors import InputError, RequestError, first_few
from hqconv.gguf.experts import ExpertMapper, is_expert
from hqconv.gguf.header import GgufHeader, Value, parse_header, read_header
from hqconv.gguf.model import (
    Metadata,
    check_config,
    check_decoder,
    dequantize,
    dequantize_rows,
    map_tensors,
    model_config,
)
from hqconv.io import checkpoint_files
from hqconv.io.checkpoint_files import SidecarFiles, has_tokenizer
from hqconv.io.hub import Listing
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer, RawExperts
from hqconv.models.source_protocol import SourceFile, SourceReference
from hqconv.models.tensor_names import looks_like_expert
from hqconv.schemas.artifact_names import CONFIG
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import unicode_name
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    import numpy as np
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.encoding import SourceMatrix

_SPLIT = re.compile(r"(?P<model>.+)-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf")
_FETCHED_BYTES = 4 << 20  # of a header on the Hub at a time: a tokenizer's words are most of it
_OTHER_MODELS = ("mmproj", "imatrix")  # in names of files that hold no language model


def open_gguf(
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
    if chosen is not None or listing is not None:
        return GgufModelSource(root, chosen, repo_id=repo_id, listing=listing)
    if not checkpoint_files.holds_safetensors([path.name for path in root.iterdir()]):
        return GgufModelSource(root, repo_id=repo_id)
    source = SafetensorsSource(root)
    if any(looks_like_expert(name, len(ref.shape)) for name, ref in source.tensors.items()):
        return source
    source.close()
    return GgufSource(root)


class GgufSource(SafetensorsSource):
    """A checkpoint whose experts lie in GGUF files. Their tensors are named `<file>.gguf:<tensor>`."""

    reads_ahead = False

    def __init__(self, root: Path) -> None:
        """Read the headers of the safetensors and the GGUF files; see `open_gguf`."""
        super().__init__(root)
        self._published = dict(self.tensors)
        self._stored: dict[str, TensorRef] = {}
        names = sorted(path.name for path in root.glob("*.gguf"))
        _check_split(names, str(root))
        for name in names:
            self._add(name)
        self.tensors |= {ref.name: ref for ref in self._stored.values()}

    def _add(self, name: str) -> GgufHeader:
        """Add a file and its tensors; return its header. Raises InputError for a tensor of two files."""
        path = self.root / name
        number = len(self.files)
        if self._is_far(name):
            size = self._size(name)
            assert self.listing is not None
            remote = _HubFile(self.listing, name, size)
            header = parse_header(f"{self.repo_id}/{name}", name, remote, size, number)
        else:
            size = self.guard.look(name).st_size
            header = read_header(path, number)
        self.files += (SourceFile(name, size, header.sha256),)
        for tensor, ref in header.tensors.items():
            if tensor in self._stored:
                raise InputError(
                    "A tensor is in two GGUF files.",
                    where=ref.name,
                    expected="one",
                    found=f"also {self._stored[tensor].name}",
                    remedy="Keep the files of one quantization in the folder.",
                )
            self._stored[tensor] = ref
        return header

    def map_experts(self) -> ExpertMap:
        """Map the MoE layers in the GGUF files, and every tensor to its use. Raises as `ExpertMapper.map`."""
        return self._map(self._stored)

    def _map(self, stored: Mapping[str, TensorRef]) -> ExpertMap:
        experts = ExpertMapper(stored, self._published, self.config).map()
        for name in experts.converted:
            check_decoder(self.tensors[name])
        return experts

    def _header_sha256(self, path: Path) -> str:
        return read_header(path).sha256 if path.suffix == ".gguf" else super()._header_sha256(path)

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

        from hqconv.formats.encoding import SourceMatrix

        matrices = {}
        for role in roles:
            refs = layer.sources[expert][role]
            names = {content: f"{ref.name}, expert {expert}" for content, ref in refs.items()}
            weight = refs["weight"]
            num_rows, num_columns = layer.shape(role)
            rows = self._bytes(weight).reshape(num_rows, -1)
            floats = dequantize_rows(rows, weight.dtype, num_columns)
            if "scale_2" in refs:
                floats *= self._numbers(refs["scale_2"])
            bias = None
            if "bias" in refs:
                bias = torch.from_numpy(self._numbers(refs["bias"])).to(device)
            values = torch.from_numpy(floats).to(device)
            matrices[role] = SourceMatrix(names, floats=values, bias=bias)
        return matrices

    def _bytes(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        import numpy as np

        data = np.empty(ref.num_bytes, np.uint8)
        self.read_into(ref, data.data)
        return data

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
        """Read headers, and the config.json beside the files if it is a whole one; see `open_gguf`."""
        self._begin(root, repo_id, listing)
        self.tensors = {}
        names = _chosen_files(root, chosen, listing)
        is_one_file = chosen is not None and repo_id is None
        if is_one_file:
            self.place = root / names[0]
            self.name = unicode_name(_model_name(names[0]))
        self._stored = {}
        headers = [self._add(name) for name in names]
        self._metadata = headers[0].metadata
        meta = Metadata(names[0], self._metadata, self._stored)
        own_config = None if is_one_file else self._own_config(meta)
        self.config = model_config(meta) if own_config is None else own_config
        beside = {name: ref for name, ref in self._stored.items() if not is_expert(name)}
        self._derived, self._dropped = map_tensors(
            meta, beside, self.config, own_config is not None
        )
        self._published = {name: tensor.ref for name, tensor in self._derived.items()}
        # In the order of the files: derived ones by their own names, experts as they lie there.
        derived_from = {}
        second_halves = set()
        for tensor in self._derived.values():
            derived_from[tensor.stored[0].name] = tensor.ref
            second_halves |= {ref.name for ref in tensor.stored[1:]}
            for ref in tensor.stored:
                check_decoder(ref)
        for ref in self._stored.values():
            published = derived_from.get(ref.name, ref)
            if ref.name not in second_halves:
                self.tensors[published.name] = published
        self._finish(None if is_one_file else root)
        self.sidecar_files = with_tokenizer(self.sidecar_files, names[0], headers[0])

    def map_experts(self) -> ExpertMap:
        """Map the MoE layers, and every tensor to its use. Raises as `ExpertMapper.map`."""
        experts = self._map({name: ref for name, ref in self._stored.items() if is_expert(name)})
        return replace(experts, dropped={**experts.dropped, **self._dropped})

    def _own_config(self, meta: Metadata) -> dict[str, Any] | None:
        """Return the publisher's config.json beside the files, without its quantization; None for none or a stub."""
        if not (self.root / CONFIG).is_file():
            return None
        self.guard.look(CONFIG)
        config = checkpoint_files.read_config(self.root)
        if "hidden_size" not in config and "text_config" not in config:
            return None  # repos of GGUF files often have a model_type alone there
        check_config(config, meta)
        config.pop("quantization_config", None)
        return config

    def reference(self) -> SourceReference:
        """Return the reference for the decoded tensors."""
        from hqconv.gguf.reference import GgufReference

        return GgufReference(self._metadata, self._stored, super().read_into, self.config)

    # --- bytes

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill `buffer` with bytes of a tensor from byte `start` on, decoded; see `SafetensorsSource.read_into`."""
        derived = self._derived.get(ref.name)
        if derived is None:
            super().read_into(ref, buffer, start)
            return
        view = memoryview(buffer).cast("B")
        if view.nbytes:
            derived.read(super().read_into, view, ref.offset_bytes + start)

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor, as `read_into`."""
        for ref, buffer in pieces:
            self.read_into(ref, buffer)


@dataclass
class _HubFile:
    """A file of a Hub repo that is read from its start on, by range requests.

    position: in what is fetched. reached: in the file.
    """

    listing: Listing
    name: str
    size: int
    fetched: bytes = b""
    position: int = 0
    reached: int = 0

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        missing = num_bytes - (len(self.fetched) - self.position)
        if missing > 0:
            end = min(self.reached + max(missing, _FETCHED_BYTES), self.size)
            more = self.listing.read(self.name, self.reached, end)
            self.fetched = self.fetched[self.position :] + more
            self.position = 0
            self.reached = end
        begin = self.position
        self.position += num_bytes
        return self.fetched[begin : self.position]


def _model_name(name: str) -> str:
    """Return a file's name without its ending and its number in a split model."""
    match = _SPLIT.fullmatch(name)
    return match["model"] if match else name.removesuffix(".gguf")


def _chosen_files(root: Path, chosen: str | None, listing: Listing | None) -> list[str]:
    """Return the files of one model: of the folder's or repo's only one, or of the one that `chosen` names."""
    where = str(root)
    found = {path.name for path in root.glob("*.gguf")}
    if listing is not None:
        where = listing.repo_id
        found = set(listing.sizes)
    elif chosen is not None and (root / chosen).is_file():
        found.add(chosen)
    models: dict[str, list[str]] = {}
    for name in sorted(found):
        base = name.rpartition("/")[2].lower()
        if base.endswith(".gguf") and not any(word in base for word in _OTHER_MODELS):
            models.setdefault(_model_name(name), []).append(name)
    fitting = list(models)
    if chosen is not None:
        word = re.compile(rf"(?:^|[^a-z0-9]){re.escape(chosen.lower())}(?:$|[^a-z0-9_])")
        exact = [model for model, names in models.items() if chosen in names]
        fitting = exact or [model for model in models if word.search(model.lower())]
    if len(fitting) != 1:
        examples = fitting or list(models)
        example = models[examples[0]][0] if examples else "model.gguf"
        raise RequestError(
            "There is not one GGUF model to take.",
            where=where if chosen is None else f"{where}: {chosen}",
            expected="one model, of one file or of all files of a split one",
            found=first_few(fitting) or f"none of {first_few(sorted(models))}",
            remedy=f"Name the file, such as {where}/{example}.",
        )
    names = models[fitting[0]]
    _check_split(names, where)
    return names


def _check_split(names: list[str], where: str) -> None:
    """Check the names of files, and that of a split file all are present. Raises InputError."""
    for name in names:
        checkpoint_files.check_text(name, where)
        if {"{", "}"}.intersection(name):  # placeholders in the names that a manifest records
            raise InputError(
                "A GGUF file's name has braces.", where=name, remedy="Rename the file."
            )
        match = _SPLIT.fullmatch(name)
        if match is None:
            continue
        for number in range(1, int(match["count"]) + 1):
            partner = f"{match['model']}-{number:05d}-of-{match['count']}.gguf"
            if partner not in names:
                raise InputError(
                    "A file of a split GGUF file is missing.",
                    where=f"{where}/{partner}",
                    expected=f"files 00001 to {match['count']}",
                    remedy="Copy or download it.",
                )


# --- tokenizer: a file has its words, and the names of the rules that cut texts. What these do is known for `_RULES`
# alone: transformers takes GPT-2's for every name that it does not know.

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_NFC = "unicode form C"
_WHOLE_WORDS = "whole words first"
# tokenizer.ggml.pre → what published tokenizers of the name do, and transformers' reading of GGUF files leaves out.
_RULES = {
    "gpt-2": (),
    "gpt-4o": (),
    "minimax-m2": (),
    "qwen2": (_NFC,),
    "llama-bpe": (_WHOLE_WORDS,),
    "tekken": (_WHOLE_WORDS,),
}
_CONTROL = 3
_USER_DEFINED = 4
_INSTALL = "pip install 'transformers>=5.23'"


def with_tokenizer(beside: SidecarFiles, name: str, header: GgufHeader) -> SidecarFiles:
    """Add the files that a tokenizer in a file's metadata gives, or why none can be made. Loads no transformers."""
    if has_tokenizer(beside.names):
        return beside
    obstacle = _tokenizer_obstacle(header.metadata)
    is_known = not obstacle
    if is_known and find_spec("transformers") is None:
        obstacle = f"transformers is not installed ({_INSTALL})"
    if obstacle:
        remark = f"The tokenizer in {name} is left out: {obstacle}."
        beside = replace(beside, remarks=(*beside.remarks, remark))
    if not is_known:
        return beside
    files = [TOKENIZER, TOKENIZER_CONFIG]
    if isinstance(header.metadata.get("tokenizer.chat_template"), str):
        files.append(TEMPLATE)
    missing = tuple(file for file in files if file not in beside.names)
    generate = partial(make_tokenizer, name, header.metadata_file, missing)
    return replace(beside, generated=missing, generate=generate)


def _tokenizer_obstacle(metadata: Mapping[str, Value]) -> str:
    """Return why no tokenizer can be made of these rules; "" if they are known."""
    kind = metadata.get("tokenizer.ggml.model")
    rules = metadata.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama"):
        return f"its tokenizer.ggml.model, {kind or 'no value'}, is not known"
    if kind == "gpt2" and rules not in _RULES:
        return f"the rules of its tokenizer.ggml.pre, {rules or 'no value'}, are not known"
    return ""


def make_tokenizer(
    name: str, metadata_file: bytes, files: Sequence[str]
) -> tuple[dict[str, bytes], str]:
    """Return the files, and a sentence about how they were made; no files, and the reason, where that is impossible."""
    try:
        with tempfile.TemporaryDirectory(prefix="hqconv-tokenizer-") as folder:
            path = Path(folder) / "metadata.gguf"
            saved = Path(folder) / "tokenizer"
            path.write_bytes(metadata_file)
            _convert(path).save_pretrained(saved)
            contents = {file: (saved / file).read_bytes() for file in files}
    except Exception as error:  # noqa: BLE001 - of a library, about contents that it does not expect
        reason = f"{type(error).__name__}: {error}"[:500]
        return {}, f"No tokenizer was made from the metadata of {name}: {reason} ({_INSTALL})."
    return contents, (
        f"The tokenizer was made from the metadata of {name} by transformers {version('transformers')}; it may differ "
        f"from the publisher's: {', '.join(files)}."
    )


def _convert(path: Path) -> Any:
    """Build transformers' tokenizer. Raises ValueError where its ids are not those of the file."""
    from tokenizers.normalizers import NFC
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, document, config = get_gguf_tokenizer(str(path))
    backend, options = convert_gguf_tokenizer(architecture, document)
    rules = _RULES[document["pre_tokenizer_type"]] if document["tokenizer_type"] == "gpt2" else ()
    if _NFC in rules:
        backend.normalizer = NFC()
    if _WHOLE_WORDS in rules:
        backend.model.ignore_merges = True
        config.setdefault("add_bos_token", True)  # as llama.cpp does for the same names
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config, **options)
    _check_ids(tokenizer.get_vocab(), document)
    return tokenizer


def _check_ids(vocabulary: Mapping[str, int], document: Mapping[str, Any]) -> None:
    """Check that each id of the file is one word, and that special words have the file's ids."""
    tokens = document["tokens"]
    types = document.get("token_type") or [1] * len(tokens)
    if sorted(vocabulary.values()) != list(range(len(tokens))):
        raise ValueError(f"{len(vocabulary)} words are made of the {len(tokens)} of the file")
    for number, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED) and vocabulary.get(text) != number:
            raise ValueError(
                f"the special word {text!r} gets the id {vocabulary.get(text)} instead of {number}"
            )
