"""Every activation that a conversion can name: what vLLM calls it, or that it is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hqconv.errors import RequestError
from hqconv.schemas.activation import SWIGLUOAI, Activation
from hqconv.serving.vllm.translation import agreed, serving_activation
from hqconv.warm.compile_kernels import kernel_activation
from tests.make.formulas import GATED, UNKNOWN, by_definition, run_c

# Manifest's name → vLLM's with a gate, and without one.
NAMES: dict[str, tuple[str | None, str | None]] = {
    "silu": ("silu", "silu_no_mul"),
    "swish": ("silu", "silu_no_mul"),
    "gelu": ("gelu", "gelu_no_mul"),
    "gelu_tanh": ("gelu_tanh", "gelu_tanh_no_mul"),
    "gelu_pytorch_tanh": ("gelu_tanh", "gelu_tanh_no_mul"),
    "gelu_new": ("gelu_tanh", "gelu_tanh_no_mul"),
    "relu2": (None, "relu2_no_mul"),
    "relu": (None, None),
}
GPT_OSS = replace(SWIGLUOAI, name="swigluoai_uninterleave")
OTHER_OAI = Activation("swigluoai", 20.0, 1.0, 0.0)
SITU = Activation("situ", beta=4.0, linear_beta=25.0)
NUMBERED: dict[Activation, Activation | None] = {
    SWIGLUOAI: GPT_OSS,
    OTHER_OAI: replace(OTHER_OAI, name="swigluoai_uninterleave"),
    Activation("silu_clamp", 10.0): Activation("silu", 10.0),
    Activation("silu_bound", 7.0): Activation("swiglustep"),
    Activation("silu_bound", 16.0): None,
    Activation("gelu_clamp", 10.0): None,
    Activation("relu2_bound", 7.0): None,
    Activation("gelu_shift", beta=1.0): None,
    SITU: SITU,
    Activation("situ", beta=4.0): Activation("situ", beta=4.0),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_without_a_limit(name: str) -> None:
    for gated, expected in zip((True, False), NAMES[name], strict=True):
        found = serving_activation(Activation(name), gated)
        assert (None if found is None else found.name) == expected
        if found is not None:
            assert found == Activation(found.name)
            assert agreed("here", Activation(name), gated, found) == found


@pytest.mark.parametrize("converted", NUMBERED, ids=Activation.describe)
def test_those_with_numbers(converted: Activation) -> None:
    found = serving_activation(converted, True)
    assert found == NUMBERED[converted]
    assert serving_activation(converted, False) is None
    if found is not None:
        assert agreed("here", converted, True, found) == found


@pytest.mark.parametrize("activation", GATED, ids=Activation.describe)
def test_what_vllm_is_asked_to_compile_is_the_converted_activation(activation: Activation) -> None:
    """The text of its kernels, run as C would, value by value."""
    words = kernel_activation(activation, gated=True)
    if words is None:
        assert serving_activation(activation, True) is None
        return
    gate, up = np.random.default_rng(0).normal(size=(2, 300)) * 9
    expected = [by_definition(activation, a, b) for a, b in zip(gate, up, strict=True)]
    assert words["activation_type"] == "binary_split"
    assert np.allclose(run_c(words["activation_impl"], gate, up), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.vllm
def test_vllms_humming_layers_have_all_of_them() -> None:
    pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")
    from tests.make import vllm_cpu  # isort: skip  - before vLLM

    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
    from vllm.model_executor.layers.quantization.utils.humming.activation import (
        get_humming_activation,
    )

    num_known = 0
    for activation, gated in itertools.product([*GATED, *UNKNOWN], (True, False)):
        found = serving_activation(activation, gated)
        if found is not None:
            function, is_situ = vllm_cpu.MoEActivation(found.name), found.name == "situ"
            assert vllm_cpu.experts.HummingExpertsBase._supports_activation(function), found
            config = ApplyMoEActivationConfig(
                clamp_limit=found.limit,
                alpha=1.0 if found.alpha is None else found.alpha,
                beta=0.0 if found.beta is None else found.beta,
                activation_situ_beta=found.beta if is_situ else None,
                activation_situ_linear_beta=found.linear_beta,
            )
            assert kernel_activation(activation, gated) == get_humming_activation(function, config)
            num_known += 1
    assert num_known > 20


@pytest.mark.parametrize("activation", UNKNOWN, ids=Activation.describe)
def test_what_is_known_by_name_only_is_refused_as_that(activation: Activation) -> None:
    for gated in (True, False):
        with pytest.raises(RequestError, match=r"known by name only(.|\n)*original") as caught:
            agreed("here", activation, gated, Activation("silu"))
        assert caught.value.found == activation.describe()


def test_gpt_oss_is_asked_for_by_either_name_and_its_parameters_may_be_left_out() -> None:
    """vLLM's own class says `swigluoai` and nothing else: the numbers are the artifact's."""
    for converted in (SWIGLUOAI, OTHER_OAI):
        expected = replace(converted, name="swigluoai_uninterleave")
        for name in ("swigluoai", "swigluoai_uninterleave"):
            for given in (
                Activation(name),
                Activation(name, converted.limit),
                replace(converted, name=name),
            ):
                assert agreed("here", converted, True, given) == expected


def test_situs_betas_may_be_left_out_together_only() -> None:
    assert agreed("here", SITU, True, Activation("situ")) == SITU
    assert agreed(
        "here", Activation("situ", beta=4.0), True, Activation("situ", beta=4.0, linear_beta=-1.0)
    )
    for asked in (
        Activation("situ", beta=4.0),
        Activation("situ", beta=1.0, linear_beta=25.0),
        Activation("situ", beta=4.0, linear_beta=2.0),
    ):
        with pytest.raises(RequestError, match="another activation"):
            agreed("here", SITU, True, asked)


@pytest.mark.parametrize(
    ("converted", "gated", "asked"),
    [
        ("silu", True, Activation("gelu")),
        ("silu", True, Activation("silu", 7.0)),
        ("silu", True, Activation("silu_no_mul")),
        ("silu", False, Activation("silu")),
        ("silu_clamp10", True, Activation("silu")),
        ("silu_bound7", True, Activation("silu", 7.0)),
        ("swigluoai", True, Activation("silu", 7.0, 1.702, 1.0)),
        ("swigluoai", True, Activation("swigluoai", 10.0)),
        ("swigluoai", True, Activation("swigluoai", 7.0, 1.702, 0.0)),
        ("gelu", True, Activation("gelu_tanh")),
        ("relu2", False, Activation("relu2")),
    ],
)
def test_a_model_that_means_another_one_is_refused(
    converted: str, gated: bool, asked: Activation
) -> None:
    with pytest.raises(RequestError, match="another activation") as caught:
        agreed("out: layer", Activation.of_label(converted), gated, asked)
    assert caught.value.where == "out: layer"
    assert asked.name in caught.value.found
