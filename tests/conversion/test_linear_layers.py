"""Conversions with `dense`: linear layers beside the experts, in Humming's checkpoint layout in the model shards."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import HqconvError, RequestError
from hqconv.formats.quant_config import declared_formats
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.artifact_names import DENSE_CONFIG
from hqconv.schemas.grid import Grid
from hqconv.schemas.options import load_recipe
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.calibrated import OPTIONS, write_text
from tests.make.conversions import assert_verified, check, manifest, run, run_until
from tests.make.damage import Damaged
from tests.make.decodable import write_quantized
from tests.make.families import save_family
from tests.make.qwen import set_config, write_qwen3_moe
from tests.make.tensors import load_all, raw, snapshot
from tests.make.tokenizer import write_tokenizer
from tests.make.vllm_quantized import CASES, store

SCHEMAS = ("int8", "fp8", "int4-g32", "int4-g32-zp", "int4-g32-e4m3", "mxfp4", "nvfp4")
QKV = "model.layers.0.self_attn.qkv_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear") / "src"
    save_family(folder, "qwen3_moe", inner=128, hidden=128)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def artifact(source: Path) -> Path:
    out = source.parent / "int4"
    run(source, out, "int8", dense="int4-g32-e4m3")
    return out


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_tensors_are_those_of_the_quantizer(
    source: Path, tmp_path: Path, schema: str, layout: str
) -> None:
    """Codes and scales of matrices that a server fuses, with one tensor-level scale."""
    weight_schema = resolve_schema(schema)
    if layout == "checkpoint" and weight_schema.is_coupled:
        with pytest.raises(RequestError, match="IndexError"):
            run(source, tmp_path / "out", "int8", dense=schema, layout=layout)
        return
    run(source, tmp_path / "out", "int8", dense=schema, layout=layout)
    assert_verified(tmp_path / "out", source)
    assert hqconv.check(tmp_path / "out", against=source)["passed"]
    stored, originals = load_all(tmp_path / "out"), load_all(source)
    for group, entry in manifest(tmp_path / "out")["linear_layers"].items():
        modules = [f"{group.rpartition('.')[0]}.{module}" for module in entry["shapes"]]
        weights = [originals.pop(f"{module}.weight").unsqueeze(0) for module in modules]
        expected = quantize_stacks(weights, weight_schema, "bfloat16")
        for module, stack in zip(modules, expected, strict=True):
            for part, tensor in stack.tensors.items():
                assert raw(stored.pop(f"{module}.{part}")) == raw(tensor[0]), (module, part)
    names = {name for name in originals.keys() & stored.keys() if "experts" not in name}
    assert not any("self_attn" in name and "proj" in name for name in names)
    assert all(torch.equal(stored[name], originals[name]) for name in names)


def test_the_config_names_these_layers_alone(artifact: Path, source: Path) -> None:
    """By the source's names and by those of vLLM, which fuses some."""
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    declared = declared_formats(config["source_quantization_config"], {})
    groups = manifest(artifact)["linear_layers"]
    quantized = {*groups}
    for group, entry in groups.items():
        quantized |= {f"{group.rpartition('.')[0]}.{module}" for module in entry["shapes"]}
    quantized |= {f"language_model.{name}" for name in quantized}
    others = {name.rpartition(".")[0] for name in load_all(source)} - quantized
    assert not any(declared.of(name).is_float for name in quantized)
    assert all(declared.of(name).is_float for name in {*others, "lm_head", "model.visual.o_proj"})


