"""Mapping names to experts: every row on synthetic checkpoints, every refusal, exact accounting."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.formats.source_format import PLAIN
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.families import BY_MODEL_TYPE, BY_NAME, FAMILIES, UNSUPPORTED, Family
from hqconv.models.moe_layer import MoeLayer, View
from hqconv.models.tensor_names import decoder_layer
from hqconv.schemas.activation import Activation
from hqconv.schemas.tensors import TensorRef, num_bits
from tests.make.effort import num_examples

H, INTER, E, TOP_K, NUM_LAYERS = 64, 48, 3, 2, 12
SINGLE, STACKED = "single", "stacked"  # experts with tensors of their own, or all in one
FORMS = [
    (family, SINGLE) for family in FAMILIES if not family.is_unmarked
]  # whose name says nothing is never apart
FORMS += [(family, STACKED) for family in FAMILIES if family.stacks]
FORM_IDS = [f"{family.name}-{form}" for family, form in FORMS]
MODEL_TYPES = [(t, family, form) for family, form in FORMS for t in family.model_types]


Tensors = dict[str, TensorRef]


def put(tensors: Tensors, name: str, *shape: int, dtype: str = "BF16") -> None:
    """A tensor in small shards, which cut through experts; each at its own place of its file."""
    num_bytes = math.prod(shape) * num_bits(dtype) // 8
    last = next(reversed(tensors.values()), None)
    place = last.offset_bytes + last.num_bytes if last else 0
    tensors[name] = TensorRef(name, dtype, shape, len(tensors) // 7, place, num_bytes)


def put_layer(
    tensors: Tensors, family: Family, layer: str, num_experts: int = E, dtype: str = "BF16"
) -> None:
    for e in range(num_experts):
        for role, name in family.projections.items():
            shape = (H, INTER) if role == "w2" else (INTER, H)
            put(tensors, f"{layer}.{e}.{name}.weight", *shape, dtype=dtype)


def put_stacks(
    tensors: Tensors, family: Family, layer: str, num_experts: int = E, dtype: str = "BF16"
) -> None:
    """The fused form; a stack that may lie either way is [E, out, in]."""
    part = ".weight" if family.is_unmarked else ""
    for stack in family.stacks:
        rows, columns = (H, INTER) if "w2" in stack.roles else (len(stack.roles) * INTER, H)
        shape = (columns, rows) if stack.transposed else (rows, columns)
        dealt = (num_experts * shape[0], shape[1]) if stack.flat else (num_experts, *shape)
        put(tensors, f"{layer}.{stack.name}{part}", *dealt, dtype=dtype)


PUT = {SINGLE: put_layer, STACKED: put_stacks}


# Whose code has a limit where the config says none.
OF_CODE = {"deepseek_v4": "silu_clamp10", "glm5_next": "silu_clamp10", "moondream3": "gelu_shift"}


def config_of(family: Family, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        family.num_layers_keys[0]: NUM_LAYERS,
        family.num_experts_keys[0]: E,
        family.top_k_keys[0]: TOP_K,
        family.hidden_size_keys[0]: H,
        family.intermediate_size_keys[0]: INTER,
        family.activation_keys[0]: family.activation,
    }


def neighbours(family: Family) -> str:
    """The template of the module that the experts' own lies in; where they have none, of a dense layer's."""
    if family.is_unmarked:
        return family.modules[0]
    before, experts, _ = family.modules[0].rpartition(".experts")
    return before if experts else family.modules[0].rpartition(".")[0] + ".mlp"


def checkpoint(
    family: Family, model_type: str, form: str = SINGLE
) -> tuple[Tensors, dict[str, Any]]:
    """A dense first layer under the MoE module's own name, routers, shared experts, an MTP layer."""
    tensors: Tensors = {}
    put(tensors, "model.embed_tokens.weight", 100, H)
    module = neighbours(family)
    for name in ("gate_proj", "up_proj", "w1", "w3"):
        put(tensors, f"{module.format(layer=0)}.{name}.weight", 4 * INTER, H)
    put(tensors, f"{module.format(layer=0)}.down_proj.weight", H, 4 * INTER)
    for layer in (2, 10, NUM_LAYERS):
        mlp = module.format(layer=layer)
        put(tensors, f"{mlp}.gate.weight", E, H)
        put(tensors, f"{mlp}.gate.e_score_correction_bias", E, dtype="F32")
        put(tensors, f"{mlp}.expert_bias", E, dtype="F32")
        PUT[form](tensors, family, family.modules[0].format(layer=layer))
        put(tensors, f"{mlp}.shared_experts.up_proj.weight", INTER, H)
        put(tensors, f"{mlp}.shared_expert_gate.weight", 1, H)
        place = decoder_layer(family.modules[0].format(layer=layer))
        put(tensors, f"{place}linear_attn.conv1d.weight", H, 1, 4)
    put(tensors, "lm_head.weight", 100, H)
    return tensors, config_of(family, model_type)


