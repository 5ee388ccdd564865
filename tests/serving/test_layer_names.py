"""Which layer a layer of vLLM's is: names as vLLM 0.33 gives them, no vLLM (test_served_models has all families)."""

from __future__ import annotations

import re

import pytest

from hqconv.models.families import FAMILIES
from hqconv.serving.vllm.translation import find_layer

DRAFT = 2  # the number of the first draft of the models below, where vLLM counts on after the last layer

# Each spelling that a family or a mapper of vLLM's has; most families' layers have one name everywhere, as qwen3_moe's.
# model type, layer (`7` is the layer), what vLLM's mappers make of it, prefix of vLLM's layer
MAIN = [
    ("qwen3_moe", "model.layers.7.mlp.experts", "", ""),
    (
        "qwen3_5_moe",
        "model.language_model.layers.7.mlp.experts",
        "language_model.model.layers.7.mlp.experts",
        "",
    ),
    (
        "interns2_mobius",
        "model.language_model.meta_mlp.7.experts",
        "language_model.model.meta_mlp.7.experts",
        "",
    ),
    (
        "qwen3_omni_moe",
        "thinker.model.layers.7.mlp.experts",
        "language_model.model.layers.7.mlp.experts",
        "",
    ),
    ("deepseek_v4", "layers.7.ffn.experts", "model.layers.7.ffn.experts", ""),
    ("minimax_m2", "model.layers.7.block_sparse_moe.experts", "", "model.layers.7.mlp.experts"),
    (
        "phimoe",
        "model.layers.7.block_sparse_moe.experts",
        "model.layers.7.mlp.experts",
        "",
    ),  # transformers' backend
    ("nemotron_h", "backbone.layers.7.mixer.experts", "model.layers.7.mixer.experts", ""),
    (
        "nemotron_h_omni",
        "language_model.backbone.layers.7.mixer.experts",
        "language_model.model.layers.7.mixer.experts",
        "",
    ),
    (
        "granitemoe",
        "model.layers.7.block_sparse_moe",
        "",
        "model.layers.7.block_sparse_moe.experts",
    ),
    (
        "gemma4",
        "model.language_model.layers.7.experts",
        "language_model.model.layers.7.experts",
        "",
    ),
    ("diffusion_gemma", "model.decoder.layers.7.experts", "model.layers.7.experts", ""),
    ("dbrx", "transformer.blocks.7.ffn.experts.mlp", "", "transformer.blocks.7.ffn"),
    ("step3_text", "model.layers.7.moe", "", "model.layers.7.moe.experts"),
    (
        "step3p7",
        "model.layers.7.moe",
        "language_model.model.layers.7.moe",
        "language_model.model.layers.7.moe.experts",
    ),
    (
        "aria",
        "language_model.model.layers.7.mlp.experts",
        "language_model.layers.7.mlp.experts",
        "language_model.model.layers.7.mlp.experts",
    ),
    ("inkling_mm_model", "model.llm.layers.7.mlp.experts", "model.layers.7.mlp.experts", ""),
]
# model type, blocks of the main model, the draft's, what is made of it, the draft layer's prefix
DRAFTS = [
    ("deepseek_v3", "model.layers.1.mlp.experts", "model.layers.2.mlp.experts", "", ""),
    ("qwen3_next", "model.layers.0.mlp.experts", "mtp.layers.0.mlp.experts", "", ""),
    (
        "qwen3_5_moe",
        "language_model.model.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts",
        "",
        "",
    ),
    (
        "qwen4_exp",
        "model.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts",
        "",
        "mtp.layers.2.mlp.experts",
    ),
    (
        "deepseek_v4",
        "model.layers.0.ffn.experts",
        "mtp.0.ffn.experts",
        "model.mtp.0.ffn.experts",
        "model.layers.2.ffn.experts",
    ),
    ("deepseek_v4", "layers.0.ffn.experts", "mtp.0.ffn.experts", "", "model.layers.2.ffn.experts"),
    ("nemotron_h", "backbone.layers.1.mixer.experts", "mtp.layers.1.mixer.experts", "", ""),
    (
        "nemotron_h_omni",
        "language_model.model.layers.1.mixer.experts",
        "language_model.mtp.layers.1.mixer.experts",
        "",
        "mtp.layers.1.mixer.experts",
    ),
]


@pytest.mark.parametrize(("model_type", "block", "mapped", "prefix"), MAIN)
def test_a_layer_of_the_model(model_type: str, block: str, mapped: str, prefix: str) -> None:
    mapped = mapped or block
    prefix = prefix or mapped
    (family,) = (family for family in FAMILIES if model_type in family.model_types)
    assert (
        block.replace(".7.", ".{layer}.") in family.modules
    )  # the name is one that an artifact can have
    numbered = {
        mapped.replace(".7.", f".{layer}."): block.replace(".7.", f".{layer}.")
        for layer in range(12)
    }
    kept = {
        **{name: name for name in numbered.values()},
        **numbered,
    }  # with the names before the mappers
    for renamed in (numbered, kept):
        for layer in range(12):
            wanted = block.replace(".7.", f".{layer}.")
            assert find_layer(prefix.replace(".7.", f".{layer}."), renamed) == wanted
        assert (
            find_layer(prefix.replace(".7.", ".12."), renamed, dict.fromkeys(renamed.values(), 12))
            is None
        )
        del renamed[mapped]
        if mapped != block:
            renamed.pop(block, None)
        assert find_layer(prefix, renamed) is None  # its neighbours are there, and are not it


