"""Names and patterns that a config lists: they match as the tools' own code does, hostile ones in bounded time."""

from __future__ import annotations

import fnmatch
import re
import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.errors import RequestError
from hqconv.formats.quant_config import (
    declared_formats,
    globbed_in,
    named_in,
    parents,
    regex_matcher,
    skipped_by_transformers,
)

MODULES = [
    *(
        f"{front}layers.{layer}.{inner}experts.{e}.{word}"
        for front, layer, inner, e, word in product(
            ("model.", "", "a.model."),
            (0, 1, 11),
            ("mlp.", "mlp.shared_", ""),
            (0, 1, 10),
            ("up", "down_proj"),
        )
    ),
    *(
        "lm_head",
        "mtp.0.fc",
        "model.layers.1",
        "model.layers.1.mlp",
        "model.layers.1.mlp.experts",
        "model",
        "a",
    ),
]
SLOW = [
    "(a+)+b",
    "(a*)*b",
    "(a|a)*b",
    "(a|ab)*c",
    "(x+x+)+y",
    "(?:[a-z.0-9_]+)+!",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(?!(a+)+b).*!",
]
NAME = "model.language_model.model.layers.100.block_sparse_moe.experts.127.down_proj"
USUAL = [
    ".*layers.*experts.*gate.*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"(?:\w+\.)*experts\.\d+\.",
    r"model\.layers\.(\d|[1-5]\d|60)\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    "|".join(rf"layers\.{layer}\." for layer in range(61)),
    r"model(\.language_model)?\.layers\.\d{1,3}\..*",
    r"(?:\w+\.){7,}down_proj",
    r"^(?!.*experts).*$",
    r"(?!.*\.(experts)(?:\.\d+\.\w+)?$)",
    r"(?!.*shared_(?:experts|mlp)\.)(?:.*\.)?(?:a|experts)\.\d",
]


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_on_which_re_hangs_are_matched(pattern: str) -> None:
    matches = regex_matcher([pattern], "ignore")
    begin = time.thread_time()
    for length in range(300, 320):
        assert not matches("a" * length)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "*.gate", r"(?P<x>a)\1", "(?>a+)b", r".*(?<!shared_)experts"),
        *("(?:(?!shared).)*experts", "(?!a)b|c", "(?!a", "(?=a)b", "(?:a{1,1000}){1,1000}b"),
        *("(?!(?<=a)b)c", "(?:[a-z]{0,900}x){0,9}|" * 200),
    ],
)
def test_what_cannot_be_matched_in_linear_time_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="linear time") as caught:
        regex_matcher([".*", pattern], "quantization_config.ignore")
    assert caught.value.where == "quantization_config.ignore"


@pytest.mark.parametrize("pattern", USUAL)
def test_patterns_as_people_write_them_match_as_re_does(pattern: str) -> None:
    for name in (NAME, NAME.replace("down", "gate"), *MODULES, ""):
        assert regex_matcher([pattern], "ignore")(name) == bool(re.match(pattern, name)), name


@settings(max_examples=300, deadline=None)
@given(st.text("aei|()*+?!.[]\\", max_size=12), st.text("aei2", max_size=8))
def test_any_pattern_matches_as_re_does(pattern: str, name: str) -> None:
    try:
        found = regex_matcher([pattern], "ignore")(name)
        expected = bool(re.match(pattern, name))
    except (RequestError, re.error):
        return
    assert found == expected


BOMB = "(?:[a-z.0-9_]+)+!"
INT4 = {"bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [f"re:{BOMB}"]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [f"re:{BOMB}", "*a" * 40]},
        {"quant_method": "fp8", "modules_to_not_convert": [BOMB]},
        {"quant_method": "gptq", **INT4, "dynamic": {f"-:{BOMB}": {}}},
        {"quant_method": "auto-round", **INT4, "extra_config": {BOMB: {"bits": 8}}},
        {"quant_method": "humming", "b_dtype": "uint4", "ignore": [f"re:{BOMB}"]},
        {"quant_method": "quark", "global_quant_config": {}, "exclude": [f"re:{BOMB}"]},
    ],
    ids=lambda config: config["quant_method"],
)
def test_every_method_matches_such_a_pattern(config: dict[str, Any]) -> None:
    declared_formats(config, {}).of("a" * 1000 + ".experts.0.down_proj")


def test_a_list_of_every_module_is_matched_at_once() -> None:
    modules = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(30) for e in range(64)]
    skipped = skipped_by_transformers(modules[::2], "")
    begin = time.thread_time()
    assert sum(map(skipped, modules)) == len(modules) // 2
    assert time.thread_time() - begin < 1


REGEXES = [
    "model.layers.1",
    "model.layers.1.mlp",
    r"model\.layers\.1\.",
    r"model\.layers\.1",
    r"^model\.layers\.(0|11)\.mlp\.experts\.1\.up",
    r"model\.layers\.1*\.mlp",
    r"model\.layers\.1{2}\.mlp",
    r"model\.?layers",
    r"model\.layersx?\.0",
    "model.layers.1.mlp.experts.0.up|layers.0",
    r".*experts\.10\.",
    r".*\.1\..*down_proj$",
    r"[a-m]+odel",
    r"(?i)MODEL\.LAYERS\.0",
    "layers-1",
    "model.layers.0.mlp.shared.experts",
    "a",
    "mtp",
    "",
    r"model\.layers\.\d+\.mlp\.experts\.1\.",
    "down_proj",
    "experts.1.up",
]
GLOBS = [
    "model.layers.1*",
    "*experts.1.*",
    "model.layers.[01].mlp*",
    "model?layers.[!0].*",
    "lm_head",
    "re:.*up$",
    "m*",
]


@pytest.mark.parametrize(
    "chosen",
    [[pattern] for pattern in REGEXES] + [REGEXES[:4], [*REGEXES[4:9], "lm_head"]],
    ids=str,
)
def test_regular_expressions(chosen: list[str]) -> None:
    named = named_in([f"re:{pattern}" for pattern in chosen], "", with_parents=True)
    for module in MODULES:
        expected = any(re.match(regex, name) for regex in chosen for name in parents(module))
        assert named(module) == expected, module
    if any("(?i)" in pattern for pattern in chosen):  # no part of what transformers puts together
        return
    skipped, after = skipped_by_transformers(chosen, ""), r"(?:(?<=\.)|(?=\.|$))"
    for module in MODULES:
        expected = any(
            module.endswith(regex) or re.match(f"(?:{regex}){after}", module) for regex in chosen
        )
        assert skipped(module) == expected, module


@pytest.mark.parametrize("chosen", [[glob] for glob in GLOBS] + [GLOBS], ids=str)
@pytest.mark.parametrize("with_parents", [True, False])
def test_shell_patterns(chosen: list[str], with_parents: bool) -> None:
    found = globbed_in(chosen, "", with_parents=with_parents)

    def is_match(name: str) -> bool:
        return any(
            re.match(glob[3:], name) if glob[:3] == "re:" else fnmatch.fnmatchcase(name, glob)
            for glob in chosen
        )

    for module in MODULES:
        names = parents(module) if with_parents else [module]
        assert found(module) == any(map(is_match, names)), module