def assert_partition(found: ExpertMap, tensors: Tensors) -> None:
    assert sorted([*found.converted, *found.copied, *found.dropped]) == sorted(tensors)
    named = {
        (ref.name, layer.name)
        for layer in found.layers
        for roles in layer.sources
        for parts in roles.values()
        for ref in parts.values()
    }
    assert named == set(found.converted.items())
    for layer in found.layers:
        assert len(layer.sources) == layer.num_experts
        places = [ref for expert in range(layer.num_experts) for ref in layer.refs(expert)]
        spans = {(ref.file, ref.name, ref.offset_bytes, ref.num_bytes) for ref in places}
        whole = {(ref.file, ref.name) for ref in places}
        assert len(spans) == len(places)  # no expert shares another one's bytes
        assert sum(num_bytes for *_, num_bytes in spans) == sum(
            tensors[name].num_bytes for _, name in whole
        )


QWEN = BY_MODEL_TYPE["qwen3_moe"]
LAYER = "model.layers.2.mlp.experts"


def qwen() -> tuple[Tensors, dict[str, Any]]:
    return checkpoint(QWEN, "qwen3_moe")


@pytest.mark.parametrize(
    ("model_type", "family", "form"), MODEL_TYPES, ids=[f"{t}-{f}" for t, _, f in MODEL_TYPES]
)
def test_every_model_type_is_mapped(model_type: str, family: Family, form: str) -> None:
    tensors, config = checkpoint(family, model_type, form)
    found = map_experts(tensors, config)
    assert_partition(found, tensors)
    assert found.family == family.name
    assert [layer.index for layer in found.layers] == [2, 10, NUM_LAYERS]
    for layer in found.layers:
        assert layer.name == family.modules[0].format(layer=layer.index)
        assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (E, H, INTER)
        assert (layer.top_k, layer.dtype) == (TOP_K, "BF16")
        assert layer.activation.label == OF_CODE.get(family.name, family.activation)
        assert (layer.format, layer.has_bias) == (PLAIN, False)
        assert layer.gated == family.gated == ("w1" in layer.sources[0])
        _check_sources(layer, family, form)
    assert len({ref.file for ref in tensors.values()}) > (3 if form == SINGLE else 1)
    assert not found.dropped
    assert not [
        name
        for name in found.copied
        if ".experts." in name or (len(tensors[name].shape) == 3 and "moe" in name)
    ]


def _check_sources(layer: MoeLayer, family: Family, form: str) -> None:
    """Every projection of every expert is found under its own name, or in its own stack, with its own shape."""
    for e, roles in enumerate(layer.sources):
        assert set(roles) == set(family.projections) == set(layer.roles)
        for role, name in family.projections.items():
            part = layer.slices[role]["weight"]
            assert part.logical_shape(E) == layer.shape(role)
            if form == SINGLE:
                assert roles[role]["weight"].name == f"{layer.name}.{e}.{name}.weight"
                continue
            (stack,) = (stack for stack in family.stacks if role in stack.roles)
            name = f"{layer.name}.{stack.name}" + ".weight" * family.is_unmarked
            assert roles[role]["weight"].name == part.template == name
            assert part.view.index == stack.roles.index(role)


@pytest.mark.parametrize(("family", "form"), FORMS, ids=FORM_IDS)
def test_every_template_is_mapped(family: Family, form: str) -> None:
    for template in family.modules:
        tensors: Tensors = {}
        PUT[form](tensors, family, template.format(layer=1))
        found = map_experts(tensors, config_of(family, family.model_types[0]))
        assert_partition(found, tensors)
        assert found.layers[0].name == template.format(layer=1)
        assert found.layers[0].index == (
            1 + NUM_LAYERS if "mtp." in template or "mtp_layers." in template else 1
        )


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if not f.is_unmarked], ids=lambda family: family.name
)
def test_every_spelling_of_a_family_is_mapped(family: Family) -> None:
    """Under every path, one layer for each spelling; a layer is named, and asked for in the config, as it is."""
    config = config_of(family, family.model_types[0])
    config |= {family.num_layers_keys[0]: len(family.spellings)}
    for template in family.paths[::5]:
        tensors: Tensors = {}
        layers: dict[str, Mapping[str, str]] = {}
        for number, spelling in enumerate(family.spellings):
            layers[template.format(layer=number)] = spelling
            put_layer(tensors, dataclasses.replace(family, projections=spelling), [*layers][-1])
        found = map_experts(tensors, config)
        assert_partition(found, tensors)
        assert {layer.name for layer in found.layers} == {*layers}
        for layer in found.layers:
            for role, word in layers[layer.name].items():
                template_of = layer.slices[role]["weight"].template
                assert template_of == f"{layer.name}.{{expert}}.{word}.weight"
            assert (
                layer.module(1, "w2") == f"{layer.name}.1.{family.projections['w2']}"
            )  # in an artifact, as released


@pytest.mark.parametrize("beside", ["experts", "attention"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model", "model.language_model"),
        ("model.language_model", "language_model.model"),
        ("model", "model.text_model"),
    ],
)
def test_layers_under_two_prefixes_are_refused(first: str, second: str, beside: str) -> None:
    """A server loads the layers of one prefix; stacks of their own, as of a draft or an encoder, have theirs."""
    tensors: Tensors = {}
    for number, prefix in enumerate((first, second if beside == "experts" else first)):
        put_layer(tensors, QWEN, f"{prefix}.layers.{number}.mlp.experts")
    put(tensors, "model.visual.blocks.0.attn.proj.weight", H, H)
    put(tensors, "mtp.layers.0.self_attn.q_proj.weight", H, H)
    if beside == "attention":
        map_experts(tensors, config_of(QWEN, "qwen3_moe"))
        put(tensors, f"{second}.layers.0.self_attn.q_proj.weight", H, H)
    with pytest.raises(InputError, match="two prefixes"):
        map_experts(tensors, config_of(QWEN, "qwen3_moe"))


