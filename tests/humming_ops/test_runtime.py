"""What Humming asks about the device is answered for the target of the request, whatever GPU is here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hqconv.humming_ops.runtime import humming, target_facts
from hqconv.kernel_layout.transform import is_compatible, kernel_form, layer_config
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import Grid
from tests.make.conversions import kernel_spec_of, run, schema_of
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

# A process in which Humming and torch find an A100, as they would on one.
ON_AN_A100 = """
import sys
from types import SimpleNamespace
import torch
import humming.device

A100 = dict(sm_version=80, sm_major=8, sm_minor=0, is_ppu=False, name="A100", sm_count=108)
humming.device._get_device_info_extension = lambda: SimpleNamespace(
    _DeviceInfo=lambda _: SimpleNamespace(index=0, **A100)
)
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *_: (8, 0)

from humming.transform import prepare_layer_config
from hqconv.humming_ops.runtime import humming_schema
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import resolve_schema
words = dict(shape_n=128, shape_k=128, weight_schema=humming_schema(resolve_schema(sys.argv[3])), num_experts=1)
words |= dict(pad_n_to_multiple=256, pad_k_to_multiple=128, torch_dtype=torch.bfloat16, device=-1)
assert prepare_layer_config(**words).sm_version == 80, "Humming does not take this for an A100"

import humming.jit.runtime
from hqconv.humming_ops.runtime import humming as load, target_facts
load()
with target_facts(GpuTarget(90)):  # the kernels that convert are compiled for the GPU that runs them
    there = humming.jit.runtime.current_device
    assert (there.sm_version, there.index, there.is_ppu) == (80, 0, False)
    assert humming.transform.current_device.sm_version == 90

import hqconv
hqconv.convert(sys.argv[1], sys.argv[2], schema=sys.argv[3], target="sm90", tp=2, device="cpu")
report = hqconv.verify(sys.argv[2], sys.argv[1], device="cpu", checks=["files", "weights"])
assert report.passed, report.to_dict()
"""


@pytest.mark.full
@pytest.mark.parametrize("schema", ["mxfp4", "fp8-block"])
def test_on_another_gpu_the_target_is_still_the_requests(tmp_path: Path, schema: str) -> None:
    model = write_qwen3_moe(
        tmp_path / "model", num_layers=1, hidden_size=256, intermediate_size=256
    )
    arguments = [str(model), str(tmp_path / "foreign"), schema]
    done = subprocess.run(
        [sys.executable, "-c", ON_AN_A100, *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run(model, tmp_path / "here", schema, Grid(2))
    assert snapshot(tmp_path / "foreign") == snapshot(tmp_path / "here")
    with safe_open(next((tmp_path / "foreign/experts").rglob("*.safetensors")), "pt") as file:
        assert {json.loads(file.metadata()[gemm])["sm_version"] for gemm in ("w13", "w2")} == {90}


def test_the_target_is_of_the_thread_that_asks() -> None:
    """Two conversions at once for two GPUs, in one process."""
    humming()
    seen: dict[int, list[int]] = {75: [], 120: []}
    start = threading.Barrier(2)
    module = sys.modules["humming.transform"]

    def ask(sm_version: int) -> None:
        with target_facts(GpuTarget(sm_version)):
            start.wait()
            for _ in range(200):
                seen[sm_version].append(module.current_device.sm_version)  # type: ignore[attr-defined]
                seen[sm_version].append(module.DeviceInfo(-1).sm_major)  # type: ignore[attr-defined]

    threads = [threading.Thread(target=ask, args=(sm,)) for sm in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {sm: set(found) for sm, found in seen.items()} == {75: {75, 7}, 120: {120, 12}}


def test_a_form_is_of_its_target() -> None:
    schema = schema_of("int4")
    form = kernel_form(128, 256, kernel_spec_of(schema, "bfloat16", 90))
    assert (form.config["sm_version"], layer_config(form.config_json(1)).sm_version) == (90, 90)
    assert is_compatible(kernel_spec_of(schema, "bfloat16", 90))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outside_of_a_request_the_device_answers() -> None:
    humming()
    major, minor = torch.cuda.get_device_capability()
    found = sys.modules["humming.transform"].current_device.sm_version  # type: ignore[attr-defined]
    assert found == major * 10 + minor
