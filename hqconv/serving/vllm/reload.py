"""Live weights: vLLM's `reload_weights` with another artifact of the same shapes, all ranks or none.

vLLM 0.33 calls `reload_weights(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format)` of
model_loader/reload/inplace.py in each worker. It changes `model_config.model` to the path, takes every parameter
away, loads other layers by their names, and puts parameters back that were not loaded: the experts'. After an
error it restores nothing. `reload` below stands in its place, checks before it, fills the experts after it, and undoes
it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.layers.fused_moe import RoutedExperts

from hqconv.schemas import artifact_names as names
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import ArtifactView, open_artifact_view
from hqconv.serving.delta_on_base import DeltaOnBase, bytes_of, check_base, check_delta, is_delta
from hqconv.serving.other_artifact import (
    Replacement,
    check_replacement,
    half_replaced,
    not_on_base,
    not_replaced,
    other_rank_failed,
    wants_digests,
)
from hqconv.serving.vllm.refusals import moved_experts

logger = logging.getLogger("vllm.hqconv")
_INPLACE = "vllm.model_executor.model_loader.reload.inplace"
# Modules that import the function by its name.
_CALLERS = (_INPLACE, "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
Reload = Callable[..., None]


def take_over_reloads() -> None:
    """Put `reload` before vLLM's `reload_weights`, once, in all modules that have it; other models pass through."""
    found: Any = importlib.import_module(_INPLACE).reload_weights
    ours: Any = found if hasattr(found, "of_vllm") else functools.partial(reload, found)
    original = ours.of_vllm = getattr(found, "of_vllm", found)
    for name in _CALLERS:
        if getattr(sys.modules.get(name), "reload_weights", None) is original:
            sys.modules[name].reload_weights = ours  # type: ignore[attr-defined]


def reload(
    original: Reload,
    vllm_config: Any,
    model: torch.nn.Module,
    weights_iterator: Any = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
) -> None:
    """Load the weights of an artifact in place, in this and all other ranks, or leave all weights as they are.

    weights_path: folder or Hub repo of the artifact, or folder of a delta on what is served; None: the served weights
    again. Weights that come from
    `weights_iterator`, and models without experts of an artifact, are vLLM's own.

    Raises the errors of `open_artifact_view`, `check_replacement` and `check_delta` before a parameter is overwritten.
    Raises VerificationError if reading fails later: after the old weights were put back, or with the words that the
    server must not serve.
    """
    config = vllm_config.quant_config
    if weights_iterator is not None or getattr(config, "view", None) is None or not _reads_files(vllm_config):
        original(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format)
        return
    update = _Update(original, vllm_config, model, config, _methods(model), is_checkpoint_format)
    if weights_path is not None and is_delta(Path(weights_path)):
        _load_delta(update, Path(weights_path))
        return
    name = weights_path or config.view.location.name
    replacement, error = _tried(lambda: update.check(weights_path))
    _agree(name, error)
    assert replacement is not None
    before = update.state()
    update.adopt(replacement, before, weights_path)
    _, error = _tried(lambda: update.load(weights_path))
    if any(errors := _told(error)):
        _put_back(update, before, name, error, next(filter(None, errors)))
    logger.info("The weights are those of %s", name)


def _load_delta(update: _Update, root: Path) -> None:
    """Write a delta over the parameters of experts, on all ranks, or leave all as they are; vLLM loads nothing."""
    delta, error = _tried(lambda: update.check_delta(root))
    _agree(str(root), error)
    assert delta is not None
    write = update.config.loader.write_patches
    _, error = _tried(lambda: write(update.methods, delta.patches))
    if any(told := _told(error)):
        _, failure = _tried(lambda: update.take_off(delta))
        if any(failures := _told(failure)):
            raise half_replaced(str(root), next(filter(None, told)), next(filter(None, failures))) from error or failure
        raise not_replaced(str(root), next(filter(None, told))) from error
    update.config.deltas = [*update.config.deltas, delta]
    logger.info("The weights are those of %s with %s", update.config.view.location.name, root)