def test_one_spelling_and_one_module_in_each_layer() -> None:
    tensors, config = checkpoint(BY_MODEL_TYPE["mixtral"], "mixtral")
    layer = "model.layers.2.block_sparse_moe.experts"
    put(tensors, f"{layer}.1.up_proj.weight", INTER, H)
    with pytest.raises(InputError, match=r"projection twice\.\n.*experts\.1\.up_proj"):
        map_experts(tensors, config)
    del tensors[f"{layer}.1.w3.weight"]
    with pytest.raises(
        InputError, match=r"different names(?s:.*)w3, as in the layer's other experts"
    ):
        map_experts(tensors, config)
    tensors, config = checkpoint(BY_MODEL_TYPE["mixtral"], "mixtral")
    put_layer(tensors, QWEN, "model.layers.2.mlp.experts")
    with pytest.raises(InputError, match="experts twice"):
        map_experts(tensors, config)


FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize("row", ["mixtral", "qwen_moe", "granitemoe"])
@pytest.mark.parametrize(
    "target", [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", r"re:.*block_sparse_moe.*\.w[123]$"]
)
def test_a_config_may_name_modules_in_another_spelling(row: str, target: str) -> None:
    """Layer 2 is quantized, layer 10 is not: nor does the config say so of either under the names of its tensors."""
    family, tensors = BY_NAME[row], Tensors()
    scheme = {"targets": [target], "weights": FP8_CHANNEL}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"a": scheme},
    }
    config["ignore"] = [f"re:.*layers.10.{module}.*" for module in ("mlp", "block_sparse_moe")]
    for layer, dtype in ((2, "F8_E4M3"), (10, "BF16")):
        put_layer(tensors, family, family.modules[0].format(layer=layer), dtype=dtype)
    for name in [name for name in tensors if ".layers.2." in name]:
        put(tensors, f"{name}_scale", tensors[name].shape[0], 1)
    found = map_experts(tensors, config_of(family, family.model_types[0]), config)
    assert [layer.format.encoding for layer in found.layers] == ["fp8", "float"]
    scheme["targets"] = ["re:.*shared_experts.*"]
    with pytest.raises(InputError, match=r"declares no quantization(?s:.*)names of modules"):
        map_experts(tensors, config_of(family, family.model_types[0]), config)


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "ignored_layers": ["lm_head"]}
CT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": FP8_CHANNEL}},
    "ignore": ["re:.*experts.*"],
}
# config, stored experts, whether attention is quantized, what the message says to do
REMEDIES: list[tuple[dict[str, Any] | None, str, bool, str]] = [
    (None, "F8_E4M3", True, "Restore quantization_config"),
    (FP8, "BF16", False, "take quantization_config out of config.json"),
    (FP8, "BF16", True, rf"names of modules.*\(fp8\).*{LAYER}\.0\.gate_proj"),
    (CT, "F8_E4M3", True, "names of modules"),
]


@pytest.mark.parametrize(("config", "dtype", "is_coded", "remedy"), REMEDIES)
def test_a_remedy_names_what_to_change(
    config: dict[str, Any] | None, dtype: str, is_coded: bool, remedy: str
) -> None:
    tensors: Tensors = {}
    put_layer(tensors, QWEN, LAYER, dtype=dtype)
    for name in [*tensors] if dtype != "BF16" else []:
        put(tensors, f"{name}_scale", 1, dtype="F32")
    put(
        tensors,
        "model.layers.2.self_attn.q_proj.weight",
        H,
        H,
        dtype="F8_E4M3" if is_coded else "BF16",
    )
    put(tensors, "model.layers.2.mlp.gate.weight", E, H)
    with pytest.raises(InputError) as caught:
        map_experts(tensors, config_of(QWEN, "qwen3_moe"), config)
    assert re.search(remedy, caught.value.remedy), caught.value.remedy


# --- what a server needs beside the experts ----------------------------------------------------------------

