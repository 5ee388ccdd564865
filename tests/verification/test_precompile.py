"""The kernel check on a GPU of the target beside a CUDA compiler by which Humming lays weights out otherwise."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.kernel_layout.runtime import humming
from hqconv.schemas.recipe import load_recipe
from hqconv.verification import verify as module
from hqconv.verification.result import CheckResult, VerificationReport
from hqconv.verification.verify import _kernel_device
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

DEVICE = torch.device("cuda", 0)


def machine(monkeypatch: pytest.MonkeyPatch, sm_version: int, cuda: str) -> None:
    """What torch and Humming find: a GPU, and a compiler, or none of it for a text that is no version."""
    humming()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(sm_version, 10))
    compiler = type("Compiler", (), {"signature": staticmethod(lambda: f"nvrtc+{cuda}")})
    runtime = importlib.import_module("humming.jit.runtime").KernelRuntime
    monkeypatch.setattr(runtime, "_get_compiler", lambda: compiler)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("compiler") / "model")


# Artifact's target, compiler, schema and dtype; compilers with the same layout, and with another.
CASES = [
    (89, "12.8", "fp8", "float16", ("11.8", "13.0"), "11.7"),
    (89, "11.7", "fp8", "float16", ("11.5",), "12.8"),
    (100, "12.8", "mxfp4", "bfloat16", ("12.6", "13.1"), "13.2"),
    (120, "13.2", "fp8", "bfloat16", ("14.0",), "13.0"),
    (100, "12.7", "fp6-e3m2", "float16", ("13.2",), "12.6"),
]


def name_of(case: object) -> str:
    return " ".join(map(str, case)) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_only_a_compiler_of_the_same_layout_is_good(
    case: tuple[int, str, str, str, tuple[str, ...], str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm_version, cuda, schema, dtype, alike, other = case
    run(model, tmp_path / "out", schema, target=f"sm{sm_version}", cuda=cuda, dtype=dtype)
    with Artifact(tmp_path / "out") as artifact:
        for version in (cuda, *alike):
            machine(monkeypatch, sm_version, version)
            assert _kernel_device(artifact, DEVICE) == (DEVICE, "")
        machine(monkeypatch, sm_version, other)
        device, why = _kernel_device(artifact, DEVICE)
        assert device is None
        for word in (f"sm{sm_version}, CUDA {cuda}", f"CUDA {other} here", "use_native_dequant"):
            assert word in why


def test_of_mixed_layers_one_is_enough(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text('[[override]]\nlayers = "-1"\nschema = "fp8"\n')
    overrides = load_recipe(tmp_path / "recipe.toml").overrides
    run(model, tmp_path / "out", "int4", target="sm89", cuda="12.8", dtype="float16", overrides=overrides)
    with Artifact(tmp_path / "out") as artifact:
        machine(monkeypatch, 89, "12.0")
        assert _kernel_device(artifact, DEVICE) == (DEVICE, "")
        machine(monkeypatch, 89, "11.0")
        assert _kernel_device(artifact, DEVICE)[0] is None


def test_where_nothing_depends_on_it_no_compiler_is_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "out", "int4", target="sm89")
    run(model, tmp_path / "fp8", "fp8", target="sm89", dtype="float16", cuda="12.8")
    machine(monkeypatch, 89, "none")
    with Artifact(tmp_path / "out") as artifact:
        assert _kernel_device(artifact, DEVICE) == (DEVICE, "")
    with Artifact(tmp_path / "fp8") as artifact:
        device, why = _kernel_device(artifact, DEVICE)
        assert device is None
        assert "finds none here" in why


def test_it_is_skipped_and_asked_for_by_name_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> CheckResult:
        raise AssertionError("the kernel was run")

    run(model, tmp_path / "out", "fp8", target="sm89", dtype="float16", cuda="12.8")
    monkeypatch.setattr(module, "check_kernel", none)
    monkeypatch.setattr(module, "_weights_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine(monkeypatch, 89, "11.2")

    def verify(*checks: str) -> VerificationReport:
        return hqconv.verify(tmp_path / "out", checks=checks or None)

    report = verify()
    assert [result.status for result in report.results] == ["pass", "pass", "skipped"]
    assert "CUDA 11.2 here" in report.results[2].skipped
    assert report.passed
    with pytest.raises(RequestError, match=r"cannot run here(.|\n)*CUDA 11\.2 here") as caught:
        verify("kernel")
    assert caught.value.exit_code == 2
