"""What configs say of every layer's activation: names, limits, alphas and betas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hqconv.errors import InputError, RequestError
from hqconv.models.expert_map import map_experts
from hqconv.models.families import BY_MODEL_TYPE, Config
from hqconv.schemas.activation import CHANGING_KEYS, SWIGLUOAI, Activation, may_change
from hqconv.schemas.tensors import TensorRef
from tests.make.places import REPO

E, H, INTER, NUM_LAYERS = 2, 32, 64, 3
BETA, LINEAR_BETA = "activation_situ_beta", "activation_situ_linear_beta"
SILU = Activation("silu")
NO_LIMIT = Activation("swigluoai", None, 1.702, 1.0)


def clamp(limit: float) -> Activation:
    return Activation("silu_clamp", limit)


def bound(limit: float) -> Activation:
    return Activation("silu_bound", limit)


def oai(limit: float = 7.0, alpha: float = 1.702, beta: float = 1.0) -> Activation:
    return Activation("swigluoai", limit, alpha, beta)


def mapped(row: str, config: Config) -> list[Activation]:
    """The activations of three layers with the names of a model type's family, per expert, and this config."""
    family = BY_MODEL_TYPE[row]
    shapes = {"w1": (INTER, H), "w3": (INTER, H), "w2": (H, INTER)}
    names = [
        (f"{family.modules[0].format(layer=layer)}.{e}.{name}.weight", shapes[role])
        for layer in range(NUM_LAYERS)
        for e in range(E)
        for role, name in family.projections.items()
    ]
    tensors = {
        name: TensorRef(name, "BF16", shape, 0, 2 * H * INTER * i, 2 * H * INTER)
        for i, (name, shape) in enumerate(names)
    }
    keys = (family.num_layers_keys, family.num_experts_keys, family.top_k_keys)
    keys += (family.hidden_size_keys, family.intermediate_size_keys)
    sizes = dict(zip((key[0] for key in keys), (NUM_LAYERS, E, 1, H, INTER), strict=True))
    return [block.activation for block in map_experts(tensors, {**sizes, **config}).layers]


def three(activation: Activation) -> list[Activation]:
    return [activation] * 3


LIMITS: dict[Any, list[Activation]] = {
    (7,): three(clamp(7.0)),
    (1.5,): three(clamp(1.5)),
    (0,): three(SILU),
    (None,): three(SILU),
    (): three(clamp(10.0)),  # the model's class says so
    ((0, None, 2.5),): [SILU, SILU, clamp(2.5)],
    ((4.0, 7),): [clamp(4.0), clamp(7.0), SILU],  # which vLLM takes so
    ((),): three(SILU),
}


@pytest.mark.parametrize("model_type", ["deepseek_v4", "glm5_next", "hy_v4"])
@pytest.mark.parametrize("given", LIMITS, ids=str)
def test_a_limit_is_one_number_or_one_of_each_layer(
    model_type: str, given: tuple[Any, ...]
) -> None:
    values = [list(value) if isinstance(value, tuple) else value for value in given]
    config = {"model_type": model_type, "hidden_act": "silu"} | dict(
        zip(["swiglu_limit"], values, strict=False)
    )
    assert mapped(model_type, config) == LIMITS[given]


BY_LAYER: dict[str, tuple[str, Any]] = {
    "exaone_moe": ("swiglu_limits", clamp),
    "bailing_hybrid": ("expert_swiglu_limit_list", clamp),
    "bailing_moe_v3": ("expert_swiglu_limit_list", clamp),
    "step3p5": ("swiglu_limits", bound),
    "step3p7": ("swiglu_limits", bound),
}