ATTENTION = "model.layers.2.self_attn.q_proj"
LEFT_BEHIND = {
    "adapter": f"""
        {ATTENTION}.base_layer.weight {ATTENTION}.lora_A.default.weight {ATTENTION}.lora_B.weight {ATTENTION}.lora_a
        {ATTENTION}.lora_magnitude_vector.default.weight {ATTENTION}.vera_lambda_b.default {ATTENTION}.ia3_l
        {ATTENTION}.hada_w1_a.default {ATTENTION}.lokr_w1 {ATTENTION}.oft_R.default {ATTENTION}.boft_s
        {ATTENTION}.to_wrap.weight {ATTENTION}.adapter.linear_in.weight {LAYER}.lora_A.default.weight
        {LAYER}.1.up_proj.base_layer.weight {LAYER}.base_layer.gate_up_proj base_model.model.model.norm.weight
        model.layers.2.mlp.gate.original_module.weight model.layers.2.mlp.gate.modules_to_save.default.weight
        model.embed_tokens.lora_embedding_A.default model.embed_tokens.token_adapter.base_layer.weight
        lm_head.base_layer.bias prompt_encoder.default.embedding.weight
    """,
    "wrapper": f"""
        module.model.norm.weight module.{LAYER}.0.up_proj.weight _orig_mod.{LAYER}.0.up_proj.weight
        _fsdp_wrapped_module.lm_head.weight model.layers.2._checkpoint_wrapped_module.self_attn.q_proj.weight
        model.layers.2._orig_mod.input_layernorm.weight {ATTENTION}.weight_orig _forward_module.norm.weight
    """,
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in LEFT_BEHIND for name in LEFT_BEHIND[kind].split()]
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "brand_new"])
def test_names_that_training_leaves_behind_are_refused(
    model_type: str, kind: str, name: str
) -> None:
    tensors, config = qwen()
    put(tensors, name, 8, H)
    with pytest.raises(InputError, match=f"names of an? {kind}") as caught:
        map_experts(tensors, config | {"model_type": model_type})
    assert caught.value.where == name


def test_names_of_models_are_no_adapters() -> None:
    tensors, config = qwen()
    names = """
        lora_linear_q.0.weight vision_language_adapter.w_in.weight q_a_proj.weight router_bias
        self_attn.wo_a.weight audio.adapter.layers.0.weight vision.prompt_encoder.not_a_point
    """
    for name in names.split():
        put(tensors, f"model.{name}", 8, H)
    assert_partition(map_experts(tensors, config), tensors)


def test_every_layer_of_experts_has_a_router() -> None:
    """Of a layer with other tensors; a checkpoint of experts alone has none."""
    for router in (
        "gate.weight",
        "router.classifier.weight",
        "gate.wg.weight",
        "router.proj.qweight",
        "chooser.weight",
    ):
        tensors, config = qwen()
        for layer in (2, 10, NUM_LAYERS):
            del tensors[f"model.layers.{layer}.mlp.gate.weight"]
            put(tensors, f"model.layers.{layer}.mlp.{router}", E, H)
        assert len(map_experts(tensors, config).layers) == 3
        del tensors[f"model.layers.10.mlp.{router}"]
        put(tensors, "model.layers.10.self_attn.gate.weight", 1, H)
        for model_type in ("qwen3_moe", "brand_new"):
            with pytest.raises(InputError, match="experts and no router") as caught:
                map_experts(tensors, config | {"model_type": model_type})
            assert caught.value.where == "model.layers.10.mlp.experts"
    tensors, config = qwen()
    put(tensors, "model.layers.10.mlp.gate.weight", E - 1, H)
    with pytest.raises(InputError, match=r"fewer rows(?s:.*)layers\.10\.mlp\.gate"):
        map_experts(tensors, config)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        del tensors[name]
    with pytest.raises(InputError, match="experts and no router"):
        map_experts(tensors, config)
    map_experts(
        tensors, config | {"model_type": "brand_new"}
    )  # its router may have a name of its own
    alone = {name: ref for name, ref in tensors.items() if "expert" in name}
    assert len(map_experts(alone, config).layers) == 3


def test_architectures_that_are_no_names_are_passed_over() -> None:
    tensors, config = checkpoint(BY_MODEL_TYPE["longcat_flash"], "longcat_flash")
    del config["model_type"]
    for odd in ([], {}, 7, None):
        found = map_experts(tensors, config | {"architectures": [odd, "LongcatFlashForCausalLM"]})
        assert found.chosen_because.startswith("architecture LongcatFlashForCausalLM;")


def test_numbers_of_configs_in_other_forms() -> None:
    family = BY_MODEL_TYPE["hunyuan_v1_moe"]  # one value for each layer
    tensors, config = checkpoint(family, "hunyuan_v1_moe")
    config |= {
        "num_experts": [E] * NUM_LAYERS,
        "moe_topk": [1, 1, 1] + [2] * 9,
        "moe_intermediate_size": [INTER] * 12,
    }
    assert [layer.top_k for layer in map_experts(tensors, config).layers] == [1, 2, 2]
    tensors, config = checkpoint(
        BY_MODEL_TYPE["nemotron_h"], "nemotron_h"
    )  # the latent size is what experts see
    assert map_experts(tensors, config | {"hidden_size": 4 * H}).layers[0].hidden_size == H
    config |= {"moe_latent_size": None, "hidden_size": H}
    assert map_experts(tensors, config).layers[0].hidden_size == H
    tensors, config = qwen()
    del config["num_experts_per_tok"]
    for key in ("moe_top_k", "moe_topk", "moe_k", "top_k_experts", "experts_per_token"):
        assert map_experts(tensors, config | {key: 3}).layers[0].top_k == 3
        assert (
            map_experts(tensors, config | {key: 3, "num_experts_per_tok": 1}).layers[0].top_k == 1
        )


