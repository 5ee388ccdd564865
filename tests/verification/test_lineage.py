"""Artifacts that were cut from artifacts: what they say of where they come from, and held to the first source."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import RequestError, plural
from hqconv.schemas.grid import Grid
from tests.make import small
from tests.make.conversions import check, manifest, run, write_manifest
from tests.make.damage import Damaged
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

STEP = "the source is that of the artifact {} before"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an artifact of it, one cut from that, one cut from the second, and one in other codes."""
    folder = tmp_path_factory.mktemp("lineage")
    write_qwen3_moe(folder / "src", num_layers=2, num_experts=3)
    run(folder / "src", folder / "first", "int4-g64", Grid(2, 1), source_digests=True)
    run(folder / "first", folder / "second", "source", Grid(1, 2))
    run(folder / "second", folder / "third", "source")
    run(folder / "second", folder / "other", "int8")
    return folder


def findings(out: Path, source: Path) -> list[str]:
    report = check(out, source, "files", "weights")
    assert report.passed == (not any(result.findings for result in report.results))
    return [f"{f.where}: {f.what}" for result in report.results for f in result.findings]


def notes(out: Path, source: Path) -> list[str]:
    return check(out, source, "files").results[0].notes


def test_the_chain_is_carried(made: Path) -> None:
    steps = manifest(made / "third")["derived_from"]
    assert "derived_from" not in manifest(made / "first")
    for step, name in zip(steps, ("second", "first"), strict=True):
        words = manifest(made / name)
        assert step["source"] == words["source"]
        assert (
            step["manifest_sha256"]
            == hashlib.sha256((made / name / "hqconv.json").read_bytes()).hexdigest()
        )
        assert (step["schema_name"], step["tp"], step["ep"]) == (
            words["schema_name"],
            words["tp"],
            words["ep"],
        )
    shard = made / "src/model.safetensors"
    assert (
        steps[-1]["source"]["files"][0]["sha256"] == hashlib.sha256(shard.read_bytes()).hexdigest()
    )


@pytest.mark.parametrize(("out", "num_steps"), [("first", 0), ("second", 1), ("third", 2)])
def test_against_the_first_source(made: Path, out: str, num_steps: int) -> None:
    assert findings(made / out, made / "src") == []
    told = [
        note for note in notes(made / out, made / "src") if " before" in note and "artifact" in note
    ]
    assert told == ([STEP.format(plural(num_steps, "step"))] if num_steps else [])
    measured = check(made / out, made / "src", "weights").results[0].measured
    errors = [words["relative_error"] for layer in measured.values() for words in layer.values()]
    assert len(errors) == 6
    assert (
        min(errors) > 0.05
    )  # of the first conversion; the artifact's own manifest says 0 of the last


def test_against_an_artifact_on_the_way(made: Path) -> None:
    for source in ("first", "second"):
        assert findings(made / "third", made / source) == []


def test_codes_that_are_not_the_first_sources(made: Path) -> None:
    report = hqconv.verify(made / "other", made / "src", device="cpu")
    weights = next(result for result in report.results if result.name == "weights")
    assert any("was requantized from an artifact" in note for note in weights.notes)
    assert report.passed
    measured = [
        role["relative_error"] for layer in weights.measured.values() for role in layer.values()
    ]
    assert 0.05 < min(measured) < max(measured) < 0.5
    with pytest.raises(RequestError, match="cannot be compared with this source"):
        check(made / "other", made / "src", "weights")
    assert findings(made / "other", made / "second") == []


def test_a_made_up_chain_drops_no_check(made: Path, tmp_path: Path) -> None:
    """All codes altered, digests made anew, and an ancestor by which they are not comparable."""
    out = Path(shutil.copytree(made / "other", tmp_path / "out"))
    copy = Damaged(out, made / "src", "int8")
    for path in sorted(
        one.relative_to(out).as_posix() for one in out.glob("experts/*/*.safetensors")
    ):
        for local in range(3):
            copy.expert_bytes(
                path, f"{path.split('/')[2].removesuffix('.safetensors')}.w2_weight", local
            )[:] ^= 0x77
    copy.reseal()
    for source in (made / "src", None):
        assert not hqconv.verify(out, source, device="cpu").passed


def test_a_made_up_chain_of_another_model(made: Path, tmp_path: Path) -> None:
    """All sums are right: without the source nothing is wrong."""
    tensors = load_file(
        write_qwen3_moe(tmp_path / "src", num_layers=2, num_experts=3, seed=1) / "model.safetensors"
    )
    own = load_file(made / "src/model.safetensors")
    tensors = {name: one if ".experts." in name else own[name] for name, one in tensors.items()}
    save_file(tensors, tmp_path / "src/model.safetensors", {"format": "pt"})
    run(tmp_path / "src", tmp_path / "out", "int8")
    words, other = manifest(tmp_path / "out"), manifest(made / "other")
    words |= {"source": other["source"], "derived_from": other["derived_from"]}
    write_manifest(tmp_path / "out", {key: words[key] for key in other})
    assert check(tmp_path / "out").passed
    report = hqconv.verify(tmp_path / "out", made / "src", device="cpu")
    assert {f.what for one in report.results for f in one.findings} == {
        "The weights are not the source's in any format."
    }


