"""One process's share of loading: the layers it has made, in order, and their files on the way into them."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hqconv.serving.filling import Buffers, Filling, Target
from hqconv.serving.kernels import (
    VARIABLE,
    folder_beside,
    kernels_folder,
    tuning_tables,
    use_warm_kernels,
)
from hqconv.serving.rank_file import RankFile
from hqconv.serving.served import Served

VERIFY = "HQCONV_VERIFY"  # 1: hash every file first

logger = logging.getLogger("vllm.hqconv")


class Filled(Hashable, Protocol):
    """A layer that takes its parameters from a rank file."""

    file: RankFile
    is_filled: bool

    def targets(self) -> list[Target]:
        """Its parameters as they are now, with their places in the file."""


class Loader:
    """Fills layers in the order in which they were made, files of later ones while an earlier one is waited for."""

    def __init__(self) -> None:
        self.claimed: dict[str, str] = {}  # block → the layer that it is for
        self.tuning: dict[str, Any] = {}  # tables of `hqconv warm`
        self._layers: list[Filled] = []
        self._filling: Filling | None = None
        self._buffers: Buffers | None = None
        self._paths: dict[str, Path] = {}
        self._has_kernels = False

    def add(self, layer: Filled) -> None:
        """Note a layer whose parameters exist; buffers for their GPU are made while the model is."""
        self._layers.append(layer)
        device = layer.targets()[0].tensor.device
        if self._buffers is None and device.type == "cuda":
            self._buffers = Buffers(device)

    def path(self, served: Served, name: str, *, alone: bool, cache_dir: str | None) -> Path:
        """Where a rank file lies on this machine; from the Hub all files of its rank come at once, or it `alone`.

        Raises as `Place.fetch`.
        """
        if name not in self._paths:
            folder = name.rpartition("/")[0] + "/"
            others = (
                [] if alone or served.place.is_folder else [n for n in served.files if n.startswith(folder)]
            )
            self._paths.update(served.place.fetch_all(others or [name], cache_dir))
        return self._paths[name]

    def fill(self, layer: Filled) -> None:
        """Return when a layer's parameters are full. Raises VerificationError for a file that is damaged."""
        if self._filling is None or layer not in self._filling:
            digests = os.environ.get(VERIFY) == "1"
            self._filling = Filling(self._due(layer), digests=digests, buffers=self._buffers)
        self._filling.wait(layer)
        layer.is_filled = True
        if self._filling.is_done:
            num_bytes, seconds = self._filling.num_bytes, self._filling.ended_s - self._filling.begun_s
            rate = num_bytes / 1e9 / max(seconds, 1e-9)
            logger.info("Experts: %.3f GB in %.3f s (%.1f GB/s)", num_bytes / 1e9, seconds, rate)
            self._filling = self._buffers = None
            # What is full is the model's alone: nothing here keeps it when the model goes.
            self._layers = [one for one in self._layers if not one.is_filled]

    def take_kernels(self, served: Served) -> None:
        """Once in a process: have Humming find what `hqconv warm` compiled, where the environment asks for it."""
        if self._has_kernels or not os.environ.get(VARIABLE):
            return
        self._has_kernels = True
        artifact = Path(served.place.name)
        folder = kernels_folder(artifact)
        if folder == folder_beside(artifact) and not served.place.is_folder:
            reason: str | None = f"{VARIABLE} must name a folder: there is none beside a model on the Hub."
        else:
            reason = use_warm_kernels(folder, served.sm_version)
        if reason:
            logger.warning("Kernels are compiled as they are needed: %s", reason)
        else:
            self.tuning = tuning_tables(folder)
            logger.info("Kernels that were compiled beforehand are in use")

    def _due(self, first: Filled) -> list[tuple[Filled, RankFile, Sequence[Target]]]:
        """A layer, and those after it that can be filled beside: on the same device, where nothing will move them."""
        due: list[tuple[Filled, RankFile, Sequence[Target]]] = [(first, first.file, first.targets())]
        device = due[0][2][0].tensor.device
        for layer in self._layers:
            targets = layer.targets()
            if layer is not first and not layer.is_filled and all(t.tensor.device == device for t in targets):
                due.append((layer, layer.file, targets))
        return due
