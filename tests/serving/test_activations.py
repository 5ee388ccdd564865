"""Every activation that a conversion can name: what vLLM calls it, or that it is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hqconv.errors import RequestError
from hqconv.experts.facts import bounded
from hqconv.schemas.families import FAMILIES
from hqconv.schemas.family import Family
from hqconv.serving.activations import GPT_OSS, Activation, agreed, serving_activation
from hqconv.serving.asked import activation_words
from hqconv.verification.reference import ACTIVATIONS, is_known

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
    "swigluoai": ("swigluoai_uninterleave", None),
}
LIMITED: dict[str, Activation | None] = {
    "silu_clamp10": Activation("silu", 10.0),
    "silu_clamp7": Activation("silu", 7.0),
    "silu_clamp7.5": Activation("silu", 7.5),
    "silu_clamp10.0": Activation("silu", 10.0),
    "silu_bound7": Activation("swiglustep"),
    "silu_bound16": None,
    "silu_bound7.5": None,
    "gelu_clamp10": None,
    "gelu_tanh_clamp10": None,
    "relu2_bound7": None,
}


def test_the_table_has_every_name_that_can_be_verified() -> None:
    assert set(NAMES) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_names_without_a_limit(name: str) -> None:
    for gated, expected in zip((True, False), NAMES[name], strict=True):
        found = serving_activation(name, gated)
        assert (None if found is None else found.name) == expected
        if found is not None and found != GPT_OSS:
            assert found == Activation(found.name)
            assert agreed("here", name, gated, found) == found


@pytest.mark.parametrize("name", LIMITED)
def test_names_with_a_limit(name: str) -> None:
    assert is_known(name)
    assert serving_activation(name, True) == LIMITED[name]
    assert serving_activation(name, False) is None


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.limit[0]], ids=lambda f: f.name)
def test_the_limits_of_families_as_the_manifest_writes_them(family: Family) -> None:
    """A number of config.json, whole or not; a bound other than vLLM's is refused."""
    key, pattern = family.limit
    for limit in (7, 7.0, 10, 2.5):
        found = serving_activation(bounded(family, "silu", 0, {key: limit}), True)
        if "clamp" in pattern:
            assert found == Activation("silu", float(limit))
        else:
            assert found == (Activation("swiglustep") if limit == 7 else None)


@pytest.mark.vllm
def test_vllms_humming_layers_have_all_of_them() -> None:
    pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")
    from tests.make import vllm_cpu  # isort: skip  - before vLLM

    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
    from vllm.model_executor.layers.quantization.utils.humming.activation import get_humming_activation

    for name, gated in itertools.product([*NAMES, *LIMITED], (True, False)):
        found = serving_activation(name, gated)
        if found is not None:
            function = vllm_cpu.MoEActivation(found.name)
            assert vllm_cpu.experts.HummingExpertsBase._supports_activation(function), found
            config = ApplyMoEActivationConfig(clamp_limit=found.limit, alpha=found.alpha, beta=found.beta)
            words, known = get_humming_activation(function, config), activation_words(name, gated)
            assert known in (words, None)  # what `hqconv warm` compiles


@pytest.mark.parametrize(
    "name",
    ["", "mish", "SILU", "silu_clamp", "silu_clamp-1", "silu_clamp1e3", " silu", "silu_clamp10 ", "silu\n"],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="no such activation"):
        agreed("here", name, True, Activation("silu"))


def test_gpt_oss_is_asked_for_by_either_name_and_its_parameters_may_be_left_out() -> None:
    """vLLM's own class says `swigluoai` and nothing else: the constants are its kernel's."""
    for name in ("swigluoai", "swigluoai_uninterleave"):
        for given in (Activation(name), Activation(name, 7.0), replace(GPT_OSS, name=name)):
            assert agreed("here", "swigluoai", True, given) == GPT_OSS


@pytest.mark.parametrize(
    ("converted", "gated", "asked"),
    [
        ("silu", True, Activation("gelu")),
        ("silu", True, Activation("silu", 7.0)),
        ("silu", True, Activation("silu_no_mul")),
        ("silu", False, Activation("silu")),
        ("silu", True, GPT_OSS),
        ("silu_clamp10", True, Activation("silu")),
        ("silu_clamp10", True, Activation("silu", 7.0)),
        ("silu_bound7", True, Activation("silu")),
        ("silu_bound7", True, Activation("silu", 7.0)),
        ("swigluoai", True, Activation("silu")),
        ("swigluoai", True, Activation("silu", 7.0, 1.702, 1.0)),
        ("swigluoai", True, Activation("swigluoai", 10.0)),
        ("swigluoai", True, Activation("swigluoai", 7.0, 1.0)),
        ("swigluoai", True, Activation("swigluoai", 7.0, 1.702, 0.0)),
        ("gelu", True, Activation("gelu_tanh")),
        ("relu2", False, Activation("relu2")),
        ("relu2", False, Activation("silu_no_mul")),
    ],
)
def test_a_model_that_means_another_one_is_refused(converted: str, gated: bool, asked: Activation) -> None:
    with pytest.raises(RequestError, match="another activation") as caught:
        agreed("out: block", converted, gated, asked)
    error = caught.value
    assert error.where == "out: block"
    assert converted in error.expected
    assert asked.name in error.found
    assert error.remedy


@pytest.mark.parametrize(
    ("name", "gated"), [("relu", True), ("relu2", True), ("silu_bound16", True), ("swigluoai", False)]
)
def test_what_vllm_has_not_is_refused_even_if_the_model_says_so(name: str, gated: bool) -> None:
    with pytest.raises(RequestError, match=rf"no such activation(.|\n)*found: {name}\n(.|\n)*original"):
        agreed("here", name, gated, Activation(name))