def _exchange(first: str, second: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors[first], tensors[second] = tensors[second], tensors[first]


def _k_is_v(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("weight", "weight_scale"):
        names = (f"model.layers.0.self_attn.{name}.{part}" for name in ("k_proj", "v_proj"))
        _exchange(*names, tensors)


def _another_layers(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("weight", "weight_scale"):
        names = (f"model.layers.{number}.self_attn.o_proj.{part}" for number in (0, 1))
        _exchange(*names, tensors)


def _a_neighbours_scale(tensors: dict[str, torch.Tensor]) -> None:
    scale = tensors["model.layers.0.self_attn.q_proj.weight_scale"].view(torch.uint8)
    scale[0] = scale[1].clone()


FAULTS: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "k_proj": _k_is_v,
    "o_proj": _another_layers,
    "q_proj": _a_neighbours_scale,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(
    artifact: Path, source: Path, tmp_path: Path, name: str
) -> None:
    """Although all digests are those of the wrong files."""
    copy = Damaged(tmp_path / "out", source, "int8")
    shutil.copytree(artifact, copy.root)
    paths = sorted(copy.root.glob("*.safetensors"))
    tensors = {key: tensor for path in paths for key, tensor in load_file(path).items()}
    FAULTS[name](tensors)
    for path in paths:
        save_file({key: tensors[key] for key in load_file(path)}, path, {"format": "pt"})
    copy.reseal()
    report = check(copy.root, source, "weights")
    assert not report.passed
    assert any(name in finding.where for result in report.results for finding in result.findings)
    if name != "q_proj":  # the scale of one group of 32 weights is below what `check` tells
        assert not hqconv.check(copy.root, against=source)["passed"]


def test_a_layer_that_is_listed_and_has_16_bits(
    artifact: Path, source: Path, tmp_path: Path
) -> None:
    copy = Damaged(tmp_path / "out", source, "int8")
    shutil.copytree(artifact, copy.root)
    original = load_all(source)["model.layers.0.self_attn.q_proj.weight"]
    [path] = [
        p for p in copy.root.glob("*.safetensors") if f"{QKV[:-8]}q_proj.weight" in load_file(p)
    ]
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"] = original
    save_file(tensors, path, {"format": "pt"})
    copy.reseal()
    for given in (source, None):
        report = check(copy.root, given, "files", "weights")
        assert all(result.findings for result in report.results)


@pytest.mark.parametrize("grid", [Grid(8), Grid(1, 16), Grid(2, 4), Grid(8, 64)])
def test_ranks_change_no_linear_layer(tmp_path: Path, grid: Grid) -> None:
    """Also with parts. Ranks that would cut a group are refused where a server shares attention among them."""
    sizes = {"num_layers": 1, "num_experts": 64, "hidden_size": 512, "intermediate_size": 256}
    write_qwen3_moe(tmp_path / "src", **sizes, with_attention=True)
    run(tmp_path / "src", tmp_path / "whole", "int8", dense="int8")
    for part in ("2/3", "3/3", "1/3"):
        run(tmp_path / "src", tmp_path / "out", "int8", grid, dense="int8", part=part)
    assert_verified(tmp_path / "out", tmp_path / "src")
    expected, found = load_all(tmp_path / "whole"), load_all(tmp_path / "out")
    names = [name for name in expected if "self_attn" in name]
    assert len(names) == 8
    assert all(raw(found[name]) == raw(expected[name]) for name in names)
    with pytest.raises(RequestError, match="cut a scale group"):
        run(tmp_path / "src", tmp_path / "fine", "int8", ep=64, dense="int8")


def test_a_recipe_chooses_by_names(source: Path, tmp_path: Path) -> None:
    """The last pattern that fits counts; modules that a server fuses have one schema."""
    (tmp_path / "recipe.toml").write_text(
        'schema = "int8"\ndense = "int8"\n'
        '[dense_layers."*.o_proj"]\nschema = "fp8"\n'
        '[dense_layers."model.layers.1.*"]\nschema = "none"\n'
        '[dense_layers."*.layers.1.*.v_proj"]\nschema = "int4-g32"\n'
    )
    recipe = load_recipe(tmp_path / "recipe.toml")
    run(source, tmp_path / "out", **recipe.options)
    found = {
        name: hqconv.dequantize(tmp_path / "out", layer=f"{name.rpartition('.')[0]}.{module}")
        for name, entry in manifest(tmp_path / "out")["linear_layers"].items()
        for module in [*entry["shapes"]][:1]
    }
    assert {*found} == {QKV, QKV.replace("qkv", "o"), QKV.replace(".0.", ".1.")}
    assert_verified(tmp_path / "out", source)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    declared = declared_formats(config["source_quantization_config"], {})
    bits = [
        declared.of(f"model.layers.{layer}.self_attn.{name}").b_dtype
        for layer in (0, 1)
        for name in ("qkv_proj", "o_proj")
    ]
    assert bits == ["uint8", "float8e4m3", "uint4", ""]


def test_a_calibration_chooses_their_codes_too(source: Path, tmp_path: Path) -> None:
    """Of 8 bits it chooses none, and what it chose is held to the source by `verify`."""
    write_text(tmp_path / "text")
    options = {**OPTIONS, "calibrate": tmp_path / "text"}
    for schema in ("int3-g32", "int8"):
        run(source, tmp_path / "rounded", "int8", dense=schema)
        run(source, tmp_path / schema, "int8", dense=schema, **options)
        assert_verified(tmp_path / schema, source)
        both = [load_all(tmp_path / name) for name in ("rounded", schema)]
        is_same = [
            torch.equal(*(tensors[f"{QKV[:-8]}{name}_proj.weight"] for tensors in both))
            for name in "qkv"
        ]
        assert is_same == [schema == "int8"] * 3
        shutil.rmtree(tmp_path / "rounded")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dense": "int4-g32-h64"}, "rotated"),
        ({"dense": "mxfp4", "dtype": "float16"}, "e8m0"),
        ({"dense": "int4-g64", "tp": 4, "schema": "int8"}, "tensor parallel sizes 1"),
    ],
)
def test_what_no_server_runs_is_refused(
    source: Path, tmp_path: Path, words: dict[str, Any], said: str
) -> None:
    with pytest.raises(HqconvError, match=re.escape(said)) as raised:
        run(source, tmp_path / "out", **{"schema": "int8", **words})
    assert "--dense" in raised.value.where
    assert not (tmp_path / "out").exists()


def test_other_sources_are_refused(source: Path, tmp_path: Path, artifact: Path) -> None:
    """Those without a layer in 16 bits; of an unknown model nobody knows what a server fuses."""
    with pytest.raises(RequestError, match="nothing to do"):
        run(artifact, tmp_path / "out", "source", dense="int8")
    other = tmp_path / "src"
    shutil.copytree(source, other)
    set_config(other, model_type="laguna")
    with pytest.raises(RequestError, match="model_type"):
        run(other, tmp_path / "out", "int8", dense="int8")


def test_biases_of_linear_layers_are_copied(tmp_path: Path) -> None:
    """And compared with the source's."""
    src, out = tmp_path / "src", Damaged(tmp_path / "out", tmp_path / "src", "int8")
    save_family(src, "qwen2_moe", inner=128, hidden=128)
    run(src, out.root, "int8", dense="int8")
    assert_verified(out.root, src)
    assert hqconv.dequantize(out.root, layer=f"{QKV[:-8]}q_proj").keys() == {"weight"}
    name = "model.layers.0.self_attn.q_proj.bias"
    [path] = [path for path in out.root.glob("*.safetensors") if name in load_file(path)]
    tensors = load_file(path)
    tensors[name] = tensors[name] + 1
    save_file(tensors, path, {"format": "pt"})
    out.reseal()
    report = check(out.root, src, "files", "weights")
    assert any(name in finding.where for result in report.results for finding in result.findings)


def test_columns_that_no_group_divides_stay(tmp_path: Path) -> None:
    """With a notice."""
    save_family(tmp_path / "src", "qwen3_moe", inner=64, hidden=96)
    report = run(tmp_path / "src", tmp_path / "out", "int8", dense="int4-g64")
    assert any("no whole scale groups" in text for text in report.warnings)
    groups = manifest(tmp_path / "out")["linear_layers"]
    assert not any("qkv" in name for name in groups)
    assert groups
    assert_verified(tmp_path / "out", tmp_path / "src")


# --- sources with quantized layers beside the experts


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor], Any], None]) -> None:
    """Change the tensors of a checkpoint, and its quantization config, in one file."""
    tensors, config = load_all(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config.setdefault("quantization_config", {}))
    for path in folder.glob("model*"):
        path.unlink()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in config.items() if value != {}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source in fp8, the experts too, with o_proj in bfloat16."""
    folder = tmp_path_factory.mktemp("mixed")
    write_quantized(folder / "src", "fp8", folder / "plain")
    plain = load_all(folder / "plain")

    def keep(tensors: dict[str, torch.Tensor], config: Any) -> None:
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            tensors[name] = plain[name].bfloat16()
            del tensors[f"{name}_scale_inv"]
            config.setdefault("modules_to_not_convert", []).append(name.removesuffix(".weight"))

    _edit(folder / "src", keep)
    return folder / "src"


def _assert_kept(out: Path, source: Path, modules: set[str]) -> None:
    """Only these modules are quantized, all other tensors and the source's config are as they were."""
    stored, originals = load_all(out), load_all(source)
    for name, tensor in originals.items():
        if ".experts." not in name and name.rpartition(".")[0] not in modules:
            assert raw(stored[name]) == raw(tensor), name
    own = json.loads((out / "config.json").read_text())["quantization_config"]
    config = own["source_quantization_config"]
    declared = declared_formats(config, {})
    assert all(declared.of(module).b_dtype == "uint4" for module in modules)
    assert config.pop(DENSE_CONFIG)["quant_method"] == "humming"
    assert config == json.loads((source / "config.json").read_text())["quantization_config"]
    of_source = declared_formats(config, {})
    assert all(of_source.of(module, is_stored_plain=True).is_float for module in modules)
    others = {name.rpartition(".")[0] for name in originals} - modules
    assert all(declared.of(module) == of_source.of(module) for module in others)


