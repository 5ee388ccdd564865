"""Layers whose projections have formats of their own: GPTQModel's `dynamic` with more bits for one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import RequestError
from hqconv.formats.source_format import PER_PROJECTION, SourceFormat
from hqconv.schemas.grid import Grid
from tests.make import configs, conversions, packing
from tests.make.formats import write
from tests.make.layouts import plain
from tests.make.packing import Draw
from tests.make.spec import FormatSpec

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """int4 with gate and up, int8 with down, as `dynamic` says; what they mean is beside it, in float32."""
    words = configs.gptq(dynamic={r"+:.*\.down_proj": {"bits": 8, "group_size": 64}})
    spec = FormatSpec(packing.gptq(4, 128), words, "", dtype="float16")
    written = write(tmp_path / "src", spec, hidden=128, inner=128, experts=2)
    path = written.folder / "model.safetensors"
    tensors, truth = load_file(path), {}
    for name in [name for name in tensors if ".down_proj." in name]:
        del tensors[name]
    for layer, parts in written.truth.items():
        for e in range(2):
            stored = packing.gptq(8, 64)(Draw(7 + e), 128, 128, torch.tensor(0.01))
            tensors |= {
                f"{layer}.{e}.down_proj.{part}": tensor for part, tensor in stored.parts.items()
            }
            truth[f"{layer}.{e}.down_proj.weight"] = stored.values()
            for role, word in (("w1", "gate_proj"), ("w3", "up_proj")):
                truth[f"{layer}.{e}.{word}.weight"] = parts[role][e].clone()
    save_file(tensors, path, {"format": "pt"})
    twin = tmp_path / "twin"
    twin.mkdir()
    save_file(
        {"model.norm.weight": torch.ones(8), **truth}, twin / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((written.folder / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    return written.folder


def test_it_is_requantized_from_what_each_projection_means(source: Path, tmp_path: Path) -> None:
    outs = {}
    for name in ("src", "twin"):
        outs[name] = tmp_path / f"out-{name}"
        conversions.run(tmp_path / name, outs[name], "int3-g64", Grid())
    block = conversions.manifest(outs["src"])["blocks"][LAYER]
    assert block["conversion"] == "requantized"
    found = SourceFormat.from_dict(block["source_format"])
    assert found.encoding == PER_PROJECTION
    assert [found.of(role).b_dtype for role in ("w1", "w3", "w2")] == ["uint4", "uint4", "uint8"]
    assert found.to_dict() == block["source_format"]
    files = [
        {path.name: path.read_bytes() for path in sorted((out / "experts").rglob("*.safetensors"))}
        for out in outs.values()
    ]
    assert files[0] == files[1]
    conversions.assert_verified(outs["src"], source)


def test_both_codes_are_kept(source: Path, tmp_path: Path) -> None:
    """What a float32 checkpoint of these numbers means is decoded again, exactly."""
    layer = hqconv.inspect(source)
    assert "w1 and w3: gptq int4" in json.dumps(layer)
    assert "w2: gptq int8" in json.dumps(layer)
    assert "source (int4+int8-g64)" in layer["direct_schemas"]
    out = tmp_path / "out"
    report = conversions.run(source, out, "source")
    assert report.plan.spec.schema.name == "int4+int8-g64"
    words = conversions.manifest(out)["blocks"][LAYER]
    assert words["conversion"] == "direct"
    assert all(one["relative_error"] == 0 for one in words["quantization_error"].values())
    conversions.assert_verified(out, source)
    truth = load_file(tmp_path / "twin/model.safetensors")
    found = hqconv.dequantize(out, layer=LAYER)
    for expert in range(2):
        for role, word in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            assert torch.equal(
                found[role][expert], truth[f"{LAYER}.{expert}.{word}.weight"].float()
            )


def test_one_gemm_is_kept_beside_another_schema(source: Path, tmp_path: Path) -> None:
    """Also where an override names the schema of one GEMM, and the other must keep its codes."""
    conversions.run(source, tmp_path / "same", "int4", Grid())
    assert (
        conversions.manifest(tmp_path / "same")["blocks"][LAYER]["conversion"]
        == "w13 direct; w2 requantized"
    )
    (tmp_path / "r.toml").write_text(
        'schema = "source"\n[[override]]\nlayers = "0"\nw2.schema = "int4-g64"\n'
    )
    summary = hqconv.convert(
        source, tmp_path / "out", config=tmp_path / "r.toml", target="sm90", device="cpu"
    )
    assert summary.plan.layers[0].encoding.schema.name == "int4+int4-g64"
    conversions.assert_verified(tmp_path / "out", source)
    conversions.assert_verified(tmp_path / "same", source)


def test_gate_and_up_that_differ_have_no_schema(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    overrides = config["quantization_config"]["dynamic"]
    config["quantization_config"]["dynamic"] = {
        r"+:.*\.up_proj": {"bits": 8, "group_size": 64},
        **overrides,
    }
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".down_proj." in name]:
        tensors[name.replace("down_proj", "up_proj")] = tensors[name].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match="its projections have formats of their own"):
        conversions.run(source, tmp_path / "out", "source")
    conversions.run(source, tmp_path / "out", "int8-g64")
    assert (
        conversions.manifest(tmp_path / "out")["blocks"][LAYER]["conversion"]
        == "w13 requantized; w2 direct"
    )
    conversions.assert_verified(tmp_path / "out", source)


def test_one_projection_may_be_left_plain(tmp_path: Path) -> None:
    words = configs.gptq(dynamic={r"-:.*\.down_proj": {}})
    written = write(
        tmp_path / "src",
        FormatSpec(packing.gptq(4, 128), words, "", dtype="float16"),
        hidden=128,
        inner=128,
    )
    path = written.folder / "model.safetensors"
    tensors = {
        name: tensor for name, tensor in load_file(path).items() if ".down_proj." not in name
    }
    draw = Draw(3)
    for layer, parts in written.truth.items():
        for e in range(len(parts["w1"])):
            stored = plain(draw, 128, 128, torch.tensor(1.0))
            tensors[f"{layer}.{e}.down_proj.weight"] = stored.parts["weight"]
    save_file(tensors, path, {"format": "pt"})
    conversions.run(written.folder, tmp_path / "out", "int4", Grid(tp=1))
    conversions.assert_verified(tmp_path / "out", written.folder)