@pytest.mark.parametrize(("model_type", "main", "layer", "mapped", "prefix"), DRAFTS)
def test_a_draft_layer(model_type: str, main: str, layer: str, mapped: str, prefix: str) -> None:
    mapped = mapped or layer
    prefix = prefix or mapped
    (family,) = (family for family in FAMILIES if model_type in family.model_types)
    assert re.sub(r"\.\d+\.", ".{layer}.", layer) in family.modules
    renamed, layers = {main: main, mapped: layer}, {main: 0, layer: DRAFT}
    assert find_layer(prefix, renamed, layers) == layer
    assert find_layer(main, renamed, layers) == main
    assert find_layer(prefix, {main: main}, {main: DRAFT}) is None  # not the model's layer instead
    assert find_layer(main, {mapped: layer}, {layer: DRAFT}) is None


DSV4 = {
    "model.layers.0.ffn.experts": "layers.0.ffn.experts",
    "model.mtp.0.ffn.experts": "mtp.0.ffn.experts",
}
DSV4_LAYERS = {"layers.0.ffn.experts": 0, "mtp.0.ffn.experts": 2}


@pytest.mark.parametrize(
    ("prefix", "renamed", "layers"),
    [
        ("model.layers.2.ffn.experts", DSV4, {}),  # nobody said which number mtp.0 has
        ("model.layers.1.ffn.experts", DSV4, DSV4_LAYERS),  # a layer of the model that is not there
        ("model.layers.2.mlp.experts", DSV4, DSV4_LAYERS),  # another module
        ("mtp.layers.0.mlp.experts", {"model.layers.0.mlp.experts": "a"}, {"a": 0}),
        ("mtp.layers.3.mlp.experts", {"mtp.layers.0.mlp.experts": "a"}, {"a": 2}),
        ("model.layers.0.mlp.experts", {"mtp.layers.0.mlp.experts": "a"}, {"a": 0}),
        ("model.layers.2.mlp.experts", {"mtp.layers.0.mlp.experts": "a"}, {"a": 2}),
        ("model.layers.0.mlp.experts", {"language_model.mtp.layers.0.mlp.experts": "a"}, {"a": 0}),
        # MiniMax-M3's drafts count from 0 (vllm/models/minimax_m3/nvidia/mtp.py), and are not the first layers.
        (
            "model.layers.0.block_sparse_moe.experts",
            {"language_model.model.layers.0.block_sparse_moe.experts": "a"},
            {"a": 0},
        ),
        # step3p5_mtp.py: a draft with experts would not be loaded without their tensors.
        ("model.layers.45.mtp_block.moe.experts", {"model.layers.45.moe": "a"}, {"a": 45}),
        ("model.layers.1.mlp.experts", {"model.layers.11.mlp.experts": "a"}, {"a": 1}),
        ("visual.blocks.1.mlp.experts", {"model.layers.1.mlp.experts": "a"}, {"a": 1}),
        ("", {"model.layers.1.mlp.experts": "a"}, {"a": 1}),
    ],
)
def test_what_no_rule_knows_is_nobodys(
    prefix: str, renamed: dict[str, str], layers: dict[str, int]
) -> None:
    assert find_layer(prefix, renamed, layers) is None
    assert find_layer(prefix, {}, layers) is None


def test_two_drafts_that_could_be_meant_are_none() -> None:
    renamed = {"mtp.0.ffn.experts": "a", "model.mtp.0.ffn.experts": "b"}
    assert find_layer("model.layers.2.ffn.experts", renamed, {"a": 2, "b": 2}) is None
    assert find_layer("model.layers.2.ffn.experts", renamed, {"a": 2, "b": 3}) == "a"
    assert find_layer("model.layers.2.ffn.experts", dict.fromkeys(renamed, "a"), {"a": 2}) == "a"


def test_two_layers_that_could_be_meant_are_none() -> None:
    both = {"model.layers.0.mlp": "a", "model.layers.0.block_sparse_moe.experts": "b"}
    assert find_layer("model.layers.0.mlp.experts", both) is None
    assert (
        find_layer("model.layers.0.mlp.experts", dict.fromkeys(both, "a")) == "a"
    )  # two names of one layer
    assert (
        find_layer("model.layers.0.mlp.experts", {**both, "model.layers.0.mlp.experts": "c"}) == "c"
    )


def test_a_name_that_two_layers_have_is_nobodys() -> None:
    assert find_layer("model.layers.0.experts", {"model.layers.0.experts": ""}) is None
    assert find_layer("model.layers.0.moe.experts", {"model.layers.0.moe": ""}) is None
