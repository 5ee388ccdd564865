"""GGUF files beside a checkpoint as their headers tell of them: experts in the ones, all other tensors in the other.

No torch is loaded for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hqconv.errors import InputError, RequestError
from hqconv.io.gguf_header import library, read_header
from hqconv.io.protocols import SourceFile
from hqconv.models.expert_map import ExpertMap
from hqconv.models.family_choice import looks_like_expert
from hqconv.models.gguf_experts import map_gguf
from hqconv.schemas.artifact_names import INDEX, SINGLE
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.safetensors_headers import SafetensorsHeaders

_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")

Opened = TypeVar("Opened", bound=SafetensorsHeaders)


def open_with_gguf_as(root: Path, plain: type[Opened], mixed: type[Opened]) -> Opened:
    """A folder with GGUF files: its experts come from them, unless the safetensors hold experts themselves.

    Opened as `mixed`, or else as `plain`.
    Raises RequestError where there are no safetensors or no gguf library; InputError for what cannot be read.
    """
    if not any((root / name).is_file() for name in (SINGLE, INDEX)):
        raise RequestError(
            "GGUF files alone are not enough: only experts are taken from them.",
            where=str(root),
            expected=f"config.json, and {SINGLE} or {INDEX} with all of the model's other tensors",
            found=", ".join(sorted(path.name for path in root.glob("*.gguf"))[:5]),
            remedy="Put the original model's config.json and its safetensors without the experts into the folder.",
        )
    source = plain.open(str(root))
    if any(looks_like_expert(name, len(ref.shape)) for name, ref in source.tensors.items()):
        return source
    source.close()
    return mixed(root, name=root.resolve().name)


class GgufHeaders(SafetensorsHeaders):
    """A checkpoint whose experts lie in GGUF files. Their tensors are named `<file>.gguf:<tensor>`."""

    def __init__(self, root: Path, *, name: str) -> None:
        """Read all headers; see `open_with_gguf_as`."""
        super().__init__(root, name=name)
        self._of_safetensors = dict(self.tensors)
        self._of_gguf: dict[str, TensorRef] = {}
        files = list(self.files)
        for path in _gguf_files(root):
            status = self.guard.look(path.name)
            refs, sha256 = read_header(path, len(files))
            self._add(refs)
            files.append(SourceFile(path.name, status.st_size, sha256, status.st_mtime_ns))
        self.files = tuple(files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())

    def _add(self, refs: Mapping[str, TensorRef]) -> None:
        for tensor, ref in refs.items():
            if tensor in self._of_gguf:
                what, found = "A tensor is in two GGUF files.", f"also {self._of_gguf[tensor].name}"
                remedy = "Keep the files of one quantization in the folder."
                raise InputError(what, where=ref.name, expected="one", found=found, remedy=remedy)
            self._of_gguf[tensor] = self.tensors[ref.name] = ref

    def map_experts(self) -> ExpertMap:
        """The blocks in the GGUF files, and what becomes of every tensor. Raises as `map_gguf`."""
        experts = map_gguf(self._of_gguf, self._of_safetensors, self.config)
        for name in experts.converted:
            _check_decoder(self.tensors[name])
        return experts


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


def dequantize(raw: np.ndarray[Any, Any], ggml_type: str) -> np.ndarray[Any, Any]:
    """Bytes of whole blocks as float32, along the last dimension."""
    gguf = library()
    with np.errstate(all="ignore"):  # what is no number is refused where it is encoded
        floats: np.ndarray[Any, Any] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ggml_type])
    return floats


@cache
def _can_decode(ggml_type: str) -> bool:
    gguf = library()
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]][1]
    try:
        dequantize(np.zeros(block_bytes, np.uint8), ggml_type)
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
