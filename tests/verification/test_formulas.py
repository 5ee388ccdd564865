"""The judge and Humming's expressions of every activation, against the models' own code and the definitions."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hqconv.calibration.activations import ACTIVATIONS, activate
from hqconv.kernel_layout.fused_moe import humming_activation
from hqconv.schemas.activation import SWIGLUOAI, Activation
from tests.make.formulas import GATED, UNGATED, UNKNOWN, by_definition, run_c


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double() * 9


def test_there_is_a_case_of_every_formula() -> None:
    assert set(ACTIVATIONS) <= {activation.name for activation in GATED}


@pytest.mark.parametrize("activation", GATED, ids=Activation.describe)
def test_with_a_gate(activation: Activation) -> None:
    gate, up = draw(2, 400)
    expected = [
        by_definition(activation, a, b) for a, b in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert np.allclose(activate(activation, gate, up), expected, rtol=1e-7, atol=1e-12)
    words = humming_activation(activation, gated=True)
    assert words["activation_type"] == "binary_split"
    found = run_c(words["activation_impl"], gate.numpy(), up.numpy())
    assert np.allclose(found, expected, rtol=1e-7, atol=1e-12)
    assert activation.is_known(gated=True)


@pytest.mark.parametrize("activation", UNGATED, ids=Activation.describe)
def test_without_a_gate(activation: Activation) -> None:
    up = draw(400)
    expected = [by_definition(activation, value, 1.0) for value in up.tolist()]
    assert np.allclose(activate(activation, None, up), expected, rtol=1e-7, atol=1e-12)
    words = humming_activation(activation, gated=False)
    assert words["activation_type"] == "unary"
    assert np.allclose(
        run_c(words["activation_impl"], up.numpy(), None), expected, rtol=1e-7, atol=1e-12
    )
    assert activation.is_known(gated=False)


@pytest.mark.parametrize("activation", UNKNOWN, ids=Activation.describe)
def test_what_is_known_by_name_only_is_computed_nowhere(activation: Activation) -> None:
    x = torch.zeros(1)
    for gated in (True, False):
        assert not activation.is_known(gated)
        with pytest.raises(KeyError):
            activate(activation, x if gated else None, x)
        with pytest.raises(KeyError):
            humming_activation(activation, gated)


@pytest.mark.parametrize(
    "activation", [a for a in GATED if a not in UNGATED], ids=Activation.describe
)
def test_most_need_a_gate(activation: Activation) -> None:
    assert not activation.is_known(gated=False)
    with pytest.raises(KeyError):
        activate(activation, None, torch.zeros(1))
    with pytest.raises(KeyError):
        humming_activation(activation, gated=False)


@pytest.mark.parametrize("name", [activation.name for activation in UNGATED])
def test_elementwise_ones_are_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x, up = torch.randn(2, 100).double()
    theirs = ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name](x)
    assert torch.allclose(activate(Activation(name), x, up), theirs * up, atol=1e-6)


def module_of(path: str, **numbers: object) -> nn.Module:
    """An experts module of transformers with nothing but what its gate needs."""
    module, _, name = path.partition(":")
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    layer: nn.Module = kind.__new__(kind)
    nn.Module.__init__(layer)
    for key, value in numbers.items():
        setattr(layer, key, value)
    return layer


@pytest.mark.parametrize("limit", [10.0, 1.5])
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("deepseek_v4.modeling_deepseek_v4:DeepseekV4Experts", "clamp"),
        ("glm5_next.modeling_glm5_next:Glm5NextTextExperts", "clamp"),
        ("hy_v4.modeling_hy_v4:HYV4Experts", "clamp"),
        ("step3p7.modeling_step3p7:Step3p7Experts", "bound"),
    ],
)
def test_limited_ones_are_transformers(path: str, kind: str, limit: float) -> None:
    layer = module_of(path, act_fn=nn.functional.silu, limit=limit, swiglu_limit=limit)
    gate, up = draw(2, 50, 8)
    theirs = layer._apply_gate(torch.cat([gate, up], -1))
    assert torch.allclose(activate(Activation(f"silu_{kind}", limit), gate, up), theirs, atol=1e-12)
    other = Activation(f"silu_{'bound' if kind == 'clamp' else 'clamp'}", limit)
    assert not torch.allclose(activate(other, gate, up), theirs, atol=1e-6)


@pytest.mark.parametrize(("limit", "alpha"), [(7.0, 1.702), (20.0, 1.702), (7.0, 1.0), (2.5, 0.5)])
@pytest.mark.parametrize(
    ("path", "interleaved"),
    [
        ("gpt_oss.modeling_gpt_oss:GptOssExperts", True),
        ("minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLExperts", False),
        ("openai_privacy_filter.modeling_openai_privacy_filter:OpenAIPrivacyFilterExperts", False),
    ],
)
def test_swigluoai_is_transformers(
    path: str, interleaved: bool, limit: float, alpha: float
) -> None:
    layer = module_of(path, limit=limit, swiglu_limit=limit, alpha=alpha, swiglu_alpha=alpha)
    gate, up = draw(2, 50, 8)
    rows = torch.stack([gate, up], -1).flatten(-2) if interleaved else torch.cat([gate, up], -1)
    theirs = layer._apply_gate(rows)
    activation = Activation("swigluoai", limit, alpha, 1.0)
    assert torch.allclose(activate(activation, gate, up), theirs, atol=1e-9)
    if activation != SWIGLUOAI:
        assert not torch.allclose(activate(SWIGLUOAI, gate, up), theirs, atol=1e-3)


def test_the_constants_are_those_of_transformers() -> None:
    """What a config that says nothing means."""
    from transformers import AutoConfig

    for model_type in ("gpt_oss", "openai_privacy_filter"):
        config = AutoConfig.for_model(model_type)
        assert (config.swiglu_limit, config.swiglu_alpha) == (SWIGLUOAI.limit, SWIGLUOAI.alpha)
    text = SimpleNamespace(**AutoConfig.for_model("minimax_m3_vl").text_config.to_dict())
    assert (text.swiglu_limit, text.swiglu_alpha) == (SWIGLUOAI.limit, SWIGLUOAI.alpha)
    for model_type in ("deepseek_v4", "hy_v4"):
        assert AutoConfig.for_model(model_type).swiglu_limit == 10.0
    assert AutoConfig.for_model("glm5_next").text_config.swiglu_limit == 10.0
