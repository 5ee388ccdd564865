"""A conversion that no family's test reaches: nothing to copy but empty tensors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.conversion.output_folder import UnitWriter
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe


def test_a_shard_of_nothing_but_empty_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are finished although nothing is ever written to them, and not before they are made."""

    class Slow(UnitWriter):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.2)
            super().__init__(*arguments)

    monkeypatch.setattr("hqconv.conversion.executor.UnitWriter", Slow)
    src = write_qwen3_moe(tmp_path / "src", num_layers=1)
    tensors = {
        name: tensor
        for name, tensor in load_file(src / "model.safetensors").items()
        if ".experts." in name
    }
    save_file(
        {**tensors, "nothing": torch.empty(0), "no.rows": torch.empty(0, 7)},
        src / "model.safetensors",
    )
    run(src, tmp_path / "out", "mxfp4")
    found = load_file(tmp_path / "out/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "nothing": (0,),
        "no.rows": (0, 7),
    }