def test_through_the_checkpoint_layout(made: Path, tmp_path: Path) -> None:
    """Whose files are named as the first source's."""
    run(made / "src", tmp_path / "packed", "int4-g64", layout="checkpoint")
    run(tmp_path / "packed", tmp_path / "out", "source")
    assert findings(tmp_path / "out", made / "src") == []
    assert findings(tmp_path / "out", tmp_path / "packed") == []


@pytest.mark.parametrize(
    "name", ["fp8_blocks", "gptq", "nvfp4", "gpt_oss_floats", "gpt_oss_mxfp4", "qwen3_vl"]
)
def test_other_families_and_formats(name: str, tmp_path: Path) -> None:
    source, schema = small.GOOD[name]
    src = small.save(tmp_path / "src", source())
    run(src, tmp_path / "first", schema)
    run(tmp_path / "first", tmp_path / "out", "source", Grid(1, 2))
    assert findings(tmp_path / "out", src) == []


def test_searched_scales_are_searched_again(made: Path, tmp_path: Path) -> None:
    run(made / "src", tmp_path / "first", "int4-g64", quantizer="mse")
    run(tmp_path / "first", tmp_path / "out", "source", Grid(2, 1))
    assert "quantizer" not in manifest(tmp_path / "out")
    assert findings(tmp_path / "out", made / "src") == []
    words = manifest(tmp_path / "out")
    words["derived_from"][0]["quantizer_version"] += 1
    write_manifest(tmp_path / "out", words)
    with pytest.raises(RequestError, match="another version of the search"):
        check(tmp_path / "out", made / "src", "weights")


def damaged(folder: Path, tensor: str) -> Path:
    """Another model of the same names and shapes: one byte of a tensor differs."""
    src = write_qwen3_moe(folder / "src", num_layers=2, num_experts=3)
    path = src / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size + json.loads(data[8 : 8 + size])[tensor]["data_offsets"][0]
    data[begin + 1] ^= 0x01
    path.write_bytes(data)
    return src


@pytest.mark.parametrize("has_digests", [True, False])
@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("model.layers.1.mlp.experts.1.up_proj.weight", "expert 1"),
        ("model.layers.0.mlp.gate.weight", "tensor model.layers.0.mlp.gate.weight"),
    ],
)
def test_another_first_source_is_found(
    made: Path, tmp_path: Path, tensor: str, where: str, has_digests: bool
) -> None:
    out = tmp_path / "out"
    if has_digests:
        out = made / "second"
    else:
        run(made / "src", tmp_path / "first", "int4-g64")
        run(tmp_path / "first", out, "source")
    found = findings(out, damaged(tmp_path, tensor))
    assert any(where in one for one in found), found
    assert any("source, file model.safetensors" in one for one in found) == has_digests


def test_the_same_chain_from_the_same_artifact(made: Path, tmp_path: Path) -> None:
    run(made / "first", tmp_path / "second", "source", Grid(1, 2), threads=1)
    assert snapshot(tmp_path / "second") == snapshot(made / "second")


# --- the original of a quantized source

ROWS: dict[
    str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
] = {  # of the original's stack → gate, up
    "": lambda rows: (rows[0::2], rows[1::2]),
    "a writer cut alternating rows in halves": lambda rows: (
        rows[: len(rows) // 2],
        rows[len(rows) // 2 :],
    ),
    "are exchanged": lambda rows: (rows[1::2], rows[0::2]),
}


@pytest.mark.parametrize("fault", ROWS)
def test_the_original_of_a_quantized_source(fault: str, tmp_path: Path) -> None:
    """Of gpt_oss, whose gate and up alternate, quantized by a writer that took them apart."""
    original, config = small.gpt_oss_floats()
    written = {
        name: one for name, one in original.items() if not name.startswith(f"{small.LAYER}.")
    }
    for expert in range(small.E):
        gate, up = ROWS[fault](original[f"{small.LAYER}.gate_up_proj"][expert].T)
        down = original[f"{small.LAYER}.down_proj"][expert].T
        for role, weight in (("gate", gate), ("up", up), ("down", down)):
            name, scale = f"{small.LAYER}.{expert}.{role}_proj", weight.float().abs().max() / 448
            written |= {
                f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
                f"{name}.weight_scale": scale,
            }
            written[f"{name}.bias"] = torch.zeros(len(weight)).bfloat16()
    words = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    run(
        small.save(tmp_path / "src", (written, {**config, "quantization_config": words})),
        tmp_path / "out",
        "int8",
    )
    report = check(
        tmp_path / "out", small.save(tmp_path / "original", (original, config)), device="cpu"
    )
    weights = next(result for result in report.results if result.name == "weights")
    told = [f.what for f in weights.findings]
    assert not report.passed
    assert any("whose original this may be" in note for note in weights.notes)
    if fault:
        assert fault in told[0]
    else:
        assert told == ["The source is another one than the artifact was converted from."]
        assert all(role["cosine"] > 0.99 for role in weights.measured[small.LAYER].values())
