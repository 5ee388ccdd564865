"""What a server's log says of a vLLM that hqconv was not tested with."""

from __future__ import annotations

import logging
import sys
import tomllib

import pytest

from hqconv.errors import RequestError
from hqconv.serving.vllm import plugin, translation
from tests.make.places import REPO


@pytest.mark.parametrize(
    ("found", "is_tested"),
    [("0.33.0", True), ("0.33.1rc2.dev3+g1234567", True), ("0.32.9", False), ("0.330.0", False)],
)
def test_a_warning_names_versions_that_were_not_tested(
    found: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(translation, "version", {"vllm": found}.__getitem__)
    monkeypatch.setattr(translation.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, translation.logger.name):
        translation.warn_of_untested()
    assert (f"this is {found}." in caplog.text) != is_tested


def test_the_tested_versions_are_those_that_pyproject_asks_for() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"][0].startswith(f"vllm>={translation.TESTED},<")


@pytest.mark.vllm
def test_a_vllm_that_lacks_something_refuses_artifacts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")
    from tests.make import vllm_cpu  # isort: skip  # noqa: F401  - before vLLM
    from vllm.model_executor.layers.quantization import get_quantization_config

    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe", None)
    monkeypatch.delitem(sys.modules, "hqconv.serving.vllm.config", raising=False)
    plugin.register()
    try:
        with pytest.raises(RequestError, match=r"found: .*vllm\.model_executor\.layers\.fused_moe"):
            get_quantization_config("hqconv").from_config({})
    finally:
        monkeypatch.undo()
        plugin.register()
