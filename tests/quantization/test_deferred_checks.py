"""Checks that are judged together: put down where asked, and what is wrong is said in the same words afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hqconv.conversion.encode import LayerEncoder
from hqconv.errors import InputError
from hqconv.quantization.coded_matrix import deferring_checks, is_any
from hqconv.sources.opening import open_source
from tests.make.conversions import run
from tests.make.formats import write


def test_a_check_inside_finds_nothing_and_is_put_down() -> None:
    bad, good = torch.tensor([False, True]), torch.tensor([False])
    assert is_any(bad)
    with deferring_checks() as doubts:
        assert doubts.all() is None
        assert not is_any(good)
        assert not is_any(bad)
    assert is_any(bad)
    found = doubts.all()
    assert found is not None
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("is_together", [False, True])
def test_a_bad_scale_is_refused_in_the_same_words(
    is_together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: decoded without a look, then again with one."""
    src = write(tmp_path / "src", "fp8-block").folder
    with open_source(str(src)) as checkpoint:
        name = sorted(name for name in checkpoint.tensors if name.endswith("scale_inv"))[3]
        ref = checkpoint.tensors[name]
        path = src / checkpoint.files[ref.file].name
    with path.open("r+b") as file:
        file.seek(ref.offset_bytes)
        file.write(np.float32(np.nan).tobytes() if ref.dtype == "F32" else b"\xff\x7f")
    careful = []
    real = LayerEncoder.encode

    def encode(*arguments: object, **options: object) -> object:
        careful.append(options["is_careful"])
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerEncoder, "encode", encode)
    if is_together:
        monkeypatch.setattr("hqconv.conversion.encode._ASYNCHRONOUS", ("cpu",))
    with pytest.raises(InputError, match="A scale is NaN or infinite") as caught:
        run(src, tmp_path / "out", "int4")
    assert name in caught.value.where
    assert any(careful) == is_together
