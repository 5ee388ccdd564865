"""`hqconv check`: sound checkpoints of every format pass, and each planted fault is named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.checkup.check import _sample
from hqconv.errors import HqconvError, InputError, RequestError
from tests.make import checkups, conversions, small
from tests.make.checkups import FAULTS, HARMLESS, check, is_there, planted
from tests.make.command import call
from tests.make.formats import KINDS
from tests.make.gguf_models import WIDE, write, write_quantized
from tests.make.hub_server import serve, use
from tests.make.qwen import write_qwen3_moe

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", [name for name in dict.fromkeys((*KINDS, *checkups.FEW_LEVELS)) if is_there(name)]
)
def test_faults_of_every_format_are_named(name: str, tmp_path: Path) -> None:
    for fault, document in planted(name, tmp_path, {**HARMLESS, **FAULTS}).items():
        if fault in HARMLESS:
            assert document["damage"] == [], fault
            notice = HARMLESS[fault][1]
            is_named = not notice or notice in kinds(document["notices"])
            assert is_named or name in checkups.FEW_LEVELS, fault
        else:
            assert checkups.is_named(fault, document) or (name, fault) in checkups.MISSED, (
                fault,
                document["damage"],
            )
    assert check(tmp_path / "src", None)["damage"] == []


@pytest.mark.parametrize("name", checkups.RICH)
def test_what_publishers_do_wrong_is_named(name: str, tmp_path: Path) -> None:
    """Every fault and every sound change of a whole model in one of the formats each, alone and beside the original."""
    start = checkups.RICH.index(name)
    for fault, is_sound, document in checkups.published(name, tmp_path, start, len(checkups.RICH)):
        if is_sound:
            assert document["damage"] == [], fault
        else:
            assert checkups.is_published_named(fault, document), (fault, document)


def test_figures_are_those_of_the_planted_rounding(tmp_path: Path) -> None:
    document = planted("ct-int4-g32", tmp_path, {"nothing": HARMLESS["nothing"]})["nothing"]
    for layer in document["errors"].values():
        for figures in layer.values():
            assert figures["relative_error"] == pytest.approx(figures["rounding_error"], rel=0.05)
            assert figures["nearest_codes"] == 1


SCHEMAS = (
    "mxfp4",
    "nvfp4",
    "mxfp8",
    "fp8",
    "fp8-block",
    "int8",
    "int4",
    "int3-g64",
    "int2-g32-zp",
    "int4-g32-e4m3",
)
SCHEMAS += ("int3-g64-h64", "int3-g64+int4-g32")


def test_layers_of_an_artifact_that_are_copied_are_not_missing(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src")
    (tmp_path / "recipe.toml").write_text('[[override]]\nlayers = "-1"\nschema = "none"\n')
    hqconv.convert(
        src, out=tmp_path / "out", schema="mxfp4", target="sm90", config=tmp_path / "recipe.toml"
    )
    document = check(tmp_path / "out", src)
    assert (document["damage"], document["notices"]) == ([], [])
    for path in src.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if "layers.1.mlp.experts.1.up_proj" in name:
                tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, path)
    (finding,) = check(tmp_path / "out", src)["damage"]
    assert "layers.1.mlp.experts.1.up_proj" in finding["where"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_artifacts_are_sound(schema: str, layout: str, tmp_path: Path) -> None:
    if layout == "checkpoint" and "-h" in schema:
        pytest.skip("rotated weights are no source in this layout")
    src = write_qwen3_moe(tmp_path / "src")
    conversions.run(src, tmp_path / "out", schema, layout=layout)
    document = check(tmp_path / "out", src)
    assert (document["damage"], [x for x in document["notices"] if x["kind"] != "config"]) == (
        [],
        [],
    )


def kinds(findings: list[Json]) -> set[str]:
    return {finding["kind"] for finding in findings}


# --- alone -----------------------------------------------------------------------------------------------------


def changed(source: small.Source, change: Callable[[Tensors], None], folder: Path) -> Path:
    tensors, config = source
    change(tensors)
    return small.save(folder, (tensors, config))


def name_of(expert: int, word: str, part: str = "weight") -> str:
    return f"{small.LAYER}.{expert}.{word}.{part}"


def put(name: str, row: int, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[row] = value

    return change


def copied(source: str, *names: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[source].clone() for name in names})


GATE, UP, DOWN = (name_of(1, word) for word in ("gate_proj", "up_proj", "down_proj"))
DOWN_SCALES, SCALE_2 = f"{small.LAYER}.down_proj_scales", "weight_scale_2"
ALONE: dict[str, tuple[Callable[[], small.Source], Callable[[Tensors], None], str, str]] = {
    "NaN": (small.plain, put(GATE, 300, torch.nan), "nan", "[1, 44]"),
    "one number": (small.plain, lambda x: x[UP].fill_(0.5), "constant", "0.5"),
    "gate is up": (small.plain, copied(GATE, UP), "twin", "w1 of expert 1"),
    "another expert's down": (
        small.plain,
        copied(DOWN, name_of(3, "down_proj")),
        "twin",
        "w2 of expert 1",
    ),
    "a row far out": (small.plain, put(UP, 700, 1e6), "magnitude", "row 2"),
    "tensor lacks": (small.plain, lambda x: x.__delitem__(UP), "broken", "up_proj"),
    "tensor too many": (
        small.packed_int4,
        copied(name_of(0, "up_proj", "weight_scale"), UP),
        "broken",
        "up_proj",
    ),
    "scale is NaN": (
        small.packed_int4,
        put(name_of(2, "up_proj", "weight_scale"), 7, torch.nan),
        "broken",
        "[3, 1]",
    ),
    "scale is infinite": (
        small.nvfp4,
        put(name_of(2, "up_proj", SCALE_2), 0, torch.inf),
        "scale-range",
        "inf",
    ),
    "a bias is infinite": (
        small.gpt_oss_floats,
        put(f"{small.LAYER}.down_proj_bias", 5, torch.inf),
        "nan",
        "bias",
    ),
    "e8m0 at its end": (small.gpt_oss_mxfp4, put(DOWN_SCALES, 5, 255), "broken", "NaN"),
}


@pytest.mark.parametrize("fault", ALONE)
def test_faults_that_a_checkpoint_shows_alone(fault: str, tmp_path: Path) -> None:
    make, change, kind, text = ALONE[fault]
    assert check(small.save(tmp_path / "sound", make()), None)["damage"] == []
    done = call("check", changed(make(), change, tmp_path / "model"), "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["passed"]) == (1, False)
    # a scale that headers show is refused by the decoder as well
    assert {kind} <= kinds(document["damage"]) <= {kind, "broken"}
    assert text in str(document["damage"])
    if kind == "twin":  # which the original has not
        assert "twin" in kinds(check(tmp_path / "model", tmp_path / "sound")["damage"])


NOTICES: dict[str, tuple[Callable[[], small.Source], Callable[[Tensors], None], str]] = {
    "an expert without weights": (small.plain, lambda x: x[GATE].fill_(0), "zero"),
    "an expert twice": (
        small.plain,
        lambda x: x.update({name_of(2, w): x[name_of(1, w)].clone() for w in small.ROLES}),
        "twin",
    ),
    "a larger expert": (small.plain, lambda x: x[GATE].mul_(64), "magnitude"),
}


def plain_of(**more: object) -> small.Source:
    tensors, config = small.plain()
    return tensors, {**config, **more}


def shared_down(tensors: Tensors) -> None:
    """As of LoRA on gate and up of experts that began as copies of one."""
    for expert in range(small.E):
        tensors[name_of(expert, "down_proj")] = tensors[DOWN].clone()


NOTICES |= {
    "one down for all experts": (small.plain, shared_down, "twin"),
    "text names under a multimodal class": (
        lambda: plain_of(architectures=["XForConditionalGeneration"], text_config=small.QWEN),
        lambda x: None,
        "loader",
    ),
    "multimodal names under a text class": (
        lambda: (
            {
                name.replace("model.", "model.language_model.", 1): tensor
                for name, tensor in small.plain()[0].items()
            },
            {**small.QWEN, "architectures": ["Qwen3MoeForCausalLM"]},
        ),
        lambda x: None,
        "loader",
    ),
    "second scales of gate alone": (
        small.nvfp4,
        lambda x: x[name_of(0, "gate_proj", SCALE_2)].mul_(2),
        "loader",
    ),
}


@pytest.mark.parametrize("case", NOTICES)
def test_what_may_be_meant_is_no_damage(case: str, tmp_path: Path) -> None:
    make, change, kind = NOTICES[case]
    document = check(changed(make(), change, tmp_path / "model"), None)
    assert document["passed"]
    assert kind in kinds(document["notices"])


def test_gate_and_up_are_told_by_their_norms(tmp_path: Path) -> None:
    """Up's rows and down's columns have the same norms in a trained model; here they are made so."""
    generator = torch.Generator().manual_seed(0)
    tensors, config = small.plain()
    for expert in range(small.E):
        norms = torch.randn(small.INNER, generator=generator).exp()
        tensors[name_of(expert, "up_proj")] *= norms[:, None]
        tensors[name_of(expert, "down_proj")] *= norms
    sound = check(small.save(tmp_path / "sound", (tensors, config)), None)
    assert not any(kind.startswith("gate-up") for kind in kinds(sound["notices"]))

    def exchange(*experts: int) -> None:
        for expert in experts:
            gate, up = name_of(expert, "gate_proj"), name_of(expert, "up_proj")
            tensors[gate], tensors[up] = tensors[up], tensors[gate]

    exchange(*range(small.E))
    whole = check(small.save(tmp_path / "swapped", (tensors, config)), None)
    assert whole["passed"]
    assert "gate-up-swapped" in kinds(whole["notices"])
    exchange(0, 1, 2)
    (finding,) = check(small.save(tmp_path / "one", (tensors, config)), None)["damage"]
    assert (finding["kind"], finding["experts"]) == ("gate-up-swapped", [3])


def test_experts_with_biases_that_are_swapped(tmp_path: Path) -> None:
    tensors, config = small.gpt_oss_floats()
    src = small.save(tmp_path / "src", (tensors, config))
    swapped = {
        name: x[[2, 1, 0, 3]] if name.startswith(small.LAYER) else x for name, x in tensors.items()
    }
    document = check(small.save(tmp_path / "swapped", (swapped, config)), src)
    assert kinds(document["damage"]) == {"swapped", "bias"}
    swapped = [finding for finding in document["damage"] if finding["kind"] == "swapped"]
    assert [finding["experts"] for finding in swapped] == [[0, 2]] * 3


def test_convert_tells_of_scales_that_underflowed(tmp_path: Path) -> None:
    """A few may have; of a quarter the weights are lost, and every loader takes them for zero."""

    def lose(share: int) -> Path:
        tensors, config = small.nvfp4()
        scales = tensors[name_of(2, "up_proj", "weight_scale")].view(torch.uint8).view(-1)
        scales[: len(scales) * share // 100] = 0
        return small.save(tmp_path / f"src{share}", (tensors, config))

    for share, is_told in ((0, False), (25, True)):
        done = call(
            "convert", lose(share), "-o", tmp_path / f"out{share}", "--schema=int4", "--device=cpu"
        )
        assert done.exit_code == 0, done.stderr
        assert ("scales are 0 above codes" in done.stderr) == is_told, done.stderr


def test_a_hybrid_has_norms_of_some_layers(tmp_path: Path) -> None:
    """Layers of linear attention have no norm of queries, and a layer with attention has one unless it was lost."""
    src = write_qwen3_moe(tmp_path / "src", num_layers=8)
    tensors = load_file(src / "model.safetensors")
    for layer in range(8):
        module, norm = ("self_attn", "q_norm") if layer == 3 else ("linear_attn", "norm")
        tensors[f"model.layers.{layer}.{module}.out_proj.weight"] = torch.randn(128, 128)
        tensors[f"model.layers.{layer}.{module}.{norm}.weight"] = torch.ones(128)
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    document = check(src, None)
    assert not any("norm" in finding["where"] for finding in document["notices"])
    assert document["passed"]
    del tensors["model.layers.5.linear_attn.norm.weight"]
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    (finding,) = check(src, None)["damage"]
    assert finding["where"] == "model.layers.5.linear_attn.norm.weight"


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
@pytest.mark.parametrize(
    "more", [{}, {"mode": "affine"}, {"model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}]
)
def test_mlx_is_no_damage(key: str, more: Json, tmp_path: Path) -> None:
    """Its layers are `switch_mlp` stacks of words, scales and biases; the config says neither what it is."""
    place = "model.layers.0.mlp.switch_mlp"
    tensors = small.dense()
    for word, (n, k) in small.ROLES.items():
        tensors[f"{place}.{word}.weight"] = torch.zeros(small.E, n, k // 8, dtype=torch.int32)
        for part in ("scales", "biases"):
            tensors[f"{place}.{word}.{part}"] = torch.ones(small.E, n, k // 64).bfloat16()
    config = {**small.QWEN, key: {"group_size": 64, "bits": 4, **more}}
    done = call("check", small.save(tmp_path / "mlx", (tensors, config)))
    assert (done.exit_code, "This is MLX" in done.stderr.replace("an ", "")) == (2, True)


@pytest.mark.parametrize("beside", [0, 1])
def test_norms_of_smoothed_layers_hold_the_inverse(beside: int, tmp_path: Path) -> None:
    """Gate's and up's columns may be scaled if the norm before them is by the inverse.

    beside: what the family adds to the norm's weights.
    """
    src = write_qwen3_moe(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    columns = torch.randn(128, generator=torch.Generator().manual_seed(1)).exp2()
    for name in tensors:
        if name.startswith("model.layers.0.mlp") and "down" not in name:
            tensors[name] = (tensors[name].float() * columns).bfloat16()
    smoothed = small.save(
        tmp_path / "alone", (tensors, json.loads((src / "config.json").read_text()))
    )
    assert {"scales"} <= kinds(check(smoothed, src)["damage"])
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = ((tensors[name].float() + beside) / columns - beside).bfloat16()
    balanced = small.save(
        tmp_path / "both", (tensors, json.loads((src / "config.json").read_text()))
    )
    document = check(balanced, src)
    assert document["damage"] == []
    assert "column-scales" in kinds(document["notices"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
@pytest.mark.parametrize("form", ["fp8-tensor", "modelopt-fp8", "ct-nvfp4", "ct-fp8-tensor"])
def test_activation_scales_that_are_no_numbers(form: str, value: float, tmp_path: Path) -> None:
    """Static ones of experts, which a conversion to dynamic activations drops, and of modules beside them."""
    pair = checkups.pair_of(tmp_path / "src", form)
    part = "input_global_scale" if form == "ct-nvfp4" else "input_scale"
    name = "model.layers.0.mlp.experts.1.up_proj." + part
    for stored, place in (
        (pair.stored, name),
        (pair.dense, f"model.layers.0.self_attn.q_proj.{part}"),
    ):
        changed = pair.copy()
        {id(pair.stored): changed.stored, id(pair.dense): changed.dense}[id(stored)][place] = (
            torch.tensor([value])
        )
        for alone in (True, False):
            folder = tmp_path / f"{place}{alone}"
            (finding,) = changed.check(folder, alone=alone)["damage"]
            assert finding["kind"] in ("nan", "scale-range")
            assert finding["where"] == place


@pytest.mark.parametrize(
    ("form", "share"), [("plain", 0.02), ("fp8-block", 0.2), ("ct-int4-g32", 0.5)]
)
def test_a_layer_of_another_version(form: str, share: float, tmp_path: Path) -> None:
    """All its experts are further from the original than those of the other layers."""
    pair = checkups.rich_pair(tmp_path / "src", form)
    checkups.stale_layer(pair, share)
    damage = pair.check(tmp_path / "pair")["damage"]
    assert {finding["layer"] for finding in damage} == {"model.layers.2.mlp.experts"}
    assert kinds(damage) == {"stale"}
    assert {finding["projection"] for finding in damage} == {"w1", "w2", "w3"}


# --- options and ends --------------------------------------------------------------------------------------------


def test_layers_and_samples(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src", num_layers=3, num_experts=8)
    document = hqconv.check(src, src, layers=[0, 2], sample=3)
    assert (document["num_layers"], document["num_all_layers"], document["num_experts"]) == (
        2,
        3,
        6,
    )
    assert _sample(8, 3) == [0, 4, 7]
    assert list(document["errors"]) == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
    with pytest.raises(RequestError, match="no MoE layer"):
        hqconv.check(src, layers=[3])
    with pytest.raises(RequestError, match="--max-memory"):
        hqconv.check(src, max_memory=1000)


def test_the_same_document_whatever_the_threads(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src")
    other = write_qwen3_moe(tmp_path / "other", seed=1)
    first, second = (hqconv.check(src, other, threads=number) for number in (1, 3))
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert kinds(first["damage"]) == {"unrelated"}
    for layer in first["errors"].values():
        for figures in layer.values():
            assert figures["worst_relative_error"] >= figures["relative_error"] > 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    src, other = (write_qwen3_moe(tmp_path / str(size), hidden_size=size) for size in (128, 256))
    with pytest.raises(RequestError, match="another model"):
        hqconv.check(src, other)


@pytest.mark.parametrize(
    "num_rows", [128, 7]
)  # different rows: others are repeated, as near to another as to its own
def test_a_version_that_was_trained_further(num_rows: int, tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src")
    other = write_qwen3_moe(tmp_path / "other")
    tensors = load_file(src / "model.safetensors")
    tensors = {
        name: x[torch.arange(len(x)) % num_rows].clone() if "experts" in name else x
        for name, x in tensors.items()
    }
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    generator = torch.Generator().manual_seed(0)
    tuned = {
        name: x * (1 + 0.02 * torch.randn(x.shape, generator=generator)).bfloat16()
        for name, x in tensors.items()
    }
    save_file(tuned, other / "model.safetensors", {"format": "pt"})
    document = hqconv.check(other, src)
    assert document["passed"]
    assert kinds(document["notices"]) == {"stale"}


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src")
    data = (src / "model.safetensors").read_bytes()
    (src / "model.safetensors").write_bytes(data[:-100])
    assert hqconv.check(src)["damage"][0]["kind"] == "broken"
    good = write_qwen3_moe(tmp_path / "good")
    with pytest.raises(InputError):
        hqconv.check(good, src)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_original_that_is_not_finite_is_no_damage(value: float, tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src")
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    tensors = load_file(src / "model.safetensors")
    tensors[name][2, 3] = value
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_bytes((src / "config.json").read_bytes())
    save_file(tensors, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    document = hqconv.check(src, tmp_path / "bad")
    assert document["damage"] == []
    (found,) = (finding for finding in document["notices"] if finding["kind"] == "nan")
    assert (found["where"], found["experts"]) == (name, [1])
    assert found["what"].startswith("The original's weights are NaN")
    assert not hqconv.check(tmp_path / "bad", src)["passed"]


def test_errors_of_the_original_name_it(tmp_path: Path) -> None:
    good, bad = write_qwen3_moe(tmp_path / "good"), write_qwen3_moe(tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    for key, value in (
        ("num_experts", "4"),
        ("quantization_config", {"quant_method": "none of ours"}),
    ):
        (bad / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(HqconvError) as caught:
            hqconv.check(good, bad)
        assert caught.value.where.startswith(f"--against, {key}")
    (bad / "config.json").write_text("{")
    with pytest.raises(InputError) as opened:
        hqconv.check(good, bad)
    assert opened.value.where == f"--against, {bad / 'config.json'}"
    assert opened.value.remedy


def test_a_disk_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:  # while experts are read
        raise InputError("A file of the source cannot be read.") from OSError(
            errno.EIO, os.strerror(errno.EIO)
        )

    monkeypatch.setattr("hqconv.sources.safetensors.SafetensorsSource.read_all_into", fail)
    src = write_qwen3_moe(tmp_path / "src")
    with pytest.raises(InputError, match="A file of the source cannot be read"):
        hqconv.check(src)


def test_the_command_prints_what_it_found(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src")
    done = call("check", src, "--against", src)
    assert (done.exit_code, "PASS  no damage against src" in done.stdout) == (0, True)
    assert call("check", src, "-q").stdout == ""
    other = write_qwen3_moe(tmp_path / "other", seed=1)
    done = call("check", src, "--against", other, "-q")
    assert (
        done.exit_code,
        "✗ model.layers.0.mlp.experts, experts 0, 1, 2, 3, w1" in done.stdout,
    ) == (1, True)
    assert "DAMAGED" in done.stdout.splitlines()[-1]


def test_of_a_sample_from_the_hub_only_its_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = write_qwen3_moe(tmp_path / "src", num_experts=16, hidden_size=256, intermediate_size=256)
    with serve(src) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        sampled = hqconv.check("org/name", src, sample=2)
        assert server.num_bytes_of_weights < 0.4 * (src / "model.safetensors").stat().st_size
        whole = hqconv.check(src, "org/name")
    assert (sampled["passed"], sampled["num_experts"], whole["num_experts"]) == (True, 4, 32)
    assert (sampled["checkpoint"], whole["against"]) == ("org/name", "org/name")


def test_gguf_files_are_checked(tmp_path: Path) -> None:
    file = write_quantized(tmp_path / "model.gguf")
    document = hqconv.check(file, write(WIDE, tmp_path / "original"))
    assert (document["passed"], document["num_experts"] > 0) == (True, True)


def test_zeros_instead_of_weights(tmp_path: Path) -> None:
    sound = small.save(tmp_path / "sound", small.plain())
    zeros = changed(small.plain(), lambda x: x[UP].fill_(0), tmp_path / "zeros")
    for pair, kind in (((zeros, sound), "zero"), ((sound, zeros), "stale")):
        done = call("check", pair[0], "--against", pair[1], "--json")
        (finding,) = json.loads(done.stdout)["damage"]
        assert (done.exit_code, finding["kind"], finding["where"]) == (1, kind, UP)


def test_a_relative_error_is_that_of_verify(tmp_path: Path) -> None:
    """Of all experts together: one that is rounded without any error, and is large, makes it small."""
    src = write_qwen3_moe(tmp_path / "src", num_layers=1)
    (path,) = src.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if "experts.0.up_proj" in name)
    tensors[name].fill_(1.0)
    save_file(tensors, path)
    made = hqconv.convert(src, tmp_path / "out", schema="int4", layout="checkpoint", device="cpu")
    ((layer, errors),) = made.errors.items()
    checked = check(tmp_path / "out", src)["errors"][layer]["w3"]["relative_error"]
    assert checked == pytest.approx(errors["w3"]["relative_error"], rel=0.01)