@pytest.mark.parametrize("method", ["fp8", "qwen3_5_moe_fp8", "compressed-tensors", "modelopt"])
def test_quantized_layers_keep_their_codes(tmp_path: Path, method: str) -> None:
    """And what is done with an artifact knows both configs."""
    case, src, out = CASES[method], tmp_path / "src", tmp_path / "out"
    save_family(src, case.model_type, **case.words)
    _edit(src, lambda *_: None)
    store(src, case)
    run(src, out, case.schema, dense="int4-g32")
    [(group, entry)] = manifest(out)["linear_layers"].items()
    modules = {f"{group.rpartition('.')[0]}.{module}" for module in entry["shapes"]}
    _assert_kept(out, src, modules)
    assert_verified(out, src)
    assert check(out, None, "files", "weights").passed
    assert hqconv.check(out, against=src)["passed"]
    run(out, tmp_path / "cut", "source", tp=2)
    assert_verified(tmp_path / "cut", out)
    _assert_kept(tmp_path / "cut", src, modules)
    with pytest.raises(RequestError, match="converted with --dense"):
        run(out, tmp_path / "again", "source", dense="int8")
    with pytest.raises(RequestError, match="layout cannot hold this source"):
        run(src, tmp_path / "again", case.schema, dense="int4-g32", layout="checkpoint")


