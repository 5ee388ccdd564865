"""`hqconv allocate`: its recipe converts to the promised sizes and errors, whatever the source and the ranks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.conversion.allocate import document_path, journal_path
from hqconv.conversion.journal import Journal
from hqconv.errors import InputError, OutputError, RequestError
from hqconv.schemas.recipe import load_recipe
from tests.make import hub_server, small
from tests.make.conversions import assert_verified, manifest, run
from tests.make.formats import write
from tests.make.qwen import read_tree, write_qwen3_moe

FEW = "int3-g32,int4-g32,mxfp4,int8"
FIGURES = ("relative_error", "worst_expert", "worst_relative_error", "num_exact_groups", "num_groups")


def allocate(src: Path, out: Path, **options: Any) -> dict[str, Any]:
    words = {"target": "sm90", "device": "cpu", "threads": 2, "candidates": FEW, **options}
    if not {"size", "bits"} & words.keys():
        words["bits"] = 5.5
    return hqconv.allocate(src, out, **words).to_dict()


def uneven(folder: Path, num_layers: int = 3) -> Path:
    """A qwen3_moe model whose layers are not alike: each has heavier tails than the one before."""
    src = write_qwen3_moe(folder, num_layers=num_layers, intermediate_size=256)
    tensors = load_file(src / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            power = 1 + int(name.split(".")[2])
            tensors[name] = (tensor.float().sign() * tensor.float().abs() ** power).bfloat16()
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    return src


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uneven(tmp_path_factory.mktemp("allocate") / "src")


def assert_kept(src: Path, recipe: Path, document: dict[str, Any], out: Path) -> None:
    """Convert by the recipe alone: sizes are those of the document, and recorded errors to the last bit."""
    hqconv.convert(src, out, config=recipe, device="cpu", threads=2)
    files, made = manifest(out)["files"], manifest(out)
    total = 0
    for name, layer in document["layers"].items():
        chosen = layer["candidates"][layer["chosen"]]
        size = sum(one["size_bytes"] for path, one in files.items() if path.endswith(f"/{name}.safetensors"))
        assert size == chosen["size_bytes"]
        total += size
        block = made["blocks"][name]
        assert block.get("schema_name", made["schema_name"]) == chosen["schema"]
        for role, figures in chosen["projections"].items():
            recorded = block["quantization_error"][role]
            for key in FIGURES:
                assert recorded.get(key) == figures.get(key), (name, role, key)
    assert total == document["chosen"]["size_bytes"]
    key = {"size": "size_bytes", "bandwidth": "token_bytes"}[document["budget"]["objective"]]
    assert document["chosen"][key] <= document["budget"]["limit_bytes"]
    assert_verified(out, src)


# --- the promise --------------------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp": {"tp": 2},
    "grid": {"tp": 2, "ep": 2, "redundant_experts": 2, "expert_placement": "round_robin", "bits": 9.0},
    "mse": {"quantizer": "mse"},
    "fp8 activations": {"input_schema": "fp8", "candidates": "int4-g64,mxfp4,fp8", "bits": 8.5},
    "float16": {"dtype": "float16", "size": 800_000},
    "token": {"objective": "bandwidth", "bits": 5.5},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_recipe_keeps_its_promise(name: str, src: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    document = allocate(src, recipe, **REQUESTS[name])
    assert len({layer["chosen"] for layer in document["layers"].values()}) > 1
    assert document["least_possible_error"] <= document["chosen"]["relative_error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.allocation.json", "recipe.toml"]
    assert_kept(src, recipe, document, tmp_path / "out")


SOURCES = {
    "fp8 blocks": (small.fp8_blocks, {"candidates": "source,int4-g32,mxfp4"}, "source"),
    "gptq": (small.gptq, {"candidates": "int4-g32,int8,int3-g32"}, "int8"),
    "nvfp4": (small.nvfp4, {"candidates": "source,int4-g32,nvfp4"}, "source"),
    "gpt-oss mxfp4": (small.gpt_oss_mxfp4, {"candidates": "int3-g32,mxfp4,int8", "tp": 2}, "mxfp4"),
    "gpt-oss, padded": (lambda: small.gpt_oss_floats(160), {"candidates": "int3-g32,mxfp4,int8", "tp": 3}, "int8"),
}


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_the_promise_holds_for_other_sources(
    name: str, is_asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the order of work of a GPU, where all experts of a batch are encoded together."""
    make, options, best = SOURCES[name]
    source = small.save(tmp_path / "src", make())
    if is_asynchronous:
        monkeypatch.setattr("hqconv.conversion.encode._ASYNCHRONOUS", ("cpu",))
    document = allocate(source, tmp_path / "recipe.toml", bits=64, **options)
    layer = document["layers"][small.LAYER]
    assert layer["chosen"] == best
    if best in ("source", "mxfp4"):
        assert layer["candidates"][best]["relative_error"] == 0
    assert_kept(source, tmp_path / "recipe.toml", document, tmp_path / "out")