def test_zero_experts_are_dropped_with_a_reason() -> None:
    tensors, config = checkpoint(BY_MODEL_TYPE["longcat_flash"], "longcat_flash")
    config["zero_expert_num"] = 2
    layer = "model.layers.2.mlp.experts"
    put(tensors, f"{layer}.{E}.gate_proj.weight", INTER, H)
    found = map_experts(tensors, config)
    assert_partition(found, tensors)
    assert "zero-expert" in found.dropped[f"{layer}.{E}.gate_proj.weight"]
    put(tensors, f"{layer}.{E}.down_proj.weight", H, INTER)  # a whole expert is none of them
    with pytest.raises(InputError, match="too many experts"):
        map_experts(tensors, config)


def test_activation_comes_from_the_config_or_the_familys_own_row() -> None:
    tensors, config = qwen()
    assert map_experts(tensors, config | {"hidden_act": "gelu"}).layers[0].activation == Activation(
        "gelu"
    )
    del config["hidden_act"]
    assert "family's own" in map_experts(tensors, config).chosen_because
    with pytest.raises(RequestError, match="activation is not known"):
        map_experts(tensors, config | {"model_type": "new_moe"})


# Not `block_sparse_moe.0.w1`: a name without experts in it is understood by its own model_type only.
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if ".experts" in f.modules[0]], ids=lambda family: family.name
)
def test_unknown_model_type_gets_the_closest_row(family: Family) -> None:
    tensors, config = checkpoint(family, "brand_new")
    found = map_experts(tensors, config)
    own = map_experts(tensors, config | {"model_type": family.model_types[0]})
    assert_partition(found, tensors)
    assert found.chosen_because.startswith(
        f"closest row {found.family} for unknown model_type brand_new"
    )
    for layer, right in zip(found.layers, own.layers, strict=True):
        assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (E, H, INTER)
        assert (layer.top_k, layer.gated, layer.slices) == (TOP_K, family.gated, right.slices)


MARKED_STACKS = [family for family in FAMILIES if family.stacks and not family.is_unmarked]


@pytest.mark.parametrize("family", MARKED_STACKS, ids=lambda family: family.name)
def test_stacks_of_an_unknown_model_type_are_refused(family: Family) -> None:
    """Their order and alternation is nowhere written."""
    tensors, config = checkpoint(family, "brand_new", STACKED)
    with pytest.raises(RequestError, match="gate and up cannot be told apart") as caught:
        map_experts(tensors, config)
    assert family.modules[0].format(layer=2) in caught.value.where
    assert "brand_new" in caught.value.found


MOONDREAM = BY_MODEL_TYPE["moondream3"]
MOONDREAM_MOE = {
    "num_experts": E,
    "experts_per_token": TOP_K,
    "expert_inner_dim": INTER,
    "start_layer": 2,
}


def test_moondreams_numbers_are_nested_or_the_codes_own() -> None:
    """And held to its tensors."""
    nested = {"dim": H, "n_layers": NUM_LAYERS, "moe": MOONDREAM_MOE}
    in_vllm = {"moe": {"n_experts": E, "n_experts_per_tok": TOP_K}}
    for values, expected in (
        ({"config": {"text": nested}}, TOP_K),
        ({"config": {"text": in_vllm}}, TOP_K),
        ({"config": {}}, 8),
        ({}, 8),
    ):
        tensors: Tensors = {}
        put(tensors, "model.text.blocks.0.mlp.fc1.weight", 4 * H, H)
        put(tensors, "model.text.blocks.0.mlp.fc2.weight", H, 4 * H)
        put(tensors, "model.vision.pos_emb", 1, 729, H)
        put_stacks(
            tensors, MOONDREAM, "model.text.blocks.2.mlp", num_experts=8 if expected == 8 else E
        )
        put(tensors, "model.text.blocks.2.mlp.router.weight", 8, H)
        found = map_experts(tensors, {"model_type": "moondream3", **values})
        assert_partition(found, tensors)
        (layer,) = found.layers
        assert (layer.index, layer.top_k, layer.hidden_size, layer.intermediate_size) == (
            2,
            expected,
            H,
            INTER,
        )
        assert layer.activation == Activation("gelu_shift", beta=1.0)
        assert found.copied[:3] == tuple(tensors)[:3]
    tensors = {}
    put_stacks(tensors, MOONDREAM, "model.text.blocks.2.mlp")
    for word in ("dim", "expert_inner_dim", "num_experts"):
        moe = {**MOONDREAM_MOE, "dim": H, word: 96}
        with pytest.raises(InputError):
            map_experts(tensors, {"model_type": "moondream3", "config": {"text": {"moe": moe}}})


@pytest.mark.parametrize("name", ["fc1.bias", "fc2.scale", "fc1.weight.scales", "fc1_packed"])
def test_a_part_beside_unmarked_stacks_is_refused(name: str) -> None:
    """Its name says no more than the stacks' own do: it must not be copied as if it were dense."""
    tensors: Tensors = {}
    put_stacks(tensors, MOONDREAM, "model.text.blocks.2.mlp")
    put(tensors, f"model.text.blocks.2.mlp.{name}", E, INTER)
    with pytest.raises(InputError, match=rf"not understood\.\n.*blocks\.2\.mlp\.{name}"):
        map_experts(tensors, config_of(MOONDREAM, "moondream3"))


