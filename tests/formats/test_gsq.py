"""The dialect of GSQ's converter: `quant_method: humming` with a format for each matrix under `dynamic`.

Source of its configs: convert_to_humming.py and humming_pack.py of IST-DASLab/GSQ, and config.json of Kimi-K2.5 in
2 bits, which has flat keys.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import HqconvError, InputError
from hqconv.formats.quant_config import declared_formats
from hqconv.sources.opening import open_source
from tests.make import conversions
from tests.make.configs import Json
from tests.make.formats import FormatSpec, Written, write
from tests.make.layouts import plain
from tests.make.packing import Draw, Encoder, Stored, little_endian, spread
from tests.make.qwen import set_config

SIZE = 64
_LAYER = "model.layers.0.mlp.experts"
_IGNORED = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate$"]


def _encode(bits: int, has_zero: bool) -> Encoder:
    """Codes of all values along K, bfloat16 scales, and the zero point as a float: the midpoint everywhere."""

    def encode(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        codes, scale = draw.codes(n, k, bits), draw.scales(n, k // SIZE, base=0.006).bfloat16()
        tensors = {"weight": little_endian(codes, bits), "weight_scale": scale}
        if has_zero:
            tensors["zero_point"] = torch.full_like(scale, float(1 << bits - 1))
        return Stored(tensors, (codes - (1 << bits - 1)).double(), spread(scale, n, k))

    return encode


def _matrix(bits: int, has_zero: bool) -> Json:
    """The config of one matrix."""
    matrix: Json = {"quant_method": "humming", "dtype": f"uint{bits}", "group_size": SIZE}
    return {**matrix, "has_zero_point": has_zero, "is_fp_zero_point": has_zero}


def _config(sign: str, bits: int, has_zero: bool, names: list[str], *, is_flat: bool) -> Json:
    """The converter's config; of forks that write "+:" and flat keys, and take "re:" off."""
    matrix = _matrix(bits, has_zero)
    weights = {key: value for key, value in matrix.items() if key != "quant_method"}
    weights |= {"num_bits": bits, "strategy": "group", "symmetric": not has_zero, "type": "int"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    config: Json = {
        "config_groups": {"group_0": {**group, "weights": weights}},
        "format": "pack-quantized",
        "quant_method": "humming",
        "ignore": _IGNORED,
        "quantization_status": "compressed",
    }
    if is_flat:
        weights["b_dtype"] = matrix["dtype"]
        config |= {"b_dtype": matrix["dtype"], "group_size": SIZE}
        config |= {"has_zero_point": has_zero, "is_fp_zero_point": has_zero}
        config["ignore"] = [name.removeprefix("re:") for name in _IGNORED]
    config["dynamic"] = {f"{sign}:{re.escape(name)}$": matrix for name in names}
    return config


def _flat(bits: int) -> Json:
    """The config of Kimi-K2.5 in 2 bits."""
    return {
        "quant_method": "humming",
        "b_dtype": f"uint{bits}",
        "weight_scale_group_size": SIZE,
        "weight_scale_type": "group",
        "has_zero_point": False,
        "ignore": _IGNORED,
    }


def _write(folder: Path, bits: int, has_zero: bool, dialect: str) -> Written:
    spec = FormatSpec(_encode(bits, has_zero), {}, "", dense=plain)
    done = write(folder, spec)
    names = [
        f"{layer}.{expert}.{word}"
        for layer in done.truth
        for expert in range(spec.sizes.experts)
        for word in ("gate_proj", "up_proj", "down_proj")
    ]
    config = _flat(bits)
    if dialect != "flat":
        config = _config(dialect, bits, has_zero, names, is_flat=dialect == "+")
    set_config(folder, quantization_config=config)
    return replace(done, spec=replace(spec, config={"quantization_config": config}))


def _values(folder: Path) -> dict[str, torch.Tensor]:
    with open_source(folder) as source:
        return {
            f"{layer.name}.{expert}.{role}": matrix.values()
            for layer in source.map_experts().layers
            for expert in range(layer.num_experts)
            for role, matrix in source.read_expert(
                layer, expert, ["w1", "w2", "w3"], torch.device("cpu")
            ).items()
        }


@pytest.mark.parametrize("dialect", ["-", "+", "flat"])
@pytest.mark.parametrize(("bits", "has_zero"), [(2, False), (2, True), (3, True)])
def test_the_dialects_convert(dialect: str, bits: int, has_zero: bool, tmp_path: Path) -> None:
    if dialect == "flat" and has_zero:
        pytest.skip("published without")
    done = _write(tmp_path / "src", bits, has_zero, dialect)
    found = _values(done.folder)
    truth = {
        f"{layer}.{expert}.{role}": values
        for layer, block in done.truth.items()
        for role, stack in block.items()
        for expert, values in enumerate(stack)
    }
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], values) for name, values in truth.items())
    conversions.run(done.folder, tmp_path / "out", "source")
    manifest = json.loads((tmp_path / "out/hqconv.json").read_text())
    (schema,) = {
        json.dumps(block["source_format"]["b_dtype"]) for block in manifest["blocks"].values()
    }
    assert schema == f'"uint{bits}"'
    assert hqconv.verify(tmp_path / "out", done.folder, checks=["files", "weights"]).passed


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_zero_point_that_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    folder = _write(tmp_path / "src", 2, True, "+").folder
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if "experts" in name and name.endswith("zero_point"))
    tensors[name][0, 0] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match="A zero point is NaN or infinite"):
        _values(folder)