def test_the_sources_own_schema_is_a_candidate_by_default(tmp_path: Path) -> None:
    source = small.save(tmp_path / "src", small.fp8_blocks())
    document = allocate(source, tmp_path / "recipe.toml", candidates=None, bits=64)
    assert document["candidates"][0] == "source"
    assert document["chosen"]["relative_error"] == 0
    assert load_recipe(tmp_path / "recipe.toml").options["schema"] == "source"


@pytest.mark.parametrize("is_shared", [True, False])
def test_gate_and_up_with_scales_of_their_own_are_quantized_anew(is_shared: bool, tmp_path: Path) -> None:
    """`source` would refuse them in the middle of the measurement, so the preset takes its place."""
    tensors, config = small.nvfp4()
    name = next(name for name in tensors if name.endswith("gate_proj.weight_scale_2"))
    if not is_shared:
        tensors[name] *= 2
    source = small.save(tmp_path / "src", (tensors, config))
    document = allocate(source, tmp_path / "recipe.toml", candidates=None, bits=64 if is_shared else 5.3)
    assert document["candidates"][0] == "nvfp4"
    layer = document["layers"][small.LAYER]
    assert layer["chosen"] == "nvfp4"
    assert (layer["candidates"]["nvfp4"]["relative_error"] == 0) == is_shared
    assert_kept(source, tmp_path / "recipe.toml", document, tmp_path / "out")


def test_an_artifact_is_a_source(src: Path, tmp_path: Path) -> None:
    """Its experts are not read ahead of their decoding."""
    run(src, tmp_path / "artifact", "int4-g32", tp=2)
    document = allocate(tmp_path / "artifact", tmp_path / "recipe.toml", candidates="source,int3-g32,int8", bits=5.9)
    chosen = {layer["chosen"] for layer in document["layers"].values()}
    assert chosen == {"source", "int3-g32"}
    assert_kept(tmp_path / "artifact", tmp_path / "recipe.toml", document, tmp_path / "out")


def test_the_dtype_is_the_one_that_keeps_the_sources_scales(tmp_path: Path) -> None:
    """For all candidates, since a recipe has one dtype: float16 of the scales, not bfloat16 of the config."""
    source = write(tmp_path / "src", "gptq-int4-zp").folder
    document = allocate(source, tmp_path / "recipe.toml", candidates="source,int3-g32", bits=64)
    assert document["dtype"] == "float16"
    assert load_recipe(tmp_path / "recipe.toml").options["dtype"] == "float16"
    assert {layer["chosen"] for layer in document["layers"].values()} == {"source"}
    assert_kept(source, tmp_path / "recipe.toml", document, tmp_path / "out")