def test_attention_with_a_gate_or_experts_of_values_is_copied() -> None:
    for model_type, dense in (
        ("gigachat3_5", "gate_proj"),
        ("xllm", "v_experts.0"),
        ("k2_horizon", "v_experts.7"),
    ):
        family = BY_MODEL_TYPE[model_type]
        tensors, config = checkpoint(family, model_type)
        name = f"model.layers.2.self_attn.{dense}.weight"
        put(tensors, name, INTER, H)
        found = map_experts(tensors, config)
        assert_partition(found, tensors)
        assert name in found.copied


def test_unknown_names_are_listed() -> None:
    tensors, config = qwen()
    for e in range(8):
        put(tensors, f"model.layers.3.ffn.experts.{e}.wide.weight", INTER, H)
    with pytest.raises(
        RequestError, match=r"(?s)ffn\.experts\.0\.wide.*8 in all.*unknown model_type new"
    ) as caught:
        map_experts(tensors, config | {"model_type": "new"})
    assert "ffn.experts.5" not in str(caught.value)


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_reason(model_type: str) -> None:
    tensors, config = qwen()
    named = config | {"model_type": model_type}
    for outer in (named, {"text_config": named}):
        with pytest.raises(RequestError, match="cannot be converted") as caught:
            map_experts(tensors, outer)
        assert caught.value.found == f"{model_type}: {UNSUPPORTED[model_type]}"
        with pytest.raises(RequestError, match="nothing to convert"):
            map_experts({}, outer)


def test_dense_model_is_refused() -> None:
    tensors: Tensors = {}
    put(tensors, "model.layers.0.mlp.up_proj.weight", INTER, H)
    for model_type in ("llama", "qwen3_moe"):
        with pytest.raises(RequestError, match="nothing to convert"):
            map_experts(tensors, {"model_type": model_type})
    with pytest.raises(RequestError, match="nothing to convert"):
        map_experts({}, {})


def _delete(name: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: tensors.pop(name) and None


def _put(name: str, *shape: int, dtype: str = "BF16") -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: put(tensors, name, *shape, dtype=dtype)


def _delete_expert(e: int) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(f"{LAYER}.{e}.")]:
            del tensors[name]

    return change


def _config(**values: object) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config.update(values)


