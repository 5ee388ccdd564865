"""Which pairs scripts/check_kernels.py runs, and the table that it writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hqconv
from scripts import check_kernels
from scripts.shared import SCHEMAS


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("hopper")
def test_every_pair_of_the_target_is_run() -> None:
    kinds = check_kernels.pairs("quantized", ",".join(SCHEMAS), "bfloat16,float16")
    names = {(kind.inputs.name, kind.schema.name, kind.param_dtype) for kind in kinds}
    assert {inputs for inputs, _, _ in names} == {"fp8", "fp8-g128", "fp8-e5m2", "int8"}
    assert ("fp8-g128", "mxfp4", "float16") in names
    assert ("int8", "int4", "bfloat16") in names
    assert not [name for name in names if name[0] == "fp8-e5m2" and name[2] == "float16"]
    assert len(check_kernels.pairs("a16", ",".join(SCHEMAS), "bfloat16")) == len(SCHEMAS)


@pytest.mark.usefixtures("hopper")
def test_a_row_has_the_worst_of_all_grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    figures = [{"kernel": 0.04, "channel": 0.06, "rounded_kernel": 0.005}, {"kernel": 0.045, "channel": 0.05}, {}]

    def verify(*_: object, **__: object) -> SimpleNamespace:
        result = SimpleNamespace(name="kernel", findings=[], measured={"block": figures[len(asked) - 1]})
        return SimpleNamespace(results=[result], passed=len(asked) == 1)

    monkeypatch.setattr(hqconv, "convert", lambda *_, **words: asked.append(words))
    monkeypatch.setattr(hqconv, "verify", verify)
    [kind] = check_kernels.pairs("fp8", "mxfp4", "bfloat16")
    row, passed = check_kernels.check(tmp_path, tmp_path, kind)
    assert row == "| fp8 | mxfp4 | bfloat16 | 0.0050 | - | 0.0450 | 0.0600 | - | FAIL |"
    assert row.count("|") == check_kernels.HEAD.splitlines()[0].count("|")
    assert not passed
    assert {words["input_schema"].name for words in asked} == {"fp8"}
    assert [words.get("tp_split") for words in asked] == [None, None, "groups"]
