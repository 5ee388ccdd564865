"""vLLM's own model classes, whole: what they call their layers leads to the layers that transformers' files have."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hqconv.serving.vllm.layer_names import find_layer
from tests.make.families import FAMILIES, LAYERS
from tests.make.vllm_lists import DRAFTED, LEFT_OUT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not here: `make test-vllm` runs these"
    ),
]
REPO = Path(__file__).resolve().parents[2]

BUILT = sorted(set(FAMILIES) - set(LEFT_OUT))
WEIGH_INPUTS = {"llama4", "llama4_text"}
ACTIVATIONS = {
    "gpt_oss": "swigluoai",
    "openai_privacy_filter": "swigluoai",
    "minimax_m3_vl": "swigluoai_uninterleave",
    "gemma4": "gelu_tanh",
    "nemotron_h": "relu2_no_mul",
}
LIMITS = {"deepseek_v4": 10.0, "glm5_next": 10.0, "hy_v4": 10.0, "minimax_m3_vl": 7.0}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's classes asked a quantization config, from a process of their own."""
    out = tmp_path_factory.mktemp("models") / "answers.json"
    command = [sys.executable, "-m", "tests.make.vllm_models", str(out), *BUILT]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def layer_of(name: str) -> int:
    """The only number in a name."""
    (number,) = re.findall(r"\.(\d+)\.", f".{name}.")
    return int(number)


@pytest.mark.parametrize("model_type", BUILT)
@pytest.mark.parametrize("names", ["renamed", "kept"])
def test_every_layer_of_the_server_has_its_own(answers: dict[str, Any], model_type: str, names: str) -> None:
    """`kept` has the names before vLLM's mappers too, as the plugin has them."""
    answer = answers[model_type]
    assert "error" not in answer, answer["error"]
    found = {asked["prefix"]: find_layer(asked["prefix"], asked[names], answer["blocks"]) for asked in answer["main"]}
    assert sorted(map(str, found.values())) == sorted(answer["blocks"])
    assert {prefix: layer_of(prefix) for prefix in found} == {
        prefix: answer["blocks"][layer] for prefix, layer in found.items()
    }


@pytest.mark.parametrize("model_type", sorted(DRAFTED))
@pytest.mark.parametrize("names", ["renamed", "kept"])
def test_a_draft_has_its_own_layer(answers: dict[str, Any], model_type: str, names: str) -> None:
    answer = answers[model_type]
    assert "error" not in answer, answer["error"]
    (asked,) = answer["draft"]
    layers = {**answer["blocks"], answer["drafted"]: LAYERS}
    assert find_layer(asked["prefix"], asked[names], layers) == answer["drafted"]
    without = {name: layer for name, layer in asked[names].items() if layer != answer["drafted"]}
    assert find_layer(asked["prefix"], without, layers) is None


@pytest.mark.parametrize("model_type", BUILT)
def test_what_vllm_means_by_the_experts(answers: dict[str, Any], model_type: str) -> None:
    """The plugin refuses other activations than were converted, and weighed inputs: here is which models have them."""
    for asked in answers[model_type]["main"]:
        assert asked["activation"] == ACTIVATIONS.get(model_type, "silu")
        assert asked["limit"] == LIMITS.get(model_type)
        assert asked["weighs_inputs"] is (model_type in WEIGH_INPUTS)