@pytest.mark.parametrize("model_type", BY_LAYER)
def test_lists_of_limits(model_type: str) -> None:
    """The shared experts' own list says nothing of these."""
    key, kind = BY_LAYER[model_type]
    config = {"model_type": model_type, "hidden_act": "silu", key: [0.0, 7.0, 16.0]}
    shared = {"swiglu_limits_shared": [1.0] * 3, "share_expert_swiglu_limit_list": [1.0] * 3}
    assert mapped(model_type, config | shared) == [SILU, kind(7.0), kind(16.0)]
    assert mapped(model_type, {**config, key: None}) == three(SILU)
    assert mapped(model_type, {"model_type": model_type, "hidden_act": "silu"}) == three(SILU)


def situ(beta: float | None = None, linear: float | None = None) -> Activation:
    return Activation("situ", beta=beta, linear_beta=linear)


MINIMAX = "minimax_m3_vl_text"
# model_type, values of the config, what is found, and whether it can be computed.
NUMBERED: list[tuple[str, dict[str, Any], Activation, bool]] = [
    ("gpt_oss", {}, SWIGLUOAI, True),
    ("gpt_oss", {"swiglu_limit": 20.0}, oai(20.0), True),
    ("gpt_oss", {"swiglu_alpha": 1.5}, oai(alpha=1.5), True),
    ("gpt_oss", {"swiglu_alpha": -0.5}, oai(alpha=-0.5), True),
    ("gpt_oss", {"swiglu_limit": 0}, NO_LIMIT, False),
    ("gpt_oss", {"swiglu_limit": None}, NO_LIMIT, False),
    ("gpt_oss", {"swiglu_beta": 0.5}, Activation("swigluoai+swiglu_beta"), False),
    ("openai_privacy_filter", {"swiglu_limit": 5, "swiglu_alpha": 1}, oai(5.0, 1.0), True),
    (MINIMAX, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, SWIGLUOAI, True),
    (
        MINIMAX,
        {"swiglu_alpha": 1.0, "swiglu_limit": 20.0, "swiglu_beta": 0.0},
        oai(20.0, 1, 0),
        True,
    ),
    (MINIMAX, {"swiglu_alpha": 0}, oai(alpha=0.0), True),
    ("kimi_linear", {"hidden_act": "situ", BETA: 4.0, LINEAR_BETA: 25.0}, situ(4.0, 25.0), True),
    ("kimi_linear", {"hidden_act": "situ", BETA: 4}, situ(4.0), True),
    ("kimi_linear", {"hidden_act": "situ", BETA: 4.0, LINEAR_BETA: None}, situ(4.0), True),
    ("kimi_linear", {"hidden_act": "situ"}, situ(), False),
    ("kimi_linear", {BETA: 4.0}, SILU, True),  # as in vLLM's class
]


@pytest.mark.parametrize(("model_type", "values", "expected", "is_known"), NUMBERED)
def test_swigluoai_has_three_numbers_and_situ_two(
    model_type: str, values: dict[str, Any], expected: Activation, is_known: bool
) -> None:
    config = {"model_type": model_type, "hidden_act": "silu", **values}
    assert mapped(model_type, config) == three(expected)
    assert expected.is_known(gated=True) == is_known


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"swiglu_limit": 7}, "silu+swiglu_limit"),  # which its code is not known to read
    ("deepseek_v4", {"swiglu_limit": 0, "swiglu_alpha": 2.0}, "silu+swiglu_alpha"),
    ("deepseek_v4", {"swiglu_limit": 7, "hidden_act": "gelu"}, "gelu+swiglu_limit"),
    ("qwen3_moe", {"hidden_act": "situ", "activation_situ_beta": 4.0}, "situ"),
    ("qwen3_moe", {"hidden_act": "mish"}, "mish"),
    ("olmoe", {"swiglu_limit": 7, "swiglu_alpha": 1}, "silu+swiglu_limit+swiglu_alpha"),
]


@pytest.mark.parametrize(("model_type", "values", "name"), UNKNOWN)
def test_what_is_not_understood_has_a_name_and_nothing_else(
    model_type: str, values: dict[str, Any], name: str
) -> None:
    """Weights do not depend on it; a name that nobody knows is computed and served by nobody."""
    (found,) = set(mapped(model_type, {"model_type": model_type, "hidden_act": "silu", **values}))
    assert found == Activation(name)
    assert not found.is_known(gated=True)