def test_a_matrix_has_the_format_of_its_own_key() -> None:
    """Also where flat keys say otherwise under another name: Humming itself reads b_dtype then."""
    for sign in "-+":
        config = _config(sign, 2, False, [], is_flat=sign == "+")
        config["dynamic"] = {f"{sign}:{re.escape(_LAYER)}\\.7\\.down_proj$": _matrix(3, True)}
        found = declared_formats(config, {})
        assert found.of(_LAYER).b_dtype == "uint2"
        assert found.of_single(f"{_LAYER}.7.up_proj") is None
        own = found.of_single(f"{_LAYER}.7.down_proj")
        assert own is not None
        assert (own.b_dtype, own.group_k, own.has_zero_point) == ("uint3", SIZE, True)


@pytest.mark.parametrize("sign", ["-", "+"])
def test_other_layers_are_served_by_what_stock_vllm_reads(sign: str, tmp_path: Path) -> None:
    """config.json of the kernel layout: flat keys, patterns with "re:", and no key for an expert's matrix."""
    done = _write(tmp_path / "src", 2, True, sign)
    conversions.run(done.folder, tmp_path / "out", "source")
    written = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    config = written["source_quantization_config"]
    schema: Any = pytest.importorskip("humming.schema").BaseWeightSchema
    found = schema.from_config(config)
    assert (str(found.b_dtype), found.weight_scale_group_size, found.is_fp_zero_point) == (
        "uint2",
        SIZE,
        True,
    )
    assert config["ignore"] == _IGNORED
    assert config["dynamic"] == {}
    own = done.spec.config["quantization_config"]
    manifest = json.loads((tmp_path / "out/hqconv.json").read_text())
    assert manifest["source"]["quantization_config"] == own
    assert hqconv.verify(tmp_path / "out", done.folder, checks=["files"]).passed


def test_a_minus_without_a_format_leaves_out() -> None:
    for entry in ({}, {"quant_method": "humming"}):
        config = {**_flat(2), "dynamic": {f"-:{re.escape(_LAYER)}$": entry}}
        assert declared_formats(config, {}).of(_LAYER).is_float


def test_config_groups_must_say_something() -> None:
    config = _config("-", 2, True, [], is_flat=False)
    config["config_groups"]["group_0"]["targets"] = ["Conv1d"]
    with pytest.raises(HqconvError, match="makes no sense"):
        declared_formats(config, {})
