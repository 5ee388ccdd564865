"""Conversions of some experts of a model: the artifact of a checkpoint that transformers pruned, byte for byte."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.cli.app import app
from hqconv.conversion.option_values import default_out
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError
from hqconv.schemas.grid import Grid
from hqconv.schemas.kept_experts import read_selection
from hqconv.sources.opening import open_source
from hqconv.sources.selected import select_experts
from tests.make import hub_server, small
from tests.make.conversions import assert_verified, check, manifest, run, write_manifest
from tests.make.damage import LAYER
from tests.make.families import FAMILIES, save_family
from tests.make.formats import write
from tests.make.importance import write_importance
from tests.make.input_scales import STATIC
from tests.make.pruned import experts_apart, experts_of_gpt_oss, load_artifact, make_pair, prune_file, write_kept
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.small import PARENT

E = 5
KEPT = (3, 0, 4)
# Families whose experts cannot be left out: a part of the message.
REFUSED = {
    "zaya": r"router is not known.*gate\.",
    "deepseek_v4": "table of tokens.*tid2eid",
    "inkling_mm_model": r"router.*\.mlp\.gate\.",  # it also scores shared experts
}


def artifact_bytes(out: Path) -> dict[str, bytes]:
    """Every file with tensors, and config.json, without the metadata that names files."""
    found = read_tree(out)
    return {name: data for name, data in found.items() if name.endswith(".safetensors") or name == "config.json"}


def keep_everywhere(src: Path, kept: Sequence[int] = KEPT) -> Path:
    """A file that keeps the same experts in every layer of a checkpoint."""
    names = [layer.name for layer in hqconv.plan(src, schema="int8", target="sm90").experts.layers]
    return write_kept(src.parent / "kept.json", dict.fromkeys(names, kept))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in REFUSED])
def test_an_artifact_is_that_of_the_pruned_checkpoint(model_type: str, tmp_path: Path) -> None:
    """transformers prunes: its classes tell which dimensions of which parameters follow the number of experts."""
    whole, pruned = make_pair(model_type, dict.fromkeys(range(8), KEPT), E, inner=64)
    whole.save_pretrained(tmp_path / "whole")
    pruned.save_pretrained(tmp_path / "pruned")
    run(tmp_path / "whole", tmp_path / "out", "int8", keep_experts=keep_everywhere(tmp_path / "whole"))
    run(tmp_path / "pruned", tmp_path / "expected", "int8")
    found, expected = artifact_bytes(tmp_path / "out"), artifact_bytes(tmp_path / "expected")
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name] == expected[name], name
    assert_verified(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_router_that_is_not_known_is_refused(model_type: str, tmp_path: Path) -> None:
    save_family(tmp_path / "whole", model_type, experts=E, inner=64)
    with pytest.raises(RequestError) as caught:
        run(tmp_path / "whole", tmp_path / "out", "int8", keep_experts=keep_everywhere(tmp_path / "whole"))
    assert re.search(REFUSED[model_type], f"{caught.value.what} {caught.value.where}"), caught.value.message()
    assert not (tmp_path / "out").exists()


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model.float()(tokens).logits
    return found


GROUPED = {"n_group": 4, "topk_group": 2, "head_dim": 8}
LOGITS: dict[str, tuple[str, dict[int, tuple[int, ...]], dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {0: (6, 1, 3), 1: (0, 2, 7)}, {"mlp_only_layers": []}),
    "gpt_oss": ("gpt_oss", {0: (6, 1, 3), 1: (0, 2, 7)}, {}),
    "deepseek_v3": ("deepseek_v3", {1: (6, 1, 3)}, {"head_dim": 8}),
    # Whole groups, in another order, and the same number of each.
    "deepseek_v3-groups": ("deepseek_v3", {1: (14, 13, 0, 1, 5, 6, 11, 8)}, GROUPED),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_those_of_the_pruned_model(name: str, tmp_path: Path) -> None:
    """mxfp4 holds the experts of this model exactly: the artifact is the pruned model, with its router."""
    model_type, kept, words = LOGITS[name]
    num_experts = 16 if words.get("n_group") else 8
    whole, pruned = make_pair(model_type, kept, num_experts, inner=64, is_exact=True, **words)
    whole.save_pretrained(tmp_path / "whole")
    layers = hqconv.plan(tmp_path / "whole", schema="mxfp4", target="sm90").experts.layers
    file = write_kept(tmp_path / "kept.json", {layer.index: kept[layer.index] for layer in layers})
    run(tmp_path / "whole", tmp_path / "out", "mxfp4", Grid(ep=2), keep_experts=file)
    arranged = experts_of_gpt_oss if model_type == "gpt_oss" else experts_apart
    loaded = load_artifact(tmp_path / "out", tmp_path / "loaded", arranged)
    expected = logits(pruned)
    # The angles of positions passed through bfloat16 in one of the two models.
    assert (logits(loaded) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (logits(whole) - expected).abs().max() > 1e-2 * expected.abs().max()


# --- one small checkpoint --------------------------------------------------------------------------------------

LISTS = {0: (6, 1, 3, 2), 1: (0, 2, 7, 5)}
BY_NAME = {f"model.layers.{layer}.mlp.experts": experts for layer, experts in LISTS.items()}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("kept") / "src", num_experts=8)


@pytest.fixture(scope="module")
def file(src: Path) -> Path:
    return write_kept(src.parent / "kept.json", LISTS)


@pytest.fixture(scope="module")
def out(src: Path, file: Path) -> Path:
    run(src, src.parent / "out", "mxfp4", Grid(2), keep_experts=file)
    return src.parent / "out"


def test_the_artifact_says_which_experts_it_has(src: Path, out: Path) -> None:
    words = manifest(out)
    assert {name: one["kept_experts"] for name, one in words["blocks"].items()} == {
        name: list(experts) for name, experts in BY_NAME.items()
    }
    assert {one["num_source_experts"] for one in words["blocks"].values()} == {8}
    reasons = words["tensors"]["dropped"]
    assert len(reasons) == 2 * 4 * 3
    assert reasons["model.layers.0.mlp.experts.5.up_proj.weight"] == (
        "expert 5 is none of the kept experts (--keep-experts)"
    )
    assert "model.layers.0.mlp.experts.6.up_proj.weight" in words["tensors"]["converted"]
    assert "| experts | 4 of 8 of each layer" in (out / "README.md").read_text()
    shown = CliRunner().invoke(app, ["inspect", str(out)]).output
    assert "4 of 8" in shown
    assert hqconv.inspect(out)["blocks"][0]["num_source_experts"] == 8
    assert default_out("m", "mxfp4", hqconv.plan(src, schema="mxfp4", target="sm90").spec, "", 4).name == (
        "m-mxfp4-4experts"
    )


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_the_bytes_are_those_of_a_checkpoint_pruned_by_hand(layout: str, src: Path, file: Path, tmp_path: Path) -> None:
    pruned = prune_file(src, tmp_path / "src", BY_NAME)
    run(src, tmp_path / "out", "int4", keep_experts=file, layout=layout)
    run(pruned, tmp_path / "expected", "int4", layout=layout)
    assert artifact_bytes(tmp_path / "out") == artifact_bytes(tmp_path / "expected")
    assert_verified(tmp_path / "out", src)


@pytest.mark.parametrize("name", ["fp8-block", "gptq-int4-zp"])
def test_codes_of_a_quantized_source_are_kept(name: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", name).folder
    layer = hqconv.plan(whole, schema="source", target="sm90", round_scales=True).experts.layers[0]
    kept = {layer.name: (layer.num_experts - 1, 0)}
    pruned = prune_file(whole, tmp_path / "pruned", kept)
    for source, into, more in (
        (whole, "out", {"keep_experts": write_kept(tmp_path / "k.json", kept)}),
        (pruned, "expected", {}),
    ):
        run(source, tmp_path / into, "source", round_scales=True, **more)
    assert artifact_bytes(tmp_path / "out") == artifact_bytes(tmp_path / "expected")
    assert next(iter(manifest(tmp_path / "out")["blocks"].values()))["conversion"].startswith("direct")
    assert_verified(tmp_path / "out", whole)


def test_scales_of_activations_are_those_of_the_kept_experts(tmp_path: Path) -> None:
    scales, schema, inputs = STATIC["fp8"]
    whole = small.save(tmp_path / "whole", scales())
    kept = {small.LAYER: (2, 0)}  # not expert 1, whose scales are the largest
    pruned = prune_file(whole, tmp_path / "pruned", kept)
    run(whole, tmp_path / "out", schema, input_schema=inputs, keep_experts=write_kept(tmp_path / "k.json", kept))
    run(pruned, tmp_path / "expected", schema, input_schema=inputs)
    assert artifact_bytes(tmp_path / "out") == artifact_bytes(tmp_path / "expected")
    assert_verified(tmp_path / "out", whole)


def test_importance_has_a_row_for_each_expert_of_the_source(src: Path, file: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    columns = {
        f"{layer}.{gemm}": torch.rand(8, 128, generator=generator) for layer in BY_NAME for gemm in ("w13", "w2")
    }
    rows = {name: one[list(BY_NAME[name.rpartition(".")[0]])] for name, one in columns.items()}
    pruned = prune_file(src, tmp_path / "pruned", BY_NAME)
    for source, into, values, more in ((src, "out", columns, {"keep_experts": file}), (pruned, "expected", rows, {})):
        importance = write_importance(tmp_path / f"{into}.safetensors", values)
        run(source, tmp_path / into, "int4", quantizer="mse", importance=importance, **more)
    found, expected = artifact_bytes(tmp_path / "out"), artifact_bytes(tmp_path / "expected")
    for of in (found, expected):
        del of["importance.safetensors"]
    assert found == expected
    assert_verified(tmp_path / "out", src)


def test_an_artifact_of_some_experts_is_cut_again_and_pruned_again(src: Path, out: Path, tmp_path: Path) -> None:
    """Each is compared with its own source and with the first; a third of the experts at the end."""
    run(out, tmp_path / "cut", "source", Grid(ep=2))
    run(
        tmp_path / "cut",
        tmp_path / "twice",
        "source",
        keep_experts=write_kept(tmp_path / "k.json", {0: (3, 0), 1: (1, 2)}),
    )
    assert "kept_experts" not in manifest(tmp_path / "cut")["blocks"][LAYER]
    assert manifest(tmp_path / "twice")["derived_from"][1]["blocks"][LAYER]["kept_experts"] == list(LISTS[0])
    for artifact, source in (("cut", out), ("cut", src), ("twice", tmp_path / "cut"), ("twice", out), ("twice", src)):
        assert_verified(tmp_path / artifact, source)
    pruned = prune_file(src, tmp_path / "pruned", {LAYER: (2, 6), LAYER.replace("0", "1"): (2, 7)})
    run(pruned, tmp_path / "expected", "mxfp4")
    assert artifact_bytes(tmp_path / "twice") == artifact_bytes(tmp_path / "expected")


def test_verify_finds_a_wrong_selection(src: Path, out: Path, tmp_path: Path) -> None:
    """Other experts in the manifest, and the router's rows in another order."""
    for number, change in enumerate((_other_experts, _other_rows)):
        altered = Path(shutil.copytree(out, tmp_path / str(number)))
        change(altered)
        report = check(altered, src, "files", "weights")
        assert not report.passed
        found = " ".join(f"{one.where} {one.what}" for result in report.results for one in result.findings)
        assert "mlp.gate.weight" in found, found
        assert number == 1 or "mlp.experts" in found, found