def test_an_unknown_model_type_goes_by_no_other_familys_numbers() -> None:
    """The closest row is deepseek_v4's, for its names."""
    config = {"model_type": "brand_new", "hidden_act": "silu"}
    assert mapped("deepseek_v4", config) == three(SILU)
    assert mapped("deepseek_v4", config | {"swiglu_limit": 7}) == three(
        Activation("silu+swiglu_limit")
    )
    del config["hidden_act"]
    with pytest.raises(RequestError, match="activation is not known"):
        mapped("deepseek_v4", config)


ALARMING = json.loads(
    '{"mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0, "gate_soft_cap": 1, "softcapping": 30.0, "moe_limit": 7, '
    '"clampGate": true, "expert_clamp": [0, 3.0, 3.0], "act_alpha": 1.7, "alphas": 2}'
)
OF_OTHER_PARTS = json.loads(
    '{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "log_scaling_alpha": 0.1, "lora_alpha": 16, '
    '"router_aux_loss_alpha": 0.01, "rope_alpha": 1000.0, "aux_loss_alpha": 0.001, "time_step_limit": [0.0, 1.0], '
    '"moe_router_logit_softcapping": 8, "swiglu_limits_shared": [7.0, 7.0, 7.0], "gate_softcap": 0, "clamp": false, '
    '"act_limit": null, "alpha_type": "linear", "rope_scaling": {"alpha": 9}, "alphabet": 3, "unlimited": 2, '
    '"mlp_alpha_factor": 1, "qk_l2_clip_threshold": 22.6, "share_expert_swiglu_limit_list": [1, 1, 1]}'
)


@pytest.mark.parametrize("key", ALARMING)
def test_keys_of_an_unknown_model_name_an_activation_that_is_not_plain(key: str) -> None:
    config = {"model_type": "brand_new", "hidden_act": "silu", key: ALARMING[key]}
    assert mapped("deepseek_v4", config)[1] == Activation(f"silu+{key}")
    # A known model's code is read.
    assert mapped("qwen3_moe", config | {"model_type": "qwen3_moe"}) == three(SILU)


def test_keys_of_other_parts_are_no_alarm() -> None:
    config = {"model_type": "brand_new", "hidden_act": "silu", **OF_OTHER_PARTS}
    assert mapped("deepseek_v4", config) == three(SILU)


def test_the_configs_of_published_models_are_no_alarm() -> None:
    """Each as an unknown model, without the keys that are known to change an activation."""
    known = {*CHANGING_KEYS, "share_expert_swiglu_limit_list"}
    found = {
        f"{path.stem}: {key}"
        for path in (REPO / "tests/data/models").rglob("*.json")
        for config in [json.loads(path.read_text())["config"]]
        for values in (config, config.get("text_config") or {})
        for key in values
        if may_change(key) and key not in known
    }
    assert found == set()


@pytest.mark.parametrize(
    "value", [-1, True, "7", [7, "x", 7], float("inf"), float("nan"), {"a": 1}, [[7]]], ids=str
)
@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("deepseek_v4", "swiglu_limit"),
        ("step3p7", "swiglu_limits"),
        ("gpt_oss", "swiglu_limit"),
        ("kimi_linear", BETA),
    ],
)
def test_a_number_that_is_none_is_refused(model_type: str, key: str, value: object) -> None:
    act = "situ" if model_type == "kimi_linear" else "silu"
    with pytest.raises(InputError, match=rf"not usable\.\n.*{key}(.|\n)*a positive number"):
        mapped(model_type, {"model_type": model_type, "hidden_act": act, key: value})


def test_an_alpha_may_be_any_number() -> None:
    with pytest.raises(InputError, match=r"swiglu_alpha(.|\n)*a number below"):
        mapped("gpt_oss", {"model_type": "gpt_oss", "swiglu_alpha": float("nan")})