def test_any_way_of_work_with_such_a_source(mixed: Path, tmp_path: Path) -> None:
    """Parts, a resumed run, one thread and little memory give the same bytes; an evaluation runs the layers."""
    words: dict[str, Any] = {"dense": "int2-g32"}
    run(mixed, tmp_path / "whole", "source", **words)
    expected = snapshot(tmp_path / "whole")
    for part in ("2/2", "1/2"):
        run(mixed, tmp_path / "parts", "source", part=part, **words)
    run_until(mixed, tmp_path / "resumed", 2, "source", **words)
    run(mixed, tmp_path / "resumed", "source", resume=True, **words)
    run(mixed, tmp_path / "little", "source", threads=1, max_memory=64 << 20, **words)
    for name in ("parts", "resumed", "little"):
        assert snapshot(tmp_path / name) == expected, name
    write_text(tmp_path / "text")
    run(mixed, tmp_path / "calibrated", "source", **OPTIONS, calibrate=tmp_path / "text", **words)
    run(mixed, tmp_path / "none", "source")
    divergences = []
    for name in ("none", "calibrated", "whole"):
        assert_verified(tmp_path / name, mixed)
        found = hqconv.evaluate(
            tmp_path / name, mixed, tmp_path / "text", context_length=16, device="cpu"
        )
        divergences.append(found["kl"]["mean"])
    assert divergences[0] < 1e-5 < divergences[1] < divergences[2]
    weight = load_all(mixed)["model.layers.1.self_attn.o_proj.weight"].float()
    decoded = hqconv.dequantize(tmp_path / "whole", layer="model.layers.1.self_attn.o_proj")
    assert 0.3 < float((decoded["weight"] - weight).norm() / weight.norm()) < 0.7


