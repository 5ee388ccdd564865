"""Kernels for a checkpoint that a stock vLLM serves: those that its own classes ask for, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.errors import OutputError, RequestError
from hqconv.kernel_layout.kernel_sources import standing_in, toolkit
from hqconv.warm import checkpoint_kernels
from hqconv.warm.compile_kernels import artifact_kernels, compute_settings
from hqconv.warm.gpus import KNOWN
from scripts.check_serving import packed
from tests.make.families import save_family
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

pytestmark = pytest.mark.vllm
GPU = KNOWN["h200"]
SERVER = {"tp": 1, "ep": 1, "quantization": None, "moe_backend": None}
CONVERTING = {"weight_repack_nk", "unpack_weight_kernel", "process_mxfp4_w4a8"}


def asked(model: Path, tp: int = 1, ep: int = 1, **server: str) -> dict[str, Any]:
    """What the program says that vLLM asks for; nothing is compiled."""
    named = {"quantization": None, "moe_backend": None, **server}
    job = {"model": str(model), "tp": tp, "ep": ep, **named, "jobs": 0, "gpu": vars(GPU)}
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "hqconv.warm.checkpoint_kernels", json.dumps(job)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document


def of_artifact(out: Path) -> set[str]:
    """Kernels of a kernel artifact, by hqconv's own knowledge of what vLLM asks for."""
    with Artifact(out) as artifact, standing_in(GPU.facts()), toolkit():
        return set(artifact_kernels(artifact, compute_settings(artifact.grid.ep > 1))[0])


@pytest.mark.parametrize("ranks", [{}, {"tp": 2}, {"ep": 2}], ids=["one", "tp", "ep"])
@pytest.mark.parametrize("kind", ["humming mxfp4", "compressed-tensors int4"])
def test_the_kernels_are_those_of_an_artifact_and_of_the_weights(
    kind: str, ranks: Any, tmp_path: Path
) -> None:
    source = write_qwen3_moe(
        tmp_path / "source", hidden_size=256, intermediate_size=256, num_experts=4
    )
    words: dict[str, Any] = {"target": "sm90", "device": "cpu"}
    if kind == "humming mxfp4":
        model, schema = tmp_path / "checkpoint", "mxfp4"
        hqconv.convert(source, model, schema=schema, layout="checkpoint", **words)
    else:
        model, schema = source, "source"
        packed(source)
    hqconv.convert(source, tmp_path / "kernel", schema=schema, **ranks, **words)
    found = asked(model, **ranks)
    assert {"routed_experts" in layer for layer in found["layers"]} == {True}
    converting = {name for name, function in found["kernels"].items() if function in CONVERTING}
    assert converting
    assert found["kernels"].keys() - converting == of_artifact(tmp_path / "kernel")


def test_other_layers_that_humming_serves_have_kernels_too(tmp_path: Path) -> None:
    """On Hopper vLLM gives attention in 8 bits per group of 32 to Humming, and experts in fp8 to CUTLASS."""
    source = write_qwen3_moe(
        tmp_path / "source", hidden_size=256, intermediate_size=256, num_experts=64
    )
    quantization = {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    }
    assert any("qkv_proj" in layer for layer in asked(configured(source, quantization))["layers"])
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = {
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "symmetric": True,
        "dynamic": True,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
    assert not asked(configured(source, quantization))["layers"]


def test_the_backend_and_the_quantization_are_the_servers(tmp_path: Path) -> None:
    """GPT-OSS is Triton's on Hopper unless the server says otherwise; plain weights are Humming's as mxfp8."""
    save_family(tmp_path / "gpt_oss", "gpt_oss", hidden=256, inner=256, head_dim=64)
    model = configured(tmp_path / "gpt_oss", {"quant_method": "mxfp4"})
    assert not asked(model)["layers"]
    assert any("experts" in layer for layer in asked(model, moe_backend="humming")["layers"])
    plain = write_qwen3_moe(
        tmp_path / "plain", hidden_size=256, intermediate_size=256, num_experts=64
    )
    assert not asked(plain)["layers"]
    assert any("experts" in layer for layer in asked(plain, quantization="mxfp8")["layers"])


def configured(source: Path, quantization: dict[str, Any]) -> Path:
    path = source / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    return source


def test_a_cache_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(checkpoint_kernels.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match=f"Set {checkpoint_kernels.CACHE_VARIABLE} to"):
        checkpoint_kernels.warm_checkpoint(str(tmp_path), GPU, SERVER, 1, print)


def test_what_vllm_says_of_a_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoint_kernels.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gearbox", "architectures": ["Gearbox"]})
    )
    with pytest.raises(RequestError, match="gearbox"):
        checkpoint_kernels.warm_checkpoint(str(tmp_path), GPU, SERVER, 1, print)
