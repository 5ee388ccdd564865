"""An activation as a value: its label and words, there and back, and what older artifacts' names mean."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.models.families import BY_MODEL_TYPE, FAMILIES
from hqconv.schemas.activation import NUMBERS, SWIGLUOAI, Activation
from tests.make.formulas import GATED, UNKNOWN

# What manifests had before there were numbers beside the name, and what that is.
OLDER = {
    "silu": Activation("silu"),
    "relu2": Activation("relu2"),
    "silu_clamp10": Activation("silu_clamp", 10.0),
    "silu_clamp2.5": Activation("silu_clamp", 2.5),
    "silu_bound7": Activation("silu_bound", 7.0),
    "swigluoai": Activation("swigluoai", 7.0, 1.702, 1.0),
    "softcapped_swiglu": Activation("softcapped_swiglu"),
    "situ": Activation("situ"),
}


@pytest.mark.parametrize("label", OLDER)
def test_older_artifacts_say_the_name_only(label: str) -> None:
    found = Activation.from_dict({"activation": label, "gated": True})
    assert found == Activation.of_label(label) == OLDER[label]
    assert found.label == found.describe() == label


@pytest.mark.parametrize("activation", GATED, ids=Activation.describe)
def test_words_are_read_back(activation: Activation) -> None:
    document = json.loads(json.dumps(activation.to_dict(gated=True)))
    assert Activation.from_dict(document) == activation
    assert document == {"activation": activation.label} | (
        {"activation_parameters": activation.numbers} if activation.numbers else {}
    )


@pytest.mark.parametrize(
    "activation",
    [activation for activation in UNKNOWN if activation.name != "swigluoai" or activation.numbers],
)
def test_words_say_where_nothing_but_the_name_is_known(activation: Activation) -> None:
    document = activation.to_dict(gated=True)
    assert document["activation_is_known"] is False
    assert Activation.from_dict(document) == activation


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_a_limit_is_in_the_label_with_all_its_digits(limit: float) -> None:
    activation = Activation("silu_clamp", limit)
    assert re.fullmatch(r"silu_clamp\d+(\.\d+)?", activation.label)
    assert (
        Activation.of_label(activation.label)
        == activation
        == Activation.from_dict(activation.to_dict(gated=True))
    )


def test_people_see_the_numbers_that_the_label_does_not_say() -> None:
    assert Activation("silu_clamp", 10.0).describe("gated") == "silu_clamp10 (gated)"
    assert SWIGLUOAI.describe() == "swigluoai"
    assert replace(SWIGLUOAI, limit=20.0).describe() == "swigluoai (limit 20, alpha 1.702, beta 1)"
    situ = Activation("situ", beta=4.0, linear_beta=25.0)
    assert situ.describe("gated") == "situ (beta 4, linear_beta 25, gated)"


DAMAGED: dict[str, dict[str, Any]] = {
    "another limit than the name's": {
        "activation": "silu_clamp10",
        "activation_parameters": {"limit": 7.0},
    },
    "no limit": {"activation": "silu_clamp10", "activation_parameters": {}},
    "no numbers": {"activation": "situ", "activation_parameters": {"beta": "4"}},
    "true": {"activation": "situ", "activation_parameters": {"beta": True}},
    "infinite": {"activation": "situ", "activation_parameters": {"beta": float("inf")}},
    "a key that nobody knows": {"activation": "situ", "activation_parameters": {"gamma": 1.0}},
    "the name": {"activation": "situ", "activation_parameters": {"name": 1.0}},
    "a list": {"activation": "situ", "activation_parameters": [4.0]},
}


@pytest.mark.parametrize("what", DAMAGED)
def test_numbers_that_cannot_be_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match="activation_parameters"):
        Activation.from_dict(DAMAGED[what])


def test_the_table_names_models_that_exist() -> None:
    names = {family.name for family in FAMILIES} | set(BY_MODEL_TYPE)
    names |= {"step5", "deepseek_v41", "deepseek_v41_text"}  # of which vLLM's classes are known
    assert names.issuperset(NUMBERS)