def test_a_source_whose_experts_alone_are_quantized(tmp_path: Path) -> None:
    """GPT-OSS's method quantizes no linear layers, whether its config lists them or not."""
    src = write_quantized(tmp_path / "src", "mxfp4", tmp_path / "plain")
    names = {f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"}
    for layout in ("kernel", "checkpoint"):
        run(src, tmp_path / layout, "source", dense="int4-g32", layout=layout)
        assert_verified(tmp_path / layout, src)
        assert hqconv.check(tmp_path / layout, against=src)["passed"]
    _assert_kept(tmp_path / "kernel", src, names)


def test_layers_that_the_source_has_quantized_by_its_tensors_or_its_config(
    mixed: Path, source: Path, tmp_path: Path
) -> None:
    """No layer is quantized that a server would take for the source's; scales of a cache say nothing."""

    def changed(change: Callable[[dict[str, torch.Tensor], Any], None]) -> Path:
        shutil.rmtree(tmp_path / "src", ignore_errors=True)
        shutil.copytree(mixed, tmp_path / "src")
        _edit(tmp_path / "src", change)
        return tmp_path / "src"

    def not_listed(_: dict[str, torch.Tensor], config: Any) -> None:
        del config["modules_to_not_convert"][0]

    def half_plain(tensors: dict[str, torch.Tensor], config: Any) -> None:
        name = "model.layers.0.self_attn.q_proj"
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()
        del tensors[f"{name}.weight_scale_inv"]
        config["modules_to_not_convert"].append(name)

    def none_plain(tensors: dict[str, torch.Tensor], _: Any) -> None:
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    def cache_scale(tensors: dict[str, torch.Tensor], _: Any) -> None:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)

    of_each = {layer: f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)}
    for change, groups, said in (
        (not_listed, {of_each[1]}, f"{of_each[0]}.weight: left as they are"),
        (half_plain, {*of_each.values()}, "self_attn.q_proj.weight: left as they are"),
    ):
        found = hqconv.plan(changed(change), schema="source", dense="int8", target="sm90")
        assert {group.name for group in found.experts.linear} == groups
        assert any(said in notice for notice in found.notices)
    with pytest.raises(RequestError, match="nothing to do") as raised:
        hqconv.plan(changed(none_plain), schema="int8", dense="int8", target="sm90")
    assert raised.value.found == "none"
    shutil.rmtree(tmp_path / "src")
    shutil.copytree(source, tmp_path / "src")
    _edit(tmp_path / "src", cache_scale)
    found = hqconv.plan(tmp_path / "src", schema="int8", dense="int8", target="sm90")
    assert QKV in {group.name for group in found.experts.linear}
