"""Fill the parameters of a process's layers from their rank files, all layers in one queue."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hqconv.artifact.rank_file import RankFile, check_sha256
from hqconv.artifact.tensor_filler import LoadTarget, TensorFiller, prepare_buffers
from hqconv.errors import RequestError
from hqconv.io.file_access import READS, Reads
from hqconv.serving.artifact_view import ArtifactView
from hqconv.serving.warm.kernel_store import use_warm_kernels

VERIFY = "HQCONV_VERIFY"  # 1: hash every file first
READ = "HQCONV_READ"  # auto, cached: through the page cache, direct: past it

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
        self.tuning: dict[str, Any] = {}  # tables of `hqconv warm`
        self._layers: list[Filled] = []
        self._fillings: list[TensorFiller] = []
        self._paths: dict[str, Path] = {}
        self._has_kernels = False

    def add(self, layer: Filled) -> None:
        """Add a layer whose parameters exist; buffers for their GPU are created during the model's creation.

        It takes the place of an earlier layer of the same file: a server that builds its model a second time, after
        its weight cache failed, must not have the first one's tensors filled, which may be another process's memory.
        """
        self._layers = [one for one in self._layers if one.file.name != layer.file.name]
        self._layers.append(layer)
        device = layer.targets()[0].tensor.device
        if device.type == "cuda":
            prepare_buffers(device)

    def path(self, view: ArtifactView, name: str, *, alone: bool, cache_dir: str | None) -> Path:
        """Path of a rank file on this machine; from the Hub all files of its rank are downloaded, or it `alone`.

        cache_dir: the server's folder for downloads, which gets the artifact's small files, too.
        Raises the errors of `ArtifactLocation.fetch`.
        """
        if name not in self._paths:
            if cache_dir is not None and not self._paths and not view.location.is_folder:
                view.location.complete(view.small_files, cache_dir)
            folder = name.rpartition("/")[0] + "/"
            others = (
                []
                if alone or view.location.is_folder
                else [n for n in view.files if n.startswith(folder)]
            )
            self._paths.update(view.location.fetch_all(others or [name], cache_dir))
        return self._paths[name]

    def fill(self, layer: Filled) -> None:
        """Return when a layer's parameters are full.

        Raises VerificationError for a file that is damaged, RequestError for an unknown value of HQCONV_READ.
        """
        filling = next((one for one in self._fillings if layer in one), None)
        if filling is None:
            check = check_sha256 if os.environ.get(VERIFY) == "1" else None
            filling = TensorFiller(self._due(layer), check=check, reads=_reads())
            self._fillings.append(filling)
        try:
            filling.wait(layer)
        except BaseException:
            self._fillings.remove(filling)  # its other layers are given up, too
            raise
        layer.is_filled = True
        if filling.is_done:
            self._log_rate(filling)
            self._fillings.remove(filling)
            # Full tensors belong to the model alone: no reference here keeps them alive.
            self._layers = [one for one in self._layers if not one.is_filled]

    def take_kernels(self, view: ArtifactView) -> None:
        """Let Humming find the kernels of `hqconv warm`, once in a process; see `use_warm_kernels`."""
        if self._has_kernels:
            return
        self._has_kernels = True
        found = use_warm_kernels(
            Path(view.location.name) if view.location.is_folder else None, view.sm_version
        )
        self.tuning = dict(found.tuning)
        if found.reason is None:
            self._log.info("Kernels that were compiled beforehand are in use")
        else:
            self._log.log(found.level, "Kernels are compiled as they are needed: %s", found.reason)

    def _log_rate(self, filling: TensorFiller) -> None:
        num_bytes, seconds = filling.num_bytes, filling.ended_s - filling.begun_s
        rate = num_bytes / 1e9 / max(seconds, 1e-9)
        self._log.info("Experts: %.3f GB in %.3f s (%.1f GB/s)", num_bytes / 1e9, seconds, rate)

    def _due(self, first: Filled) -> list[tuple[Filled, RankFile, Sequence[LoadTarget]]]:
        """A layer, and later layers that can be filled with it: on the same device, with parameters that stay there."""
        due: list[tuple[Filled, RankFile, Sequence[LoadTarget]]] = [
            (first, first.file, first.targets())
        ]
        device = due[0][2][0].tensor.device
        for layer in self._layers:
            targets = layer.targets()
            if layer is first or layer.is_filled or any(layer in one for one in self._fillings):
                continue
            if all(target.tensor.device == device for target in targets):
                due.append((layer, layer.file, targets))
        return due


def _reads() -> Reads:
    value = os.environ.get(READ) or "auto"
    if value not in READS:
        what, remedy = f"The environment variable {READ} has an unknown value.", f"Unset {READ}."
        raise RequestError(
            what, where=READ, expected=" or ".join(READS), found=value, remedy=remedy
        )
    return value