def rewrite_manifest(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    words = manifest(out)
    change(words)
    write_manifest(out, words)


def _other_experts(out: Path) -> None:
    rewrite_manifest(out, lambda words: words["blocks"][LAYER].update(kept_experts=[6, 1, 2, 3]))


def _other_rows(out: Path) -> None:
    path = next(path for path in out.glob("model*.safetensors") if f"{PARENT}.mlp.gate.weight" in load_file(path))
    tensors = load_file(path)
    tensors[f"{PARENT}.mlp.gate.weight"] = tensors[f"{PARENT}.mlp.gate.weight"].flip(0).contiguous()
    save_file(tensors, path, {"format": "pt"})


def test_another_selection_is_another_request(src: Path, out: Path, file: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(out, tmp_path / "out"))
    assert run(src, here, "mxfp4", Grid(2), keep_experts=file, update=True).was_finished
    other = write_kept(tmp_path / "other.json", {0: (6, 1, 3, 4), 1: (0, 2, 7, 5)})
    with pytest.raises(OutputError) as caught:
        run(src, here, "mxfp4", Grid(2), keep_experts=other, resume=True)
    assert "kept_experts" in caught.value.message()
    with pytest.raises(OutputError, match="finished"):
        run(src, here, "mxfp4", Grid(2), resume=True)


def test_any_bytes_of_a_cut_router_are_read(src: Path, file: Path) -> None:
    name = f"{PARENT}.mlp.gate.weight"
    expected = load_file(src / "model.safetensors")[name][list(LISTS[0])].flatten().view(torch.uint8).numpy().tobytes()
    with select_experts(open_source(src), read_selection(file)) as source:
        ref = source.tensors[name]
        assert (ref.shape, ref.num_bytes) == ((4, 128), len(expected))
        for start, end in ((0, 1024), (0, 1), (255, 257), (256, 512), (100, 900), (1023, 1024), (512, 512)):
            data = bytearray(end - start)
            source.read_into(ref, data, start)
            assert data == expected[start:end]
            part = ref._replace(offset_bytes=ref.offset_bytes + start, num_bytes=end - start)
            data = bytearray(end - start)
            source.read_all_into([(part, data)])
            assert data == expected[start:end]


def test_a_model_on_the_hub(src: Path, out: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server.serve(src) as hub:
        hub_server.use(monkeypatch, hub.url, tmp_path / "cache")
        hqconv.convert(
            "org/name", tmp_path / "out", schema="mxfp4", tp=2, target="sm90", device="cpu", keep_experts=file
        )
        assert artifact_bytes(tmp_path / "out") == artifact_bytes(out)
        assert hqconv.verify(tmp_path / "out", "org/name", device="cpu").passed


def test_a_recipe_names_the_file_beside_it(src: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.toml").write_text('0 = [6, 1, 3, 2]\n"model.layers.1.mlp.experts" = [0, 2, 7, 5]\n')
    (tmp_path / "recipe.toml").write_text('schema = "mxfp4"\nkeep_experts = "kept.toml"\n')
    plan = hqconv.plan(src, config=tmp_path / "recipe.toml", target="sm90")
    assert [layer.kept and layer.kept.experts for layer in plan.experts.layers] == list(LISTS.values())


def test_evaluate_refuses_an_artifact_of_some_experts(src: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1 2 3")
    with pytest.raises(RequestError, match="some of the source's experts"):
        hqconv.evaluate(out, src, tmp_path / "text", device="cpu")


# --- what is refused -------------------------------------------------------------------------------------------

BAD_FILES = {
    "[[0]]": "no list of experts",
    "{}": "no list of experts",
    "{": "cannot be read",
    '{"0": [0, 1], "0": [0, 1], "1": [0, 1]}': "cannot be read",
    '{"0": [0, 1], "1": []}': "no list of experts",
    '{"0": [0, 1], "1": [true, 2]}': "no list of experts",
    '{"0": [0, 1], "1": [2, 2]}': "listed twice",
    '{"0": [0, 1], "1": [0, 8]}': "no such expert",
    '{"0": [0, 1], "1": [0, -1]}': "no such expert",
    '{"0": [0, 1], "1": [0, 1, 2]}': "different numbers of experts",
    '{"0": [0, 1]}': "no list of experts to keep",
    '{"0": [0, 1], "2": [0, 1]}': "no such MoE layer",
    '{"0": [0, 1], "model.layers.0.mlp.experts": [0, 1], "1": [0, 1]}': "named twice",
    '{"0": [0], "1": [1]}': "serve a token",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_file_that_is_no_selection(text: str, src: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(RequestError) as caught:
        hqconv.plan(src, schema="int8", target="sm90", keep_experts=tmp_path / "kept.json")
    assert BAD_FILES[text] in caught.value.what


@pytest.mark.parametrize(
    ("words", "kept", "what"),
    [
        ({"n_group": 2, "topk_group": 1}, (0, 1, 2, 4, 5, 6), ""),
        ({"n_group": 2, "topk_group": 1}, (4, 5, 6, 7), ""),  # one group
        ({"n_group": 2, "topk_group": 1}, (0, 1, 2, 4), "no equal groups"),
        ({"n_group": 2, "topk_group": 1}, (0, 4, 1, 5), "no equal groups"),
        ({"n_group": 2, "topk_group": 1}, (0, 4), "too small"),
        ({"n_group": 2, "topk_group": 2}, (4, 5, 6, 7), "Fewer groups"),
        ({"n_group": 3, "topk_group": 1}, (0, 1), "not equal"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, (0, 1, 2, 3), "too few experts"),
        ({"expert_group_count": 2}, (0, 1), "not known"),
        ({"n_group": 1, "topk_group": 1}, (0, 5), ""),
        ({"num_experts": [8, 8]}, (0, 5), ""),
    ],
)
def test_groups_of_experts_stay_equal_and_whole(
    words: dict[str, Any], kept: tuple[int, ...], what: str, src: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(src, tmp_path / "src"))
    config = json.loads((src / "config.json").read_bytes()) | {"num_local_experts": 8, "vocab_size": 8} | words
    (folder / "config.json").write_text(json.dumps(config))
    file = write_kept(tmp_path / "kept.json", {0: kept, 1: kept})
    with open_source(folder) as whole:
        if what:
            with pytest.raises(RequestError, match=what):
                select_experts(whole, read_selection(file))
            return
        config = select_experts(whole, read_selection(file)).config
    assert config["num_experts"] == ([len(kept)] * 2 if isinstance(config["num_experts"], list) else len(kept))
    assert (config["num_local_experts"], config["vocab_size"]) == (len(kept), 8)
    assert config.get("n_group", 1) == (1 if kept == (4, 5, 6, 7) else words.get("n_group", 1))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.gate.tid2eid", (64, 2)),
        ("mlp.gate.weight_scale_inv", (1, 1)),
        ("mlp.gate.e_score_correction_bias", (7,)),
        ("mlp.unknown", (8, 3)),
        ("mlp.experts.unknown", (8,)),
        ("expert_offsets", (8,)),
        ("mlp.router.weight", (8, 128)),  # a second router
    ],
)
def test_a_tensor_that_may_know_the_experts_is_refused(
    name: str, shape: tuple[int, ...], src: Path, file: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(src, tmp_path / "src"))
    tensors = load_file(src / "model.safetensors") | {f"model.layers.1.{name}": torch.zeros(shape)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(HqconvError) as caught:
        hqconv.plan(folder, schema="int8", target="sm90", keep_experts=file)
    assert "model.layers.1." in caught.value.where


def test_layers_that_are_copied_keep_all_experts(src: Path, file: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('schema = "int8"\n[[override]]\nlayers = "1"\nschema = "none"\n')
    with pytest.raises(RequestError, match="copied unchanged"):
        hqconv.plan(src, config=tmp_path / "recipe.toml", target="sm90", keep_experts=file)


@pytest.mark.parametrize(
    "change",
    [
        {"kept_experts": [6, 1, 3]},
        {"kept_experts": [6, 1, 3, 8]},
        {"kept_experts": [6, 1, 3, 3]},
        {"num_source_experts": 0},
    ],
)
def test_a_damaged_record_of_experts(change: dict[str, Any], out: Path, tmp_path: Path) -> None:
    altered = Path(shutil.copytree(out, tmp_path / "out"))
    rewrite_manifest(altered, lambda words: words["blocks"][LAYER].update(change))
    with pytest.raises(VerificationError) as caught:
        read_manifest(altered)
    assert "kept_experts" in caught.value.where
