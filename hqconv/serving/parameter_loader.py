"""Fill the parameters of a process's layers from their rank files, all layers in one queue."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hqconv.artifact.rank_file import RankFile
from hqconv.artifact.tensor_filler import LoadTarget, TensorFiller, check_digests
from hqconv.serving.artifact_view import ArtifactView

VERIFY = "HQCONV_VERIFY"  # 1: hash every file first
# Module that offers kernels which were compiled beforehand, by one function: `install(artifact, sm_version, log)`. It
# has Humming in this process find those of a folder, and returns the folder's tuning tables.
KERNEL_STORE = "hqconv.warm.kernel_store"

logger = logging.getLogger("hqconv.serving")


class Filled(Hashable, Protocol):
    """Layer that takes its parameters from a rank file."""

    file: RankFile
    is_filled: bool

    def targets(self) -> list[LoadTarget]:
        """Current parameters, with their positions in the file."""


class ParameterLoader:
    """Fill layers in the order of their creation, files of later layers while an earlier layer is waited for."""

    def __init__(self, log: logging.Logger = logger) -> None:
        self._log = log  # the engine's, for its handlers to print
        self.claimed: dict[str, str] = {}  # name of an artifact's layer → prefix of vLLM's layer
        self._layers: list[Filled] = []
        self._fillings: list[TensorFiller] = []
        self._paths: dict[str, Path] = {}
        self._tuning: Mapping[str, Any] | None = None

    def add(self, layer: Filled) -> None:
        """Add a layer whose parameters exist.

        It takes the place of an earlier layer of the same file: a server that builds its model a second time, after
        its weight cache failed, must not have the first one's tensors filled, which may be another process's memory.
        """
        self._layers = [known for known in self._layers if known.file.name != layer.file.name]
        self._layers.append(layer)

    def path(self, view: ArtifactView, name: str, *, alone: bool, cache_dir: str | None) -> Path:
        """Path of a rank file on this machine; from the Hub all files of its rank are downloaded, or it `alone`.

        cache_dir: the server's folder for downloads, which gets the artifact's small files, too.
        Raises the errors of `ArtifactLocation.fetch`.
        """
        if name not in self._paths:
            paths = [name]
            if not view.location.is_folder:
                if cache_dir is not None and not self._paths:
                    view.location.complete(view.small_files, cache_dir)
                if not alone:
                    folder = name.rpartition("/")[0] + "/"
                    paths = [path for path in view.files if path.startswith(folder)]
            self._paths.update(view.location.fetch_all(paths, cache_dir))
        return self._paths[name]

    def fill(self, layer: Filled) -> None:
        """Return when a layer's parameters are full. Raises VerificationError for a file that is damaged."""
        filling = next((filling for filling in self._fillings if layer in filling), None)
        if filling is None:
            due = self._due(layer)
            if os.environ.get(VERIFY) == "1":
                check_digests(file for _, file, _ in due)
            filling = TensorFiller(due)
            self._fillings.append(filling)
        try:
            filling.wait(layer)
        except BaseException:
            self._fillings.remove(filling)  # its other layers are given up, too
            raise
        layer.is_filled = True
        if filling.is_done:
            self._fillings.remove(filling)
            gigabytes = filling.num_bytes / 1e9
            seconds = filling.ended_s - filling.begun_s
            rate = gigabytes / max(seconds, 1e-9)
            self._log.info("Experts: %.3f GB in %.3f s (%.1f GB/s)", gigabytes, seconds, rate)
            # Full tensors belong to the model alone: no reference here keeps them alive.
            self._layers = [waiting for waiting in self._layers if not waiting.is_filled]

    def _due(self, first: Filled) -> list[tuple[Filled, RankFile, Sequence[LoadTarget]]]:
        """A layer, and later layers that can be filled with it: on the same device, with parameters that stay there."""
        targets = first.targets()
        device = targets[0].tensor.device
        due: list[tuple[Filled, RankFile, Sequence[LoadTarget]]] = [(first, first.file, targets)]
        for layer in self._layers:
            is_begun = any(layer in filling for filling in self._fillings)
            if layer is first or layer.is_filled or is_begun:
                continue
            targets = layer.targets()
            if all(target.tensor.device == device for target in targets):
                due.append((layer, layer.file, targets))
        return due

    def install_kernels(self, view: ArtifactView) -> Mapping[str, Any]:
        """Let Humming find kernels that were compiled beforehand, once in a process; return their tuning tables."""
        if self._tuning is None:
            folder = Path(view.location.name) if view.location.is_folder else None
            store: Any = importlib.import_module(KERNEL_STORE)
            self._tuning = store.install(folder, view.sm_version, self._log)
        return self._tuning
