"""Artifacts in vLLM's own model classes through the plugin: every family, its drafts, quantized dense layers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from hqconv.models.families import BY_MODEL_TYPE
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.weight_schema import resolve_schema
from tests.make import vllm_lists
from tests.make.families import FAMILIES
from tests.make.places import REPO

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not here: `make test-vllm` runs these",
    ),
]
TRIED = sorted(set(FAMILIES) - set(vllm_lists.LEFT_OUT))
SERVED = [model_type for model_type in TRIED if model_type not in vllm_lists.REFUSED]
# Checkpoints of tests/make/vllm_quantized.py: vLLM's config, its name and method, and which of the layers of attention
# are plain.
QUANTIZED = {
    "fp8": ("Fp8Config", "fp8", "Fp8LinearMethod", {"model.layers.1.self_attn.o_proj"}),
    "deepseek_v4_fp8": ("Fp8Config", "deepseek_v4_fp8", "Fp8LinearMethod", set()),
    "qwen3_5_moe_fp8": (
        "Fp8Config",
        "fp8",
        "Fp8LinearMethod",
        {"language_model.model.layers.1.self_attn.qkv_proj"},
    ),
    "compressed-tensors": (
        "CompressedTensorsConfig",
        "compressed-tensors",
        "CompressedTensorsLinearMethod",
        {"model.layers.1.self_attn.o_proj"},
    ),
    "modelopt": (
        "ModelOptFp8Config",
        "modelopt",
        "ModelOptLinearMethod",
        {"model.layers.1.self_attn.o_proj"},
    ),
}
# Model types whose layers beside the experts are quantized too, and how.
DENSE = (
    *("qwen3_moe+int8", "qwen3_moe+int4-g32-zp", "qwen2_moe+int4-g32-e4m3-row", "mixtral+mxfp4"),
    *("qwen3_next+int8", "qwen3_5_moe+int4-g32", "qwen3_vl_moe+int8", "glm4_moe+int4-g32-e4m3"),
    *("deepseek_v3+fp8", "glm4_moe_lite+int8", "gpt_oss+int8", "minimax_m2+int8"),
    *("ernie4_5_moe+int8", "olmoe+int8"),
)
# Of sources with quantized layers beside the experts, which stay as they are.
MIXED = (
    *("compressed-tensors+int4-g32", "modelopt+int8", "fp8+nvfp4", "qwen3_5_moe_fp8+int4-g32"),
)
DRAFTED = {*vllm_lists.DRAFTS, "fp8", "deepseek_v4_fp8", "qwen3_5_moe_fp8"}
# Sources that vLLM's own class does not load without hqconv, and what it says.
NOT_LOADED = {
    "dbrx": "blocks.0.ffn.experts.w13_weight",  # what DbrxExperts says is not where vLLM 0.33 has its parameters
    "longcat_flash": "experts.4.",  # transformers saves experts that do nothing
    "qwen3_vl_moe": "must match the size",  # publishers' stacks are transposed, transformers' are not
}
ATTENTION = re.compile(r"(language_model\.)?model\.layers\.\d+\.(self_)?attn\.(w\w+|\w+_proj\w*)")
ACTIVATIONS = {
    "gpt_oss": "swigluoai_uninterleave",
    "openai_privacy_filter": "swigluoai_uninterleave",
    "minimax_m3_vl": "swigluoai_uninterleave",
    "gemma4": "gelu_tanh",
    "nemotron_h": "relu2_no_mul",
}
LIMITS = {"deepseek_v4": 10.0, "glm5_next": 10.0, "hy_v4": 10.0}
LIMITS |= dict.fromkeys(("gpt_oss", "openai_privacy_filter", "minimax_m3_vl"), 7.0)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each model, from a process of its own."""
    out = tmp_path_factory.mktemp("served") / "answers.json"
    # In this order: a deepseek_v32 makes vLLM take every later deepseek_v3's draft for its own, in one process.
    command = [sys.executable, "-m", "tests.make.vllm_serving", str(out)]
    command += [*QUANTIZED, *DENSE, *MIXED, *TRIED]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def parts(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The model, and its draft where it has one."""
    assert "error" not in answer, answer["error"]
    found = [answer[part] for part in ("main", "draft") if part in answer]
    for part in found:
        assert not part.keys() & {"error", "refused"}, part
    return found


@pytest.mark.parametrize("case", [*SERVED, *QUANTIZED])
def test_every_layer_is_in_one_of_the_servers(answers: dict[str, Any], case: str) -> None:
    """Also where a draft has its layer, and each layer of experts holds its rank file."""
    found = parts(answers[case])
    layers = [layer for part in found for layer in part["layers"]]
    assert {layer["method"] for layer in layers} == {"HqconvMoEMethod"}
    assert sorted(layer["block"] for layer in layers) == sorted(answers[case]["blocks"])
    assert all(layer["holds_its_file"] for layer in layers)
    assert len(found) == 1 + (case in DRAFTED)
    for part in found[1:]:
        assert [layer["block"] for layer in part["layers"]] == [answers[case]["drafted"]]


@pytest.mark.parametrize("case", [*SERVED, *QUANTIZED])
def test_every_other_layer_is_as_without_hqconv(answers: dict[str, Any], case: str) -> None:
    """Parameters, what vLLM says that it has loaded, and how layers are stored."""
    for part in parts(answers[case]):
        if case in NOT_LOADED:
            assert NOT_LOADED[case] in part["source"]
            assert not part["unloaded"]
        else:
            assert "source" not in part, part["source"]
            assert not part["unlike"]
            assert not part["unnamed"]
            assert not part["other_methods"]


@pytest.mark.parametrize("case", DENSE)
def test_quantized_linear_layers_are_the_artifacts(answers: dict[str, Any], case: str) -> None:
    """Every group is in a layer of vLLM, fused as vLLM does it, drafts too, and nothing stays unloaded."""
    answer = answers[case]
    for part in parts(answer):
        assert not part["unloaded"]
        assert "HummingLinearMethod" in part["methods"].values()
    assert answer["linear"] == dict.fromkeys(answer["groups"], True)


@pytest.mark.parametrize("case", MIXED)
def test_layers_that_the_source_has_quantized_are_as_without_hqconv(
    answers: dict[str, Any], case: str
) -> None:
    """The others are the artifact's; no draft has one of them."""
    answer = answers[case]
    assert answer["linear"] == dict.fromkeys(answer["groups"], True)
    [changed] = {name for name, _ in answer["main"]["other_methods"]}
    assert answer["main"]["methods"][changed] == "HummingLinearMethod"
    assert {name.rpartition(".")[0] for name in answer["main"]["unlike"]} == {changed}
    for part in parts(answer):
        assert part["kinds"] == [QUANTIZED[case.partition("+")[0]][0]]
    assert "HummingLinearMethod" not in answer.get("draft", {}).get("methods", {}).values()


@pytest.mark.parametrize("model_type", SERVED)
def test_the_activation_is_the_converted_one(answers: dict[str, Any], model_type: str) -> None:
    wanted = ACTIVATIONS.get(model_type, "silu"), LIMITS.get(model_type)
    for part in parts(answers[model_type]):
        assert {(layer["activation"], layer["limit"]) for layer in part["layers"]} == {wanted}


@pytest.mark.parametrize("model_type", vllm_lists.STOCK)
def test_what_is_said_of_the_checkpoint_layout_is_what_happens(
    answers: dict[str, Any], model_type: str
) -> None:
    """Without hqconv: its experts are those of the kernel layout, or a reason is known why not."""
    answer, family = answers[model_type], BY_MODEL_TYPE[model_type].name
    reasons = [
        ENGINE.checkpoint_family_obstacle(family, layer, resolve_schema("mxfp4"))
        for layer in answer["blocks"]
    ]
    assert answer["is_read_by_stock_vllm"] == (not any(reasons))


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_dense_layers_are_vllms_own(answers: dict[str, Any], case: str) -> None:
    """Model classes that ask for the source's kind get it, and layers that it leaves out are plain."""
    kind, method, linear, plain = QUANTIZED[case]
    for part in parts(answers[case]):
        assert part["kinds"] == [kind]
        assert part["method"] == method
    used = {
        name: words
        for name, words in answers[case]["main"]["methods"].items()
        if ATTENTION.fullmatch(name) and "compressor" not in name
    }
    assert {name for name, words in used.items() if words != linear} == plain
    assert len(used) > len(plain)


@pytest.mark.parametrize("case", ["modelopt", "qwen3_5_moe_fp8"])
def test_scales_of_the_cache_find_their_place(answers: dict[str, Any], case: str) -> None:
    """ModelOpt's and fp8's have names of their own: the plugin passes the source's mapping on."""
    unloaded = [name for name in answers[case]["main"]["unloaded"] if ".layers.0." in name]
    assert {name.rpartition(".")[2] for name in unloaded} == {
        "q_scale",
        "prob_scale",
    }  # the source has none


@pytest.mark.parametrize("model_type", sorted(vllm_lists.REFUSED))
def test_what_cannot_be_served_is_refused(answers: dict[str, Any], model_type: str) -> None:
    answer = answers[model_type]
    assert "error" not in answer, answer["error"]
    assert vllm_lists.REFUSED[model_type] in answer["main"].get("refused", "")
    assert "what to do" in answer["main"]["refused"]


def test_what_is_not_loaded_can_be_told(answers: dict[str, Any]) -> None:
    """The memory's fill shows: a draft shares its embeddings with the model, and does not load them."""
    assert "model.embed_tokens.weight" in answers["glm4_moe_lite"]["draft"]["unloaded"]
