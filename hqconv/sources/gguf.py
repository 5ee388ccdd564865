"""GGUF files as the source of a model's experts; all other tensors come from safetensors in the same folder.

Each stack of experts has a type of its own, which the gguf library decodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hqconv.checkpoint.folder import INDEX_NAME, SINGLE_NAME, Checkpoint, SourceFile, TensorRef
from hqconv.checkpoint.gguf import GgufTensor, read_gguf_header
from hqconv.decode import Coded
from hqconv.errors import InputError, RequestError
from hqconv.experts.block import ExpertBlock
from hqconv.experts.gguf import COPY_AGAIN, map_gguf, wrong_shape
from hqconv.experts.map import ExpertMap, looks_like_expert
from hqconv.sources.stored import StoredMatrix

_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_CHUNK_NUMBERS = 1 << 18  # decoded at a time: the library's temporaries are several times as large


def open_with_gguf(root: Path) -> Checkpoint:
    """A folder with GGUF files: its experts come from them, unless the safetensors hold experts themselves.

    Raises RequestError where there are no safetensors or no gguf library; InputError for what cannot be read.
    """
    if not any((root / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        raise RequestError(
            "GGUF files alone are not enough: only experts are taken from them.",
            where=str(root),
            expected=f"config.json, and {SINGLE_NAME} or {INDEX_NAME} with all of the model's other tensors",
            found=", ".join(sorted(path.name for path in root.glob("*.gguf"))[:5]),
            remedy="Put the original model's config.json and its safetensors without the experts into the folder.",
        )
    checkpoint = Checkpoint.open(str(root))
    if any(looks_like_expert(name, len(ref.shape)) for name, ref in checkpoint.tensors.items()):
        return checkpoint
    checkpoint.close()
    return GgufSource.open(str(root))


@dataclass(frozen=True, eq=False)
class GgufMatrix(StoredMatrix):
    """A projection in the blocks of a ggml type; `parts["weight"]` are its bytes, on the host."""

    ggml_type: str
    device: torch.device

    def coded(self) -> Coded:
        """Nothing asks for codes: no target has them."""
        raise AssertionError(f"{self.name}: {self.format.name} has no codes of a kernel")

    def matrix(self) -> torch.Tensor:
        """The weights [out, in] as the gguf library decodes them, times their second scale; float32."""
        rows, columns = self.shape
        stored = self.parts["weight"].numpy().reshape(rows, -1)
        weights = np.empty(self.shape, np.float32)
        step = max(1, _CHUNK_NUMBERS // columns)
        for start in range(0, rows, step):
            weights[start : start + step] = _dequantize(stored[start : start + step], self.ggml_type)
        if "scale_2" in self.parts:
            weights *= self.parts["scale_2"].numpy()
        return torch.from_numpy(weights).to(self.device)


class GgufSource(Checkpoint):
    """A checkpoint whose experts lie in GGUF files. Their tensors are named `<file>.gguf:<tensor>`."""

    def __init__(
        self, root: Path, *, name: str, repo_id: str | None = None, revision: str | None = None
    ) -> None:
        """Read all headers; see `open_with_gguf`."""
        super().__init__(root, name=name, repo_id=repo_id, revision=revision)
        self._of_safetensors = dict(self.tensors)
        self._of_gguf: dict[str, TensorRef] = {}
        files = list(self.files)
        for path in _gguf_files(root):
            status = path.stat()
            header, sha256 = read_gguf_header(path)
            for tensor, info in header.items():
                self._add(path, tensor, info, len(files), status.st_size)
            files.append(SourceFile(path.name, status.st_size, sha256, status.st_mtime_ns))
        self.files = tuple(files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())

    def _add(self, path: Path, tensor: str, info: GgufTensor, file: int, file_bytes: int) -> None:
        ref = _ref(f"{path.name}:{tensor}", info, file, file_bytes)
        if tensor in self._of_gguf:
            what, remedy = "a tensor is in two GGUF files", "keep the files of one quantization in the folder"
            found = f"also {self._of_gguf[tensor].name}"
            raise InputError(what, where=ref.name, expected="one", found=found, remedy=remedy)
        self._of_gguf[tensor] = self.tensors[ref.name] = ref

    def map_experts(self) -> ExpertMap:
        """The blocks in the GGUF files, and what becomes of every tensor. Raises as `map_gguf`."""
        experts = map_gguf(self._of_gguf, self._of_safetensors, self.config)
        for name in experts.converted:
            _check_decoder(self.tensors[name])
        return experts

    def read_stored(
        self, block: ExpertBlock, expert: int, roles: Sequence[str], device: torch.device
    ) -> dict[str, StoredMatrix]:
        """One expert's projections; only their own bytes are read. Raises InputError as `read_into`."""
        stored: dict[str, StoredMatrix] = {}
        for role in roles:
            refs = block.sources[expert][role]
            parts = {part: self._read(ref, part) for part, ref in refs.items()}
            if "bias" in parts:
                parts["bias"] = parts["bias"].to(device)
            names = {part: f"{ref.name}, expert {expert}" for part, ref in refs.items()}
            words = (block.format, block.shape(role), parts, names)
            stored[role] = GgufMatrix(*words, ggml_type=refs["weight"].dtype, device=device)
        return stored

    def _read(self, ref: TensorRef, part: str) -> torch.Tensor:
        raw = np.empty(ref.num_bytes, np.uint8)
        self.read_into(ref, raw.data)
        if part == "weight":
            return torch.from_numpy(raw)
        return torch.from_numpy(_dequantize(raw, ref.dtype).reshape(ref.shape))


