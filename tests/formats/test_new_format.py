"""A new checkpoint format is one module: a format of this file, registered here, converts and verifies as all others.

Copy this file to test a real one: the writer of its checkpoint, its meaning, and the checks at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import InputError, RequestError
from hqconv.formats import encoding, quant_config
from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import Decoded, Encoding, MatrixHeaders, StoredMatrix, StoredTensor
from hqconv.formats.quant_config import ModuleRule, always, declared_formats, skipped_names
from hqconv.formats.source_format import SourceFormat
from tests.make import conversions
from tests.make.formats import FormatSpec, Written, write
from tests.make.packing import Draw, Stored

# --- the product module: what hqconv/formats/toy.py would hold -----------------------------------------------


def parse_toy(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Toy's config: 8-bit integers, a scale per `columns` columns."""
    size = config.integer("columns", 16)
    toy = SourceFormat("toy int8", "toy", "uint8", "", 1, size)
    return [skipped_names(config, "toy_skips"), always(toy)]


class Toy(Encoding):
    """Codes [N, K] from last to first column, and float scales [N, G]."""

    name = "toy"
    weight_names = ("backwards",)
    part_names = ("toy_scale",)

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        matrix.require_multiples(matrix.fmt.group_k)
        return [
            StoredTensor("weight", ("backwards",), ("U8",), ((matrix.n, matrix.k),)),
            StoredTensor("scale", ("toy_scale",), ("BF16",), matrix.scale_shapes),
        ]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        from hqconv.quantization import bit_codec

        return matrix.coded(
            bit_codec.as_words(matrix["weight"].flip(1).contiguous()), matrix["scale"]
        )


# --- the checkpoint --------------------------------------------------------------------------------------------


def encode_toy(draw: Draw, n: int, k: int, _second: torch.Tensor) -> Stored:
    """Random codes and scales, and what they mean."""
    codes = draw.codes(n, k, 8).to(torch.uint8)
    scale = draw.scales(n, k // 64).bfloat16()
    return Stored(
        {"backwards": codes.flip(1).contiguous(), "toy_scale": scale},
        codes.double() - 128,
        scale.double().repeat_interleave(64, 1),
    )


KEYS = Keys("columns toy_skips")
CONFIG = {"quant_method": "toy", "columns": 64, "toy_skips": ["lm_head"]}
SPEC = FormatSpec(encode_toy, {"quantization_config": CONFIG}, "`toy`")


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding.load_formats()
    monkeypatch.setattr(encoding, "ENCODINGS", dict(encoding.ENCODINGS))
    for table in ("METHODS", "ALIASES"):
        monkeypatch.setattr(quant_config, table, dict(getattr(quant_config, table)))
    quant_config.quant_method("toy", "old_toy", keys=KEYS)(parse_toy)
    encoding.register_encoding(Toy)


@pytest.fixture
def written(_registered: None, tmp_path: Path) -> Written:
    return write(tmp_path / "source", SPEC)


# --- the checks: `convert`, `inspect`, `verify` and `dequantize`, which know nothing of the format -------------


def test_its_codes_are_kept(written: Written, tmp_path: Path) -> None:
    out = tmp_path / "out"
    conversions.run(written.folder, out, "source")
    layers = conversions.manifest(out)["blocks"].values()
    assert [layer["source_format"]["name"] for layer in layers] == ["toy int8"] * len(written.truth)
    assert {layer["conversion"] for layer in layers} == {"direct"}
    for name, expected in written.truth.items():
        decoded = hqconv.dequantize(out, layer=name)
        assert all(torch.equal(decoded[part], values) for part, values in expected.items())
    conversions.assert_verified(out, written.folder)


def test_a_tensor_of_another_format_is_refused(written: Written, tmp_path: Path) -> None:
    path = written.folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.1." in name and name.endswith("toy_scale"))
    tensors[name.replace("toy_scale", "qzeros")] = tensors[name].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match="qzeros"):
        conversions.run(written.folder, tmp_path / "out", "source")


@pytest.mark.usefixtures("_registered")
def test_its_config_is_read_under_both_names() -> None:
    for method in ("toy", "old_toy"):
        declared = declared_formats({**CONFIG, "quant_method": method}, {})
        assert (declared.method, declared.of("a.experts.0.w1").group_k) == ("toy", 64)
        assert declared.of("lm_head").is_float


def test_without_its_module_it_is_not_supported() -> None:
    with pytest.raises(RequestError, match="'toy' is not supported"):
        declared_formats(CONFIG, {})
