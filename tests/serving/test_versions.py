"""What a server's log says of a vLLM that hqconv was not tested with."""

from __future__ import annotations

import ast
import logging
import tomllib

import pytest

from hqconv.errors import RequestError
from hqconv.serving.vllm import needs, plugin, refusals
from tests.make.places import REPO


@pytest.mark.parametrize(
    ("found", "is_told"),
    [
        ("0.33.0", False),
        ("0.33.2+cu130", False),
        ("0.33.1rc2.dev3+g1234567", False),
        ("0.32.9", True),
        ("0.34.0", True),
        ("0.34.0rc1", True),
        ("1.33.0", True),
        ("dev", True),
    ],
)
def test_other_versions_than_the_tested_are_told_of(
    found: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "version", {"vllm": found}.__getitem__)
    monkeypatch.setattr(refusals.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, refusals.logger.name):
        refusals.warn_of_untested()
    assert [f"this is {found}." in record.getMessage() for record in caplog.records] == [
        True
    ] * is_told


def test_the_tested_versions_are_those_that_pyproject_asks_for() -> None:
    words = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["vllm"]
    least, below = (".".join(map(str, numbers)) for numbers in refusals.TESTED)
    assert words == [f"vllm>={least},<{below}"]


def test_what_is_missing_is_named() -> None:
    """Every module without its first name, and every module gone."""
    whole = {module: " ".join(names) for module, names in needs.NEEDS.items()}
    assert not [*needs.missing(whole.get)]
    assert [*needs.missing(lambda module: None)] == [*needs.NEEDS]
    for module, names in needs.NEEDS.items():
        less = {**whole, module: " ".join(name for name in names[1:] if names[0] not in name)}
        assert f"{module}: {names[0]}" in [*needs.missing(less.get)]
        longer = {**whole, module: whole[module].replace(names[0], f"{names[0]}_2")}
        assert f"{module}: {names[0]}" in [*needs.missing(longer.get)]


def test_all_that_the_plugin_imports_is_looked_for() -> None:
    imported = {
        f"{node.module}: {alias.name}"
        for path in (REPO / "hqconv/serving/vllm").glob("*.py")
        if path.stem not in ("no_gpu", "stock_kernels")  # which serve nothing
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    listed = {f"{module}: {name}" for module, names in needs.NEEDS.items() for name in names}
    renamed = {"vllm.platforms: current_platform", "vllm.utils: humming"}
    assert (
        not {entry.replace(".humming: ", ".humming.moe: ") for entry in imported - renamed - listed}
        - listed
    )


@pytest.mark.vllm
def test_this_vllm_has_all_of_it() -> None:
    pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")
    assert not [*needs.missing()]


@pytest.mark.vllm
def test_a_vllm_that_lacks_something_refuses_artifacts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")
    from tests.make import vllm_cpu  # isort: skip  # noqa: F401  - before vLLM
    from vllm.model_executor.layers.quantization import get_quantization_config

    monkeypatch.setattr(
        plugin, "missing", lambda: ["vllm.utils.humming: get_heuristics_config", "vllm.gone"]
    )
    plugin.register()
    try:
        with pytest.raises(
            RequestError,
            match=r"expected: vllm\.utils\.humming: get_heuristics_config\n  found: no such name, and 1 more",
        ):
            get_quantization_config("hqconv").from_config({})
    finally:
        monkeypatch.undo()
        plugin.register()