# --- files and types ---------------------------------------------------------------------------------------


def _gguf_files(root: Path) -> list[Path]:
    """The folder's GGUF files by name, all files of a split one among them."""
    paths = sorted(root.glob("*.gguf"))
    names = {path.name for path in paths}
    for name in sorted(names):
        if "{" in name or "}" in name:  # braces are placeholders in the names that a manifest records
            raise InputError("A GGUF file's name has braces.", where=name, remedy="Rename the file.")
        match = _SPLIT.fullmatch(name)
        for number in range(1, int(match[3]) + 1) if match else ():
            partner = f"{match[1]}-{number:05d}-of-{match[3]}.gguf" if match else name
            if partner not in names:
                what, remedy = "A file of a split GGUF file is missing.", "Copy or download it."
                raise InputError(
                    what, where=str(root / partner), expected=f"all {match and match[3]}", remedy=remedy
                )
    return paths


def _library() -> Any:
    try:
        import gguf
        import gguf.quants
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise RequestError(
            "Reading experts from GGUF files needs the gguf library, which is not installed.",
            remedy="Run: pip install 'hqconv[gguf]'",
        ) from None
    return gguf


def _dequantize(raw: np.ndarray[Any, Any], ggml_type: str) -> np.ndarray[Any, Any]:
    """Bytes of whole blocks as float32, along the last dimension."""
    library = _library()
    with np.errstate(all="ignore"):  # what is no number is refused where it is encoded
        floats: np.ndarray[Any, Any] = library.quants.dequantize(raw, library.GGMLQuantizationType[ggml_type])
    return floats


@cache
def _can_decode(ggml_type: str) -> bool:
    library = _library()
    block_bytes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[ggml_type]][1]
    try:
        _dequantize(np.zeros(block_bytes, np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _check_decoder(ref: TensorRef) -> None:
    if not _can_decode(ref.dtype):
        raise InputError(
            "The gguf library cannot decode the type of a stack of experts.",
            where=ref.name,
            expected="a type for weights",
            found=ref.dtype,
            remedy="Quantize the GGUF file to another type, or try a newer gguf library.",
        )


def _ref(full: str, info: GgufTensor, file: int, file_bytes: int) -> TensorRef:
    """A tensor's place, checked against its type and the file's length."""
    library = _library()
    try:
        kind = library.GGMLQuantizationType(info.type_number)
        block_numbers, block_bytes = library.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        what, expected = "a tensor has a type that the gguf library does not know", "a type of ggml"
        found, remedy = f"type {info.type_number}", "use GGUF files of llama.cpp, or a newer gguf library"
        raise InputError(what, where=full, expected=expected, found=found, remedy=remedy) from None
    if info.shape and info.shape[-1] % block_numbers:
        expected = f"rows of whole {kind.name} blocks, {block_numbers} numbers each"
        raise wrong_shape(full, expected, info.shape)
    num_bytes = math.prod(info.shape) // block_numbers * block_bytes
    end = info.offset_bytes + num_bytes
    if end > file_bytes:
        what, found = "the file is truncated: it ends before the tensor does", f"{file_bytes} bytes"
        raise InputError(what, where=full, expected=f"{end} bytes", found=found, remedy=COPY_AGAIN)
    return TensorRef(full, kind.name, info.shape, file, info.offset_bytes, num_bytes)
