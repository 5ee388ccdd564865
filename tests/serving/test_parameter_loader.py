"""A process's layers are filled from their files in the background, in the order in which they were made."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hqconv.artifact import tensor_filler
from hqconv.artifact.tensor_filler import LoadTarget
from hqconv.errors import VerificationError
from hqconv.io import file_access
from hqconv.schemas.grid import Grid
from hqconv.serving import parameter_loader as loading
from hqconv.serving.artifact_view import (
    ArtifactLocation,
    ArtifactView,
    open_artifact_view,
    open_rank_file,
)
from hqconv.serving.parameter_loader import VERIFY, ParameterLoader
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe


@pytest.fixture
def view(tmp_path: Path) -> ArtifactView:
    source = write_qwen3_moe(tmp_path / "original", num_layers=3, intermediate_size=256)
    run(source, tmp_path / "out", "mxfp4", Grid())
    return open_artifact_view(ArtifactLocation(str(tmp_path / "out")))


class Layer:
    """As a layer of vLLM's."""

    def __init__(
        self, loader: ParameterLoader, view: ArtifactView, number: int, device: str = "cpu"
    ) -> None:
        layer = f"model.layers.{number}.mlp.experts"
        name = f"experts/tp0-ep0/{layer}.safetensors"
        path = loader.path(view, name, alone=False, cache_dir=None)
        self.file = open_rank_file(view, layer, 0, 0, path)
        self.is_filled = False
        self.tensors = {
            key: torch.zeros(ref.num_bytes, dtype=torch.uint8, device=device)
            for key, ref in self.file.tensors.items()
        }
        loader.add(self)

    def targets(self) -> list[LoadTarget]:
        return [LoadTarget(ref, self.tensors[key]) for key, ref in self.file.tensors.items()]

    @property
    def is_right(self) -> bool:
        data = self.file.path.read_bytes()
        return all(
            bytes(t.tensor.cpu().numpy())
            == data[t.ref.offset_bytes : t.ref.offset_bytes + t.ref.num_bytes]
            for t in self.targets()
        )


def test_layers_are_full_when_asked_for_and_said_to_be(
    view: ArtifactView, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.logger, "propagate", True)
    loader = ParameterLoader()
    layers = [Layer(loader, view, number) for number in range(3)]
    with caplog.at_level(logging.INFO, loading.logger.name):
        for number in (2, 0, 1):
            loader.fill(layers[number])
            assert layers[number].is_filled
            assert layers[number].is_right
    (record,) = caplog.records  # once for all
    total = sum(ref.num_bytes for layer in layers for ref in layer.file.tensors.values())
    assert record.getMessage().startswith(f"Experts: {total / 1e9:.3f} GB in ")


def test_layers_that_are_made_or_asked_for_later_are_filled_too(view: ArtifactView) -> None:
    """vLLM may load a draft after the model, and a model again in place."""
    loader = ParameterLoader()
    first = Layer(loader, view, 0)
    loader.fill(first)
    later = [Layer(loader, view, number) for number in (1, 2)]
    loader.fill(later[0])
    for tensor in first.tensors.values():
        tensor.zero_()
    assert not first.is_right
    loader.fill(first)
    loader.fill(later[1])
    assert all(layer.is_right for layer in (first, *later))


@pytest.mark.parametrize(("value", "is_checked"), [("0", False), ("1", True)])
def test_all_files_are_hashed_first_where_the_environment_asks(
    view: ArtifactView, monkeypatch: pytest.MonkeyPatch, value: str, is_checked: bool
) -> None:
    loader = ParameterLoader()
    layers = [Layer(loader, view, number) for number in range(2)]
    data = bytearray(layers[1].file.path.read_bytes())
    data[-1] ^= 1
    layers[1].file.path.write_bytes(data)
    monkeypatch.setenv(VERIFY, value)
    if is_checked:
        with pytest.raises(VerificationError, match=layers[1].file.name):
            loader.fill(layers[0])
        assert not any(tensor.any() for tensor in layers[0].tensors.values())
    else:
        loader.fill(layers[0])
        assert layers[0].is_right
    assert layers[0].is_filled != is_checked


def test_a_file_that_was_cut_off_since_fails_its_own_layer(view: ArtifactView) -> None:
    loader = ParameterLoader()
    layers = [Layer(loader, view, number) for number in range(2)]
    path = layers[1].file.path
    path.write_bytes(path.read_bytes()[:-1])
    loader.fill(layers[0])
    with pytest.raises(VerificationError, match=f"cut off(.|\n)*{layers[1].file.name}"):
        loader.fill(layers[1])
    assert (layers[0].is_right, layers[1].is_filled) == (True, False)


def test_a_layer_elsewhere_does_not_begin_the_others_again(
    view: ArtifactView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may have layers on several devices: each byte is read once."""
    loader, total = ParameterLoader(), 0
    layers = [Layer(loader, view, number) for number in range(3)]
    layers[1].tensors = {key: tensor.to("meta") for key, tensor in layers[1].tensors.items()}

    def counting(descriptor: int, views: list[memoryview], begin: int) -> int:
        nonlocal total
        total += sum(map(len, views))
        return file_access.fill(descriptor, views, begin)

    monkeypatch.setattr(tensor_filler, "fill", counting)
    loader.fill(layers[0])
    layers[1].tensors = {
        key: torch.zeros(t.shape, dtype=torch.uint8) for key, t in layers[1].tensors.items()
    }
    for layer in layers[1:]:
        loader.fill(layer)
    assert all(layer.is_right for layer in layers)
    assert total == sum(ref.num_bytes for layer in layers for ref in layer.file.tensors.values())


def test_kernels_are_installed_once(view: ArtifactView, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path | None, int]] = []

    def install(artifact: Path | None, sm_version: int, log: logging.Logger) -> dict[str, Any]:
        asked.append((artifact, sm_version))
        return {"a": []}

    monkeypatch.setattr(f"{loading.KERNEL_STORE}.install", install)
    loader = ParameterLoader()
    assert loader.install_kernels(view) == loader.install_kernels(view) == {"a": []}
    ParameterLoader().install_kernels(replace(view, location=ArtifactLocation("org/model")))
    # a folder below the server's own, named like the repo, is not beside the artifact
    assert asked == [(Path(view.location.name), 90), (None, 90)]