def _all(part: str, *shape: int, dtype: str) -> Callable[[Tensors, dict[str, Any]], None]:
    """The same part of every projection of every layer; without a shape, that of the weight."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for ref in [ref for name, ref in tensors.items() if ".experts." in name]:
            put(tensors, ref.name.replace("weight", part), *(shape or ref.shape), dtype=dtype)

    return change


W, DOWN, FOUR = f"{LAYER}.1.up_proj.weight", f"{LAYER}.0.down_proj.weight", "model.layers.4"
_UNLIKE = r"not like those of expert 0\.\n.*"
_NOT_DECLARED = r"declares no quantization.*\n.*"
Change = Callable[[Tensors, dict[str, Any]], None]
REFUSALS: dict[str, tuple[Change, str]] = {
    "gap": (_delete_expert(1), r"not complete\.\n.*experts\.1\n.*experts 0\.\.2"),
    "tail missing": (_delete_expert(2), r"experts 0\.\.2 \(num_experts in config"),
    "too many": (_config(num_experts=2), r"too many experts"),
    "no projection": (_delete(W), r"lacks a projection\.\n.*experts\.1\.up_proj\.weight"),
    "transposed": (_put(W, H, INTER), _UNLIKE + r"1\.up_proj.*\n.*\[48, 64\].*\n.*\[64, 48\]"),
    "one larger": (_put(W, INTER + 1, H), _UNLIKE),
    "3-D expert": (
        _put(DOWN, 1, H, INTER),
        r"wrong shape\.\n.*0\.down_proj.*\n.*\[64, 48\]\n.*\[1, 64, 48\]",
    ),
    "hidden size": (_config(hidden_size=65), r"0\.gate_proj.*\n.*\[48, 65\]"),
    "intermediate size": (_config(moe_intermediate_size=47), r"0\.gate_proj.*\n.*\[47, 64\]"),
    "mixed dtypes": (_put(W, INTER, H, dtype="F16"), _UNLIKE + r".*\n.*BF16.*\n.*F16"),
    "extra tensor": (
        _put(f"{LAYER}.1.foo.weight", INTER, H),
        r"not understood\.\n.*1\.foo\.weight",
    ),
    "unknown part": (_put(f"{W}_foo", 1), r"not understood\.\n.*1\.up_proj\.weight_foo"),
    "bias": (_put(f"{LAYER}.1.up_proj.bias", INTER), _UNLIKE + r"1\.up_proj\.bias"),
    "padded index": (_put(f"{LAYER}.01.up_proj.weight", INTER, H), r"experts\.01\.up_proj"),
    "absurd index": (_put(f"{LAYER}.{'9' * 5000}.up_proj.weight", INTER, H), "not understood"),
    "large index": (_put(f"{LAYER}.99999999.up_proj.weight", INTER, H), "too many experts"),
    "other prefix": (_put(f"x.{W}", INTER, H), rf"x\.{LAYER}"),
    "half fused": (
        _put(f"{FOUR}.mlp.experts.gate_up_proj", E, 96, H),
        r"lacks a stack.*\n.*4\.mlp\.experts\.down_proj",
    ),
    "single and fused": (
        _put(f"{LAYER}.gate_up_proj", E, 96, H),
        rf"twice\.\n.*{LAYER}\.0\.gate_proj\.weight\n.*\n.*{LAYER}\.gate_up_proj",
    ),
    "3-D moe": (
        _put(f"{FOUR}.moe.up_proj.weight", E, INTER, H),
        r"not understood\.\n.*4\.moe\.up_proj\.weight",
    ),
    "one fp8": (_put(W, INTER, H, dtype="F8_E4M3"), _UNLIKE + r"1\.up_proj.*\n.*\n.*F8_E4M3"),
    "one fp8 scale": (
        _put(f"{W}_scale_inv", 1, 1, dtype="F32"),
        _UNLIKE + r"1\.up_proj\.weight_scale_inv",
    ),
    "fp8": (
        _all("weight", dtype="F8_E4M3"),
        _NOT_DECLARED + r"0\.gate_proj\.weight\n(?s:.*)F8_E4M3",
    ),
    "fp8 scale": (
        _all("weight_scale_inv", 1, 1, dtype="F32"),
        _NOT_DECLARED + r"0\.gate_proj\.weight_scale_inv\n",
    ),
    "no top_k": (_config(num_experts_per_tok=None), "experts per token"),
    "bad top_k": (_config(num_experts_per_tok="2"), r"not usable\.\n.*num_experts_per_tok"),
    "bool size": (_config(hidden_size=True), r"not usable\.\n.*hidden_size"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    change, message = REFUSALS[case]
    tensors, config = qwen()
    change(tensors, config)
    with pytest.raises(InputError, match=message) as caught:
        map_experts(tensors, config)
    error = caught.value
    assert all((error.where, error.expected, error.found, error.remedy))


def test_without_config_values_the_shapes_decide() -> None:
    tensors, _ = qwen()
    found = map_experts(tensors, {"model_type": "qwen3_moe", "num_experts_per_tok": 1})
    layer = found.layers[0]
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (E, H, INTER)
    put(tensors, W, INTER, H + 1)
    with pytest.raises(InputError, match=r"1\.up_proj(?s:.*)\[48, 65\]"):
        map_experts(tensors, {"model_type": "qwen3_moe", "num_experts_per_tok": 1})
    for e in range(E):  # the down projection tells the sizes
        put(tensors, f"{LAYER}.{e}.up_proj.weight", INTER, H + 1)
    with pytest.raises(InputError, match=r"0\.up_proj(?s:.*)\[48, 65\]"):
        map_experts(tensors, {"model_type": "qwen3_moe", "num_experts_per_tok": 1})


NAMES = sorted(qwen()[0])
SEGMENTS = [
    "experts",
    "shared_experts",
    "0",
    "1",
    "2",
    "7",
    "w1",
    "up_proj",
    "mlp",
    "weight",
    "bias",
    "model",
]


@settings(max_examples=num_examples(150), deadline=None)
@given(
    removed=st.sets(st.sampled_from(NAMES), max_size=3),
    renamed=st.dictionaries(
        st.sampled_from(NAMES), st.tuples(st.integers(0, 9), st.sampled_from(SEGMENTS)), max_size=3
    ),
    model_type=st.sampled_from(["qwen3_moe", "unknown", "jamba", "gpt_oss", None]),
)
def test_exactly_once_or_a_clean_error(
    removed: set[str], renamed: dict[str, tuple[int, str]], model_type: str | None
) -> None:
    tensors, config = qwen()
    for name in removed:
        tensors.pop(name)
    for name, (position, segment) in renamed.items():
        if (ref := tensors.pop(name, None)) is not None:
            components = name.split(".")
            components[position % len(components)] = segment
            tensors[".".join(components)] = ref._replace(name=".".join(components))
    try:
        found = map_experts(tensors, config | {"model_type": model_type})
    except HqconvError:
        return
    assert_partition(found, tensors)
    # The router's correction lies inside `experts` in some families and is copied wherever it lies.
    dense = [name for name in found.copied if not name.endswith(".e_score_correction_bias")]
    assert not any(".experts." in name for name in dense)


# --- gate and up of one expert in one tensor ---------------------------------------------------------------


def quarks_gpt_oss() -> tuple[Tensors, dict[str, Any]]:
    """gpt_oss as Quark writes it: tensors per expert, gate and up in turns."""
    tensors: Tensors = {}
    for e in range(E):
        put(tensors, f"{LAYER}.{e}.gate_up_proj.weight", 2 * INTER, H)
        put(tensors, f"{LAYER}.{e}.gate_up_proj.bias", 2 * INTER)
        put(tensors, f"{LAYER}.{e}.gate_up_proj.input_scale", dtype="F32")
        put(tensors, f"{LAYER}.{e}.down_proj.weight", H, INTER)
        put(tensors, f"{LAYER}.{e}.down_proj.bias", H)
    return tensors, config_of(BY_MODEL_TYPE["gpt_oss"], "gpt_oss")


def test_gate_and_up_of_an_expert_in_one_tensor() -> None:
    tensors, config = quarks_gpt_oss()
    found = map_experts(tensors, config)
    assert_partition(found, tensors)
    (layer,) = found.layers
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (E, H, INTER)
    assert sorted(found.dropped) == [f"{LAYER}.{e}.gate_up_proj.input_scale" for e in range(E)]
    for role, index in (("w1", 0), ("w3", 1)):
        for part in ("weight", "bias"):
            source = layer.slices[role][part]
            assert source.template == f"{LAYER}.{{expert}}.gate_up_proj.{part}"
            assert source.view == View(False, index, 2, interleaved=True)
            assert layer.sources[2][role][part] == tensors[f"{LAYER}.2.gate_up_proj.{part}"]
    assert layer.slices["w2"]["weight"].view == View()
    with pytest.raises(
        RequestError, match="gate and up cannot be told apart"
    ):  # nobody says their order
        map_experts(tensors, {**config, "model_type": "unheard_of"})


def test_gate_twice_or_apart_in_some_experts_only_is_refused() -> None:
    for expert in (0, 1):
        tensors, config = quarks_gpt_oss()
        put(tensors, f"{LAYER}.{expert}.gate_proj.weight", INTER, H)
        with pytest.raises(InputError, match="projection twice") as caught:
            map_experts(tensors, config)
        assert caught.value.where == f"{LAYER}.{expert}.gate_proj.weight"
    tensors, config = quarks_gpt_oss()
    for part, columns in (("weight", (H,)), ("bias", ())):
        del tensors[f"{LAYER}.1.gate_up_proj.{part}"]
        for word in ("gate_proj", "up_proj"):
            put(tensors, f"{LAYER}.1.{word}.{part}", INTER, *columns)
    with pytest.raises(InputError, match="different names"):
        map_experts(tensors, config)


def test_the_config_is_asked_for_the_module_that_holds_gate_and_up() -> None:
    tensors, config = quarks_gpt_oss()
    asked = {"gate_up_proj": "weight", "down_proj": "weight"}
    layers = {f"*.experts.*.{word}": {"weight": None} for word in asked}
    spec = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "ch_axis": -1,
        "scale_format": "e8m0",
    }
    quark = {
        "quant_method": "quark",
        "layer_quant_config": layers,
        "global_quant_config": {"weight": spec},
    }
    assert map_experts(tensors, config, quark).layers[0].format == PLAIN
    del layers["*.experts.*.gate_up_proj"]
    with pytest.raises(InputError, match="declares a quantized module") as caught:
        map_experts(tensors, config, quark)
    assert caught.value.where == f"{LAYER}.0.gate_up_proj.weight"


def awq_experts(*plain: str) -> Tensors:
    tensors: Tensors = {}
    for e in range(E):
        for word, (n, k) in {
            "gate_proj": (INTER, H),
            "up_proj": (INTER, H),
            "down_proj": (H, INTER),
        }.items():
            name = f"{LAYER}.{e}.{word}"
            if word in plain:
                put(tensors, f"{name}.weight", n, k)
                continue
            put(tensors, f"{name}.qweight", k, n // 8, dtype="I32")
            put(tensors, f"{name}.qzeros", k // 16, n // 8, dtype="I32")
            put(tensors, f"{name}.scales", k // 16, n, dtype="F16")
    return tensors


def test_awq_entries_that_may_mean_gate_proj_are_decided_by_its_tensors() -> None:
    awq: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 16,
        "modules_to_not_convert": ["gate"],
    }
    config = config_of(QWEN, "qwen3_moe")

    def form(*plain: str) -> Any:
        return map_experts(awq_experts(*plain), config, awq).layers[0].format

    assert form().encoding == "awq"
    mixed = form("gate_proj")  # AutoAWQ's: gate_proj is left as it was
    assert [mixed.of(role).encoding for role in ("w1", "w3", "w2")] == ["float", "awq", "awq"]
    with pytest.raises(InputError, match="its weight is not quantized"):  # no entry speaks of it
        form("up_proj")
    awq["modules_to_not_convert"] = ["gate", "up", "down"]
    assert form("gate_proj", "up_proj", "down_proj") == PLAIN


DENSE = ("mlp.gate.weight", "mlp.shared_experts.up_proj.weight")


def large(layers: int, experts: int, model_type: str) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    for layer in range(layers):
        for name in DENSE:
            put(tensors, f"model.layers.{layer}.{name}", H, H)
        put_layer(tensors, QWEN, f"model.layers.{layer}.mlp.experts", experts)
    return tensors, config_of(QWEN, model_type) | {
        "num_experts": experts,
        "num_hidden_layers": layers,
    }


@pytest.mark.parametrize("model_type", ["qwen3_moe", "new_moe"])
@pytest.mark.parametrize(
    "wrong", ["01.up_proj.weight", "1.up_proj.weight_odd", "x.up_proj.weight", "1.2.up_proj.weight"]
)
def test_names_that_are_nearly_known_are_refused(model_type: str, wrong: str) -> None:
    """After names whose layer, index and ending have matched."""
    tensors, config = large(2, 4, model_type)
    name = f"model.layers.1.mlp.experts.{wrong}"
    tensors[name] = tensors["model.layers.1.mlp.experts.1.up_proj.weight"]._replace(name=name)
    kind = InputError if model_type == "qwen3_moe" else RequestError
    with pytest.raises(kind, match=re.escape(name)):
        map_experts(tensors, config)