def test_a_model_on_the_hub(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard by shard, within a limit of the disk."""
    with hub_server.serve(src) as hub:
        hub_server.use(monkeypatch, hub.url, tmp_path / "cache")
        document = allocate("org/name", tmp_path / "recipe.toml", cache_limit="5MB")  # type: ignore[arg-type]
        assert document["source"]["name"] == "org/name"
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
    local = allocate(src, tmp_path / "local.toml")
    assert document["layers"] == local["layers"]


def test_a_mixed_source_keeps_some_layers_and_quantizes_others(tmp_path: Path) -> None:
    """`source` is a candidate of the quantized layers only, and layers of floats get an override."""
    tensors, config = small.fp8_blocks()
    plain, _ = small.plain()
    more = {name.replace("layers.0", "layers.1"): tensor for name, tensor in plain.items() if "layers.0" in name}
    quantization = {**config["quantization_config"], "modules_to_not_convert": ["model.layers.1.mlp.experts"]}
    config = {**config, "num_hidden_layers": 2, "quantization_config": quantization}
    source = small.save(tmp_path / "src", ({**tensors, **more}, config))
    document = allocate(source, tmp_path / "recipe.toml", candidates="source,int4-g32,int8", bits=64)
    chosen = {name: layer["chosen"] for name, layer in document["layers"].items()}
    assert chosen == {"model.layers.0.mlp.experts": "source", "model.layers.1.mlp.experts": "int8"}
    assert_kept(source, tmp_path / "recipe.toml", document, tmp_path / "out")


def test_it_beats_one_schema_for_all_layers_of_its_size(src: Path, tmp_path: Path) -> None:
    document = allocate(src, tmp_path / "recipe.toml", candidates=None, bits=4.9)
    fitting = [p for p in document["uniform"].values() if p["size_bytes"] <= document["budget"]["limit_bytes"]]
    assert document["chosen"]["relative_error"] < 0.97 * min(point["relative_error"] for point in fitting)
    sizes = [point["size_bytes"] for point in document["curve"]]
    errors = [point["relative_error"] for point in document["curve"]]
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)


# --- the same bytes ------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["plain", "mse", "fp8 blocks", "gpt-oss mxfp4"])
def test_a_gpu_gives_the_same_bytes(name: str, src: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"candidates": None, "quantizer": "mse" if name == "mse" else "rtn"}
    if name in SOURCES:
        src = small.save(tmp_path / "src", SOURCES[name][0]())
    for device in ("cpu", "cuda"):
        allocate(src, tmp_path / device / "recipe.toml", device=device, **options)
    assert read_tree(tmp_path / "cpu") == read_tree(tmp_path / "cuda")


class StoppedError(BaseException):
    """Ends an allocation as a kill does: nothing cleans up after it."""


@pytest.mark.full
def test_stopped_before_any_call_to_the_disk_it_goes_on_to_the_same_bytes(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"bits": 7.0, "candidates": "int4-g32,int8", "threads": 1}
    allocate(src, tmp_path / "whole" / "recipe.toml", **options)
    expected = read_tree(tmp_path / "whole")
    for fatal in itertools.count(1):
        out, calls = tmp_path / str(fatal) / "recipe.toml", itertools.count(1)
        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
                real = getattr(owner, name)

                def call_or_stop(
                    *words: Any, real: Any = real, calls: Any = calls, fatal: int = fatal, **more: Any
                ) -> Any:
                    if next(calls) == fatal:
                        raise StoppedError
                    return real(*words, **more)

                patch.setattr(owner, name, call_or_stop)
            with suppress(StoppedError):
                allocate(src, out, **options)
        if next(calls) <= fatal:
            break
        if journal_path(out).exists() or not out.exists():
            allocate(src, out, **options)
        assert read_tree(out.parent) == expected, fatal
    assert fatal > 15


def begin(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """An allocation that fails after its first layer."""
    real = Journal.record

    def record(self: Journal, entry: Any) -> None:
        real(self, entry)
        raise OutputError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(OutputError):
            allocate(src, out, **options)
    assert journal_path(out).is_file()


def test_finished_layers_are_not_measured_again(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another budget too, since it decides no measurement."""
    out = tmp_path / "recipe.toml"
    begin(src, out, monkeypatch)
    seen = []
    hqconv.allocate(
        src, out, bits=7, candidates=FEW, target="sm90", device="cpu", progress=lambda done: seen.append(done)
    )
    assert seen[0].resumed_bytes > 0
    assert seen[-1].num_groups_done == 3
    resumed = out.read_bytes()
    assert allocate(src, tmp_path / "again" / "recipe.toml", bits=7)["chosen"]
    assert resumed == (tmp_path / "again" / "recipe.toml").read_bytes()


def test_another_measurement_is_not_mixed_in(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "recipe.toml"
    begin(src, out, monkeypatch)
    with pytest.raises(OutputError, match=r"differs from this one in: --candidates"):
        allocate(src, out, candidates="int3-g32,int8")
    with pytest.raises(OutputError, match=r"differs from this one in: options"):
        allocate(src, out, quantizer="mse")
    allocate(src, out, quantizer="mse", overwrite=True)
    allocate(src, tmp_path / "again" / "recipe.toml", quantizer="mse")
    assert out.read_bytes() == (tmp_path / "again" / "recipe.toml").read_bytes()
    assert not journal_path(out).exists()


def test_layers_of_replaced_files_are_measured_anew(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where size and time are the old ones (`cp -p`)."""
    model, out = Path(shutil.copytree(src, tmp_path / "src")), tmp_path / "recipe.toml"
    begin(model, out, monkeypatch)
    for path in model.glob("*.safetensors"):
        status, tensors = path.stat(), {name: tensor * 1.3 for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    allocate(model, out)
    allocate(model, tmp_path / "again" / "recipe.toml")
    documents = [(folder / "recipe.allocation.json").read_bytes() for folder in (tmp_path, tmp_path / "again")]
    assert documents[0] == documents[1]


# --- files ---------------------------------------------------------------------------------------------------


def test_one_process_at_a_time(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.toml"
    other = Journal(tmp_path / journal_path(out).name)
    other.begin({"of": "another process"})
    with pytest.raises(OutputError, match="Another process is at work"):
        allocate(src, out)
    other.remove()
    other.close()
    allocate(src, out)


def test_existing_files_are_refused_without_overwrite(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.toml"
    for path in (out, document_path(out)):
        path.write_text("mine")
        with pytest.raises(OutputError, match="exists already"):
            allocate(src, out)
        assert read_tree(tmp_path) == {path.name: b"mine"}
        path.unlink()
    allocate(src, out)
    before = out.read_bytes()
    allocate(src, out, bits=6.5, overwrite=True)
    assert out.read_bytes() != before
    assert not journal_path(out).exists()
    out.unlink()
    out.mkdir()
    with pytest.raises(OutputError, match="a folder"):
        allocate(src, out, overwrite=True)
    with pytest.raises(OutputError, match="would lie in the source"):
        allocate(src, src / "recipe.toml")


def test_paths_in_a_recipe_are_relative_to_it(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of a file is found from another folder."""
    (tmp_path / "own.toml").write_text('b_dtype = "uint5"\nweight_scale_group_size = 32\n')
    monkeypatch.chdir(tmp_path)
    options = {"quantizer": "mse", "candidates": "own.toml,int3-g32"}
    document = allocate(src, Path("recipes/recipe.toml"), bits=6.3, **options)
    assert {layer["chosen"] for layer in document["layers"].values()} == {"own.toml", "int3-g32"}
    monkeypatch.chdir("/")
    assert_kept(src, tmp_path / "recipes" / "recipe.toml", document, tmp_path / "out")


# --- candidates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "options", "where"),
    [
        ("int4-g32,nonsense", {}, "--candidates nonsense"),
        ("int4-g32,source", {}, "--candidates source"),
        ("int4-g32,int4-g256", {"tp": 2}, "--candidates int4-g256"),
        ("int4-g32,nvfp4", {"input_schema": "int8"}, "--candidates nvfp4"),
    ],
)
def test_a_candidate_that_was_named_is_refused(
    candidates: str, options: dict[str, Any], where: str, src: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as error:
        allocate(src, tmp_path / "recipe.toml", candidates=candidates, **options)
    assert error.value.where.startswith(where)
    assert not list(tmp_path.iterdir())


def test_default_candidates_fit_the_target_or_are_left_out(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src", num_layers=1, intermediate_size=64)
    document = allocate(src, tmp_path / "recipe.toml", candidates=None, bits=64, tp=2, input_schema="fp8")
    assert "nvfp4" not in document["candidates"]
    assert "int4-g64" in document["left_out"]  # 32 columns on each rank
    assert {"int4-g32", "fp8"} <= set(document["candidates"])
    assert not set(document["left_out"]) & set(document["candidates"])


def test_nothing_is_read_for_a_budget_that_is_too_small(src: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="too small"):
        allocate(src, tmp_path / "recipe.toml", bits=1.0)
    assert not list(tmp_path.iterdir())


def test_a_limit_of_the_error_holds_for_every_layer(src: Path, tmp_path: Path) -> None:
    document = allocate(src, tmp_path / "recipe.toml", bits=64, max_layer_error=0.2)
    free = allocate(src, tmp_path / "free.toml", bits=4.8)
    assert max(layer["candidates"][layer["chosen"]]["relative_error"] for layer in free["layers"].values()) > 0.2
    for layer in document["layers"].values():
        assert layer["candidates"][layer["chosen"]]["relative_error"] <= 0.2
    with pytest.raises(RequestError, match="No candidate keeps the limit"):
        allocate(src, tmp_path / "none.toml", bits=64, max_layer_error=1e-6)


def test_bad_weights_name_their_tensor(tmp_path: Path) -> None:
    tensors, config = small.plain()
    name = f"{small.LAYER}.2.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    with pytest.raises(InputError, match="NaN or infinite") as error:
        allocate(small.save(tmp_path / "src", (tensors, config)), tmp_path / "recipe.toml")
    assert name in error.value.where


# --- the command ---------------------------------------------------------------------------------------------


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_one_document(src: Path, tmp_path: Path) -> None:
    common = ("allocate", src, "--candidates", FEW, "--target", "h200", "--device", "cpu", "--size", "700kB")
    done = call(*common, "-o", tmp_path / "a" / "recipe.toml", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["kind"] == "allocation"
    assert document["budget"]["limit_bytes"] == 700_000
    shown = call(*common, "-o", tmp_path / "b" / "recipe.toml")
    assert shown.exit_code == 0, shown.output
    assert "700.00 kB of all files of experts" in shown.stdout
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")
    quiet = call(*common, "-o", tmp_path / "c" / "recipe.toml", "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    refused = call(*common, "-o", tmp_path / "a" / "recipe.toml", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["kind"]) == (4, "error")


def test_the_report_draws_the_curve_and_the_choice(src: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "out"
    document = allocate(src, recipe)
    hqconv.convert(src, out, config=recipe, device="cpu")
    beside = document_path(recipe)
    done = call("report", out, "--allocation", beside, "-o", tmp_path / "page.html", "--json")
    assert done.exit_code == 0, done.output
    drawn = json.loads(done.stdout)["allocation"]
    assert (drawn["chosen"], drawn["curve"]) == (document["chosen"], document["curve"])
    page = (tmp_path / "page.html").read_text()
    assert 'id="allocation"' in page
    assert f"recipe, {document['chosen']['bits_per_weight']:.4g} bits" in page
    path = page.partition('aria-label="Error over bits per weight"')[2].partition('class="line w1" d="')[2]
    assert path.partition('"')[0].count("L") == len(document["curve"]) - 1
    without = call("report", out, "-o", tmp_path / "plain.html", "--json")
    assert json.loads(without.stdout)["allocation"] is None
    assert 'id="allocation"' not in (tmp_path / "plain.html").read_text()


def test_the_report_refuses_another_allocation(src: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "out"
    allocate(src, recipe)
    allocate(src, tmp_path / "other.toml", bits=8.0)
    hqconv.convert(src, out, config=recipe, device="cpu")
    whole = document_path(recipe).read_text()
    words = json.loads(whole)
    less = json.dumps({key: value for key, value in words.items() if key != "least_possible_error"})
    huge = [json.dumps(words | {"budget": words["budget"] | {"limit_bytes": 10**400}})]
    huge += [
        json.dumps(words | {"chosen": words["chosen"] | {"size_bytes": number}}) for number in (10**400, "1", None)
    ]
    others = ("", "[]", "{}", whole.replace('"kind": "allocation"', '"kind": "x"'), less, *huge)
    for number, text in enumerate(others):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        refused = call("report", out, "--allocation", path, "-o", tmp_path / "page.html", "--json")
        assert refused.exit_code == 2
        assert json.loads(refused.stdout)["what"] == "The allocation cannot be read."
    refused = call("report", out, "--allocation", tmp_path / "other.allocation.json", "-o", tmp_path / "page.html")
    assert refused.exit_code == 2
    assert "not the one of this artifact" in refused.output
