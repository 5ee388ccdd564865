"""Patterns of untrusted configs: they match as `re` matches, and none takes more steps than its limit."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.errors import InputError, RequestError
from hqconv.formats import linear_regex
from hqconv.formats.linear_regex import LinearRegex
from hqconv.formats.module_rules import globbed_in
from hqconv.formats.quant_config import declared_formats
from tests.make.places import REPO

AFTER = r"(?:(?<=\.)|(?=\.|$))"  # as transformers' matcher adds it
SLOW = ["(?:a{1,1000}){1,1000}b", "((((a{1,100}){1,100}){1,100}){1,100})b"]
LINEAR = [
    "(?:[a-z.0-9_]+)+!",
    "(a+)+b",
    "(a*)*b",
    "(a|a)*b",
    "(a|ab)*c",
    "(x+x+)+y",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
]
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
    r"model\.(?:\w+\.){3}\d+\.",
    r"(?:\w+\.){7,}down_proj",
]
NAME = "model.language_model.model.layers.100.block_sparse_moe.experts.127.down_proj"


@pytest.mark.parametrize("pattern", LINEAR + SLOW)
@pytest.mark.parametrize("is_anywhere", [False, True])
def test_patterns_on_which_re_hangs_are_matched(pattern: str, is_anywhere: bool) -> None:
    regex = LinearRegex(pattern, "ignore", is_anywhere=is_anywhere)
    assert not regex.matches("a" * 500)
    begin = time.thread_time()
    for length in range(300, 320):
        assert not regex.matches("a" * length)
    assert time.thread_time() - begin < 2


def test_the_limit_is_on_all_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_regex, "_MAX_STEPS", 10_000)
    regex = LinearRegex("((ab?)+c?)+!", "quantization_config.ignore")
    with pytest.raises(RequestError, match="takes too long") as info:
        any(regex.matches("abc" * 10 + str(number)) for number in range(100_000))
    assert info.value.where == "quantization_config.ignore"


@pytest.mark.parametrize("pattern", [r"(a+)+\1", "(?>(a+)+)b", "(a+)+(?i:b)", "((a+)+)(?=(b+)+c)"])
def test_what_takes_no_linear_time_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="takes too long"):
        LinearRegex(pattern, "ignore").matches("a" * 60)


def test_globs_take_linear_time() -> None:
    matches = globbed_in(["*a" * 40 + "*b", "*.[xy]?.*"], "ignore")
    assert not matches("a" * 100_000)
    assert matches("a.x1.b")


def test_a_pattern_must_be_one_by_itself() -> None:
    with pytest.raises(InputError, match="is no regular expression"):
        LinearRegex("a)|(?:b", "ignore", after=AFTER)


@pytest.mark.parametrize("pattern", ["(", "a" * 10_001, r"\p{L}", "(?R)"])
def test_a_pattern_that_re_does_not_know_is_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="is no regular expression"):
        LinearRegex(pattern, "ignore")


@pytest.mark.parametrize("pattern", HARMLESS)
@pytest.mark.parametrize("after", ["", AFTER])
def test_patterns_as_people_write_them_match_as_re_does(pattern: str, after: str) -> None:
    regex, anywhere = (
        LinearRegex(pattern, "ignore", after=after),
        LinearRegex(pattern, "x", is_anywhere=True),
    )
    for _ in range(2):
        for name in (
            NAME,
            NAME.replace("down", "gate"),
            "model.layers.3.mlp.experts.7.gate_proj",
            "lm_head",
            "",
        ):
            assert regex.matches(name) == bool(re.match(f"(?:{pattern}){after}", name)), name
        assert anywhere.matches(NAME) == bool(re.search(pattern, NAME))
        regex._max_length = anywhere._max_length = -1  # not by `re`


@settings(max_examples=300, deadline=None)
@given(st.text("aei|()*+?.{}2,[]\\\\", max_size=12), st.text("aei2,{}", max_size=8))
def test_any_pattern_matches_as_re_does(pattern: str, name: str) -> None:
    try:
        regex = LinearRegex(pattern, "ignore")
        found = [regex.matches(name)]
        regex._max_length = -1  # not by `re`
        found.append(regex.matches(name))
    except (InputError, RequestError):
        return
    assert found == [bool(re.match(pattern, name))] * 2


def published_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((REPO / "tests/data/models").rglob("*.json")):
        stack = [json.loads(path.read_bytes())]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack += value.values()
                config = value.get("quantization_config")
                if isinstance(config, dict) and (
                    "quant_method" in config or "quantization" in config
                ):
                    yield path.name, config


def test_published_patterns_go_on_working() -> None:
    configs = list(published_configs())
    assert len(configs) > 5
    for _, config in configs:
        declared_formats(config, {}).of(NAME)


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "ignore": ["re:(?:a{1,1000}){1,1000}b"],
        },
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["re:(?:a{1,1000}){1,1000}b"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["(?:a{1,1000}){1,1000}b"]},
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "dynamic": {"-:(?:a{1,1000}){1,1000}b": {}},
        },
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "extra_config": {"(?:a{1,1000}){1,1000}b": {"bits": 8}},
        },
        {"quant_method": "humming", "b_dtype": "uint4", "ignore": ["re:(?:a{1,1000}){1,1000}b"]},
        {
            "quant_method": "quark",
            "global_quant_config": {},
            "exclude": ["re:(?:a{1,1000}){1,1000}b"],
        },
    ],
    ids=lambda config: config["quant_method"],
)
def test_every_method_matches_such_a_pattern(config: dict[str, Any]) -> None:
    declared_formats(config, {}).of("a" * 1000 + ".experts.0.down_proj")
