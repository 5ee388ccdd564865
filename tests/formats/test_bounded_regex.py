"""Patterns of untrusted configs: real ones go on working, none takes longer than about a second."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.errors import InputError
from hqconv.formats.bounded_regex import BoundedRegex
from hqconv.formats.quant_config import declared_formats
from tests.make.places import REPO

AFTER = r"(?:(?<=\.)|(?=\.|$))"  # as transformers' matcher adds it
EXPONENTIAL = [
    "(?:[a-z.0-9_]+)+!",
    "(a+)+b",
    "(a*)*b",
    "(a|a)*b",
    "(a|ab)*c",
    "(?:aa|a)*b",
    "(.*)*x",
    "(?:.*a){12}x",
    "(x+x+)+y",
    r"(\w+\s?)*$",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(?:a?){30}a{30}",
    "a?" * 30 + "a" * 30,
    "(?:aa|a)" * 40 + "b",
    ".*" * 9 + "x",
    "(?=(a+)+b)a",
    r"(a*)\1b",
    r".*(?P<x>a+)(?P=x)b",
    r"(a)?(?(1)b|c)" + "a*" * 12 + "b",
    "a" * 10_001,
]
POLYNOMIAL = ["a*a*a*b", ".*a.*a.*a.*b", r"(?:\.\w+)*.*x", "(?:a|b)*(?:a|c)*a*d", "[ab]*a[ab]*a[ab]*c"]
HARMLESS = [
    ".*self_attn.*",
    ".*layers.*experts.*gate.*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    ".*block_sparse_moe.router",
    r"(?:\w+\.)*experts\.\d+\.",
    r"model\.layers\.(\d|[1-5]\d|60)\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    r"^(?!.*experts).*$",
    r".*(?<!shared_)experts.*",
    r"(?:(?!shared).)*experts",
    "|".join(rf"layers\.{layer}\." for layer in range(61)),
    r".*\.(0|1|2|3|10|11|100)\..*down_proj$",
    r"model(\.language_model)?\.layers\.\d{1,3}\..*",
]
NAME = "model.language_model.model.layers.100.block_sparse_moe.experts.127.down_proj"


@pytest.mark.parametrize("pattern", EXPONENTIAL)
@pytest.mark.parametrize("is_anywhere", [False, True])
def test_a_pattern_that_can_take_exponential_time_is_refused(pattern: str, is_anywhere: bool) -> None:
    with pytest.raises(InputError, match="can take too long") as info:
        BoundedRegex(pattern, "quantization_config.ignore", is_anywhere=is_anywhere)
    assert info.value.where == "quantization_config.ignore"


@pytest.mark.parametrize("pattern", POLYNOMIAL)
@pytest.mark.parametrize("text", ["a", "ab", ".a"])
def test_polynomial_patterns_are_matched_on_names_of_a_bounded_length(pattern: str, text: str) -> None:
    regex = BoundedRegex(pattern, "ignore")
    begin = time.monotonic()
    regex.matches((text * 100)[:150])
    with pytest.raises(InputError, match="too long for a pattern"):
        regex.matches(text * 50_000)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("pattern", HARMLESS)
@pytest.mark.parametrize("after", ["", AFTER])
def test_patterns_as_people_write_them_match_as_re_does(pattern: str, after: str) -> None:
    regex = BoundedRegex(pattern, "ignore", after=after)
    for name in (NAME, NAME.replace("down", "gate"), "model.layers.3.mlp.experts.7.gate_proj", "lm_head", ""):
        assert regex.matches(name) == bool(re.match(f"(?:{pattern}){after}", name))
    assert BoundedRegex(pattern, "x", is_anywhere=True).matches(NAME) == bool(re.search(pattern, NAME))


@settings(max_examples=300, deadline=2000)
@given(st.text("ab|()*+?.{}2,", max_size=12))
def test_any_pattern_is_refused_or_fast(pattern: str) -> None:
    try:
        regex = BoundedRegex(pattern, "ignore")
    except InputError:
        return
    for name in ("a" * 64, "ab" * 32, "a" * 63 + "c"):
        regex.matches(name)


def published_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((REPO / "tests/data/models").rglob("*.json")):
        stack = [json.loads(path.read_bytes())]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack += value.values()
                config = value.get("quantization_config")
                if isinstance(config, dict) and ("quant_method" in config or "quantization" in config):
                    yield path.name, config


def test_published_patterns_go_on_working() -> None:
    configs = list(published_configs())
    assert len(configs) > 5
    for _, config in configs:
        declared_formats(config, {}).of(NAME)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:(a+)+!"]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["re:(a+)+!"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["(a+)+!"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:(a+)+!": {}}},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"(a+)+!": {"bits": 8}}},
        {"quant_method": "humming", "b_dtype": "uint4", "ignore": ["re:(a+)+!"]},
        {"quant_method": "quark", "global_quant_config": {}, "exclude": ["re:(a+)+!"]},
    ],
    ids=lambda config: config["quant_method"],
)
def test_every_method_refuses_such_a_pattern(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="can take too long"):
        declared_formats(config, {})
