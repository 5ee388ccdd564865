"""Activations with numbers, from config.json to an artifact: the manifest, `inspect`, all checks of `verify`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.api import describe_plan
from hqconv.artifact.reader import Artifact
from hqconv.schemas.activation import Activation
from hqconv.verification import kernel as module
from hqconv.verification.result import CheckResult
from hqconv.verification.verify import _sample
from tests.make import small, standin
from tests.make.conversions import assert_verified, manifest, run

Words = dict[str, Any]
KIMI = {"model_type": "kimi_linear", "hidden_act": "situ"}


def one_layer(**words: Any) -> Any:
    return small.with_activation(words)


def two_layers(**words: Any) -> Any:
    return small.two_layers(small.with_activation(words))


# A source, and what the manifest says of the activation of each layer.
CASES: dict[str, tuple[Callable[[], Any], list[Words]]] = {
    "bailing": (
        lambda: two_layers(model_type="bailing_moe_v3", expert_swiglu_limit_list=[0.0, 7.0]),
        [
            {"activation": "silu"},
            {"activation": "silu_clamp7", "activation_parameters": {"limit": 7.0}},
        ],
    ),
    "gpt_oss": (
        lambda: one_layer(model_type="gpt_oss", swiglu_limit=2.0),
        [
            {
                "activation": "swigluoai",
                "activation_parameters": {"limit": 2.0, "alpha": 1.702, "beta": 1.0},
            }
        ],
    ),
    "kimi": (
        lambda: two_layers(**KIMI, activation_situ_beta=4.0, activation_situ_linear_beta=25.0),
        [{"activation": "situ", "activation_parameters": {"beta": 4.0, "linear_beta": 25.0}}] * 2,
    ),
    "kimi, no beta": (
        lambda: two_layers(**KIMI),
        [{"activation": "situ", "activation_is_known": False}] * 2,
    ),
    "not understood": (
        lambda: two_layers(model_type="qwen3_moe", swiglu_limits=[0, 7.0]),
        [
            {"activation": "silu"},
            {"activation": "silu+swiglu_limits", "activation_is_known": False},
        ],
    ),
}


_KEYS = ("activation", "activation_parameters", "activation_is_known")


def activations(words: Words) -> list[Words]:
    layers = words["blocks"]
    of_each = layers.values() if isinstance(layers, dict) else layers
    return [{key: layer[key] for key in _KEYS if key in layer} for layer in of_each]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    done: dict[str, tuple[Path, Path]] = {}

    def make(case: str) -> tuple[Path, Path]:
        if case not in done:
            root = tmp_path_factory.mktemp("activations")
            source, out = small.save(root / "src", CASES[case][0]()), root / "out"
            run(source, out, "mxfp4")
            done[case] = source, out
        return done[case]

    return make


def kernel_on_cpu(out: Path, monkeypatch: pytest.MonkeyPatch, activation: str = "") -> CheckResult:
    """The kernel check with the real loop, expressions and judge, and with plain weights in kernels that stand in.

    activation: what the kernel is given by mistake.
    """
    experts = [
        {
            "w1": torch.randn(small.INNER, small.HIDDEN) / 6,
            "w3": torch.randn(small.INNER, small.HIDDEN) / 6,
            "w2": torch.randn(small.HIDDEN, small.INNER) / 16,
        }
        for _ in range(small.E)
    ]
    if activation:
        real, other = module.fused_moe, Activation.of_label(activation)
        monkeypatch.setattr(
            module,
            "fused_moe",
            lambda gemms, x, ids, weights, _, *rest: real(gemms, x, ids, weights, other, *rest),
        )
    with Artifact(out) as artifact:
        return standin.check_kernel(artifact, monkeypatch, experts, list(artifact.layers))


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_in_the_manifest_and_in_all_descriptions(
    case: str, converted: Callable[[str], tuple[Path, Path]]
) -> None:
    (source, out), expected = converted(case), CASES[case][1]
    assert_verified(out, source)
    assert activations(manifest(out)) == expected
    each = [words for i, words in enumerate(expected) if i == 0 or words != expected[i - 1]]
    for place in (source, out):
        assert activations(hqconv.inspect(place)) == each
    plan = describe_plan(
        hqconv.plan(source, schema="mxfp4", target="sm90", device="cpu"), device="cpu"
    )
    assert activations(plan) == each
    unknown = {words["activation"] for words in expected if "activation_is_known" in words}
    warned = [warning for warning in plan["warnings"] if "known by name only" in warning]
    assert [any(f"activation {name} is" in warning for warning in warned) for name in unknown] == [
        True
    ] * len(warned)


@pytest.mark.parametrize("case", [case for case in CASES if "no" not in case])
def test_the_kernel_check_computes_with_them(
    case: str, converted: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = kernel_on_cpu(converted(case)[1], monkeypatch)
    assert result.status == "pass", result.findings
    assert len(result.measured) == len(CASES[case][1])
    assert all(0 < measured["kernel"] < 0.006 for measured in result.measured.values())


@pytest.mark.parametrize("case", ["bailing", "gpt_oss", "kimi"])
def test_a_kernel_without_the_numbers_is_found(
    case: str, converted: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be if the name alone went to Humming."""
    plain = {"gpt_oss": "swigluoai", "bailing": "silu_clamp1"}.get(case, "silu")
    assert kernel_on_cpu(converted(case)[1], monkeypatch, plain).status == "fail"


def test_layers_that_are_known_by_name_only_are_passed_over(
    converted: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = kernel_on_cpu(converted("not understood")[1], monkeypatch)
    assert (result.status, list(result.measured)) == ("pass", ["model.layers.0.mlp.experts"])
    (note,) = [note for note in result.notes if note.startswith("skipped: ")]
    assert "model.layers.1.mlp.experts: silu+swiglu_limits" in note
    result = kernel_on_cpu(converted("kimi, no beta")[1], monkeypatch)
    assert (result.status, result.measured) == ("skipped", {})
    assert "known by name only" in result.skipped


def test_one_layer_of_each_activation_is_looked_at(tmp_path: Path) -> None:

    many, words = two_layers(model_type="exaone_moe", swiglu_limits=[0, 7.0, 0, 0, 0])
    for layer in (2, 3, 4):
        for name in [name for name in many if "layers.0" in name]:
            many[name.replace("layers.0", f"layers.{layer}")] = many[name].clone()
    source = small.save(tmp_path / "src", (many, words))
    run(source, tmp_path / "out", "mxfp4")
    with Artifact(tmp_path / "out") as artifact:
        options: Any = type("Options", (), {"layers": None})
        chosen = _sample(artifact, list(artifact.layers), options)
    assert chosen == [f"model.layers.{layer}.mlp.experts" for layer in (0, 1, 2, 4)]