@dataclass(frozen=True)
class _State:
    """Artifact and vLLM's settings at one time. held: the `_HELD` of each method."""

    view: ArtifactView
    deltas: list[DeltaOnBase]
    settings: dict[str, Any]
    held: list[tuple[Any, ...]]


_SETTINGS = ("model", "model_weights", "revision")  # of vLLM's ModelConfig, which a reload changes
_SAMPLE_BYTES = 4096  # of each tensor, to see if the parameters are there: a deep sleep forgets them
_HELD = ("view", "stored", "file", "model")  # of a method


@dataclass(frozen=True)
class _Update:
    """One call of `reload`: its steps, each of which can be done again to undo."""

    original: Reload
    vllm_config: Any
    model: torch.nn.Module
    config: Any
    methods: Sequence[Any]  # none, where a pipeline rank has no experts
    is_checkpoint_format: bool

    def check(self, weights_path: str | None) -> Replacement:
        """Compare an artifact with the served one. Changes nothing. Raises RequestError also if experts move."""
        self._check_places()
        served = self.config.view
        location = served.location if weights_path is None else ArtifactLocation(weights_path)
        return self._checked(served, open_artifact_view(location))

    def check_delta(self, root: Path) -> DeltaOnBase:
        """Compare a delta with what is served, and the parameters with its base. Changes nothing."""
        self._check_places()
        served, deltas = self.config.view, self.config.deltas
        sha256 = deltas[-1].result if deltas else served.manifest_sha256
        held = [method.file for method in self.methods]
        found = check_delta(served, sha256, root, held, digests=wants_digests())
        check_base(served)
        for method in self.methods:
            patches = [delta.patches[method.file.name] for delta in deltas if method.file.name in delta.patches]
            for target in method.targets():
                size = min(target.ref.num_bytes, _SAMPLE_BYTES)
                sample = bytes(target.as_bytes()[:size].cpu().numpy())
                if sample != bytes_of(method.file, patches, target.ref.offset_bytes, size):
                    raise not_on_base(root, method.file.name)
        return found

    def take_off(self, delta: DeltaOnBase) -> None:
        """Undo `write_patches` of a delta: the base's bytes, and again those of the deltas before."""
        check_base(self.config.view)
        self.config.loader.write_patches(self.methods, delta.patches, undo=True)
        self._write_deltas()

    def _write_deltas(self) -> None:
        for delta in self.config.deltas:
            self.config.loader.write_patches(self.methods, delta.patches)

    def _check_places(self) -> None:
        """Raise RequestError if experts may be elsewhere than in their files."""
        for method in self.methods:
            if method.moe.moe_parallel_config.enable_eplb:
                raise moved_experts(method.view, method.stored.name)

    def check_again(self, before: _State) -> Replacement:
        """Check that the artifact of before is there as it was."""
        view = open_artifact_view(before.view.location)
        if view.manifest_sha256 != before.view.manifest_sha256:
            raise RuntimeError(f"{view.location.name} is another artifact meanwhile")
        return self._checked(before.view, view)

    def _checked(self, served: ArtifactView, view: ArtifactView) -> Replacement:
        held = [method.file for method in self.methods]
        cache_dir = self.vllm_config.load_config.download_dir
        return check_replacement(served, view, held, cache_dir=cache_dir, digests=wants_digests())

    def state(self) -> _State:
        """Return everything that `adopt` and vLLM change beside parameters."""
        settings = {key: getattr(self.vllm_config.model_config, key, None) for key in _SETTINGS}
        held = [tuple(getattr(method, key) for key in _HELD) for method in self.methods]
        return _State(self.config.view, self.config.deltas, settings, held)

    def adopt(self, replacement: Replacement, before: _State, weights_path: str | None) -> None:
        """Let the methods read another artifact's files from now on."""
        model = before.settings["model"] if weights_path is None else weights_path
        for method in self.methods:
            layer = replacement.view.layers[method.stored.name]
            method.view, method.stored, method.model = replacement.view, layer, str(model)
            method.file = replacement.files[layer.name]
        self._set_view(replacement.view)
        if weights_path is not None or replacement.view.manifest_sha256 != before.view.manifest_sha256:
            self.config.deltas = []

    def restore(self, before: _State) -> None:
        """Undo `adopt`, and what vLLM's function left half done: parameters on no device, a changed model name."""
        for method, held in zip(self.methods, before.held, strict=True):
            for key, value in zip(_HELD, held, strict=True):
                setattr(method, key, value)
        for key, value in before.settings.items():
            setattr(self.vllm_config.model_config, key, value)
        self._set_view(before.view)
        self.config.deltas = before.deltas
        _place_parameters(self.model)

    def load(self, weights_path: str | None) -> None:
        """Load other layers by vLLM's function, then the experts, all files in flight."""
        for method in self.methods:
            method.is_filled = False  # so that `_refill` is quiet
        folder = None if weights_path is None else self._folder()
        self.original(self.vllm_config, self.model, None, folder, self.is_checkpoint_format)
        if weights_path is not None:
            model_config = self.vllm_config.model_config
            model_config.model, model_config.revision = weights_path, self.config.view.location.commit
        self.config.loader.refill(self.methods)
        self._write_deltas()

    def _folder(self) -> str:
        """Folder of the artifact on this machine: of a repo's name vLLM would fetch the newest commit."""
        found = self.config.view.location.fetch_all([names.MANIFEST], self.vllm_config.load_config.download_dir)
        return str(found[names.MANIFEST].parent)

    def _set_view(self, view: ArtifactView) -> None:
        self.config.view = view
        self.config.loader.forget_paths()


