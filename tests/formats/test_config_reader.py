"""Names that a config lists: what is looked up for each block must say what every pattern by itself says."""

from __future__ import annotations

import fnmatch
import re
from itertools import product

import pytest

from hqconv.formats import module_rules
from hqconv.formats.module_rules import (
    globbed_in,
    named_in,
    parents,
    skipped_by_transformers,
    start_of,
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
    "model?layers.0.*",
    "lm_head",
    "re:.*up$",
    "m*",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_match_begins_as_is_said(pattern: str) -> None:
    start = re.escape(start_of(pattern)).replace(r"\.", ".")
    found = [module for module in MODULES if re.match(pattern, module)]
    assert all(re.match(start, module) for module in found)


def test_most_beginnings_are_found() -> None:
    assert [
        start_of(text) for text in (r"^a\.b\.(c|d)", "a.bc+d", r"a\.?b", "a|b", ".*a", r"a\.b\d")
    ] == ["", "a.b", "a", "", "", "a.b"]


@pytest.mark.parametrize(
    "chosen", [[one] for one in REGEXES] + [REGEXES[:4], [*REGEXES[4:9], "lm_head"]], ids=str
)
def test_regular_expressions(chosen: list[str]) -> None:
    named = named_in([f"re:{one}" for one in chosen], "", with_parents=True)
    for module in MODULES:
        assert named(module) == any(
            re.match(one, name) for one in chosen for name in parents(module)
        ), module
    if any("(?i)" in one for one in chosen):  # flags are no part of what transformers puts together
        return
    skipped, after = skipped_by_transformers(chosen, ""), r"(?:(?<=\.)|(?=\.|$))"
    for module in MODULES:
        expected = any(
            module.endswith(one) or re.match(f"(?:{one}){after}", module) for one in chosen
        )
        assert skipped(module) == expected, module


@pytest.mark.parametrize("chosen", [[one] for one in GLOBS] + [GLOBS], ids=str)
@pytest.mark.parametrize("with_parents", [True, False])
def test_shell_patterns(chosen: list[str], with_parents: bool) -> None:
    found = globbed_in(chosen, "", with_parents=with_parents)

    def is_match(name: str) -> bool:
        return any(
            re.match(one[3:], name) if one[:3] == "re:" else fnmatch.fnmatchcase(name, one)
            for one in chosen
        )

    for module in MODULES:
        assert found(module) == any(
            is_match(n) for n in (parents(module) if with_parents else [module])
        ), module


def test_few_patterns_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many that speak of other layers, none; and what a layer's parents say is asked once."""
    tried: list[str] = []

    class Pattern:
        def __init__(self, text: str, _where: str, after: str = "") -> None:
            self.real = re.compile(f"(?:{text}){after}")

        def matches(self, name: str) -> bool:
            tried.append(name)
            return self.real.match(name) is not None

    monkeypatch.setattr(module_rules, "LinearRegex", Pattern)
    patterns = [f"model.layers.{layer}.mlp.gate" for layer in range(100)]
    skipped = skipped_by_transformers(patterns, "")
    assert not any(skipped(f"model.layers.7.mlp.experts.{e}.up_proj") for e in range(64))
    assert tried == []
    assert skipped("model.layers.7.mlp.gate")
    named = named_in(["re:.*x$"], "", with_parents=True)
    assert not any(named(f"model.layers.7.mlp.experts.{e}.up_proj") for e in range(64))
    assert len(tried) == 2 * 64 + 5