def _put_back(update: _Update, before: _State, name: str, error: BaseException | None, told: str) -> None:
    """Load the old weights again after a failure on some rank, and raise the error that says how that went."""

    def again() -> None:
        update.restore(before)
        update.check_again(before)
        update.load(None)

    _, failure = _tried(again)
    for method in update.methods:
        method.is_filled = True  # so that a later reload tries again
    if any(failures := _told(failure)):
        raise half_replaced(name, told, next(filter(None, failures))) from error or failure
    raise not_replaced(name, told) from error


def _place_parameters(model: torch.nn.Module) -> None:
    """Give every layer back the parameters that vLLM's reload took away; it does so itself at its regular end."""
    layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def _methods(model: torch.nn.Module) -> list[Any]:
    """Methods of a model's layers of experts that were filled from an artifact."""
    found = [module.quant_method for module in model.modules() if isinstance(module, RoutedExperts)]
    return [method for method in found if hasattr(method, "stored") and method.is_filled]


def _reads_files(vllm_config: Any) -> bool:
    """Return whether vLLM can reload with this load format; with others it says so, and dummy weights stay dummies."""
    inplace: Any = importlib.import_module(_INPLACE)
    return hasattr(inplace.get_model_loader(vllm_config.load_config), "get_all_weights")


def _tried(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Result of a call, or its error: other ranks must be told before it is raised."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised, or told, by the caller
        return None, error


def _agree(name: str, error: Exception | None) -> None:
    """Raise a rank's own error, or that another rank has one."""
    errors = _told(error)
    if error is not None:
        raise error
    if any(errors):
        raise other_rank_failed(name, next(filter(None, errors)))


def _told(error: Exception | None) -> list[str]:
    """Tell all ranks of an error, "" for none; return what each rank told."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if not torch.distributed.is_initialized():
        return [text]
    group = get_world_group()
    found: list[Any] = [""] * group.world_size
    torch.distributed.all_gather_object(found, text, group=group.cpu_group)
    return found
