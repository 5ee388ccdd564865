"""Gradients of a model's loss by the outputs of its experts: how much each direction of an output matters.

The loss of a token is -log p of a label that is sampled from the model's own distribution. So Σ g gᵀ over tokens
estimates the Fisher information: an error e of a layer's output changes the divergence by about eᵀ (Σ g gᵀ) e / 2.

Passes go forwards through the model, one stage at a time, and the inputs of the stages are kept. Then each stage runs
again on its inputs, from the last to the first, and hands the gradient by its input to the stage before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hqconv.calibration.gptq import OutputGradients
from hqconv.calibration.streamed_model import ForwardPass, ModuleCall, Stream, StreamedModel

_LOG = logging.getLogger(__name__)


def output_gradients(
    model: StreamedModel, batches: Sequence[torch.Tensor], layers: Collection[int]
) -> dict[int, OutputGradients]:
    """Return the products of gradients by the outputs of some layers' experts, [H, H] on the model's device.

    batches: token ids [B, T] of each pass. The dict is empty where the model cannot be differentiated, which is logged.
    """
    stream = Stream(model, batches)
    try:
        # Faster kernels of attention add gradients in an order that changes from run to run.
        with sdpa_kernel(SDPBackend.MATH):
            products = _Reverse(model, stream, layers).run()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - of the model's code behind its layers, which nothing else runs
        _LOG.warning("Errors of outputs count alike in all directions: no gradients (%s).", error)
        return {}
    finally:
        stream.stop()
        for stage in model.stages:  # a run that failed has some loaded
            model.drop(stage)
    finite = {layer: sums for layer, sums in products.items() if bool(sums.isfinite().all())}
    return {layer: OutputGradients(sums) for layer, sums in finite.items()}


class _Reverse:
    """A run forwards through the stages of a stream, and back as far as some layers."""

    def __init__(self, model: StreamedModel, stream: Stream, layers: Collection[int]) -> None:
        self._model, self._stream, self._layers = model, stream, layers
        self._products: dict[int, torch.Tensor] = {}
        paths = {layer: path for layer, (path, _) in model.experts.items()}
        self._stages = {layer: model.stage_of_module(path) for layer, path in paths.items()}

    def run(self) -> dict[int, torch.Tensor]:
        """Return Σ g gᵀ of each layer, float32 [H, H]. Raises RuntimeError where there is no gradient."""
        calls = self._forwards()
        gradients = self._last_gradients()
        for stage, of_stage in reversed(calls.items()):
            gradients = self._before(stage, of_stage, gradients)
        return self._products

    def _forwards(self) -> dict[str, list[ModuleCall]]:
        """Run to the end of the last stage with experts; return the calls from the first wanted stage on."""
        wanted = {self._stages[layer] for layer in self._layers}
        remaining = {*self._stages.values()}
        calls: dict[str, list[ModuleCall]] = {}
        while remaining:
            stage = self._stream.stage
            remaining.discard(stage)
            if calls or stage in wanted:
                calls[stage] = self._stream.calls()
            self._model.load(stage)
            outputs = self._stream.advance(_hidden)
            self._model.drop(stage)
            following = self._stream.calls()
            pairs = zip(outputs, following, strict=True)
            if calls and any(call.hidden is not output for output, call in pairs):
                raise RuntimeError(f"{stage} does not give the input of {following[0].name}")
        return calls

    def _last_gradients(self) -> list[torch.Tensor]:
        """Run each pass to its end; return the gradients by the output of the last stage with experts."""
        gradients, loaded = list[torch.Tensor](), set[str]()
        generator = torch.Generator(self._model.device).manual_seed(0)
        for forward_pass in self._stream.passes:
            assert forward_pass.call is not None
            hidden = forward_pass.call.hidden.detach().requires_grad_()
            forward_pass.call = forward_pass.call.with_hidden(hidden)
            logits = self._logits(forward_pass, loaded).flatten(0, -2).float()
            if not bool(logits.isfinite().all()):
                raise RuntimeError("the logits are not finite")
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            loss = nn.functional.cross_entropy(logits, labels[:, 0], reduction="sum")
            gradients += torch.autograd.grad(loss, hidden)
        for stage in loaded:
            self._model.drop(stage)
        return gradients

    def _logits(self, forward_pass: ForwardPass, loaded: set[str]) -> torch.Tensor:
        """Run a pass to its end. loaded: stages that are, and stay so."""
        while (call := forward_pass.call) is not None:
            if call.name not in loaded:
                self._model.load(call.name)
                loaded.add(call.name)
            forward_pass.resume(call.run())
        logits: torch.Tensor = forward_pass.output
        forward_pass.output = None
        return logits

    def _before(
        self, stage: str, calls: Sequence[ModuleCall], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients by a stage's inputs, and sum the products of those by its experts' outputs."""
        found = list[torch.Tensor]()
        self._model.load(stage)
        with self._watched(stage):
            for call, gradient in zip(calls, gradients, strict=True):
                hidden = call.hidden.detach().requires_grad_()
                output = _hidden(call.with_hidden(hidden).run())
                found += torch.autograd.grad(output, hidden, gradient)
        self._model.drop(stage)
        return found

    @contextmanager
    def _watched(self, stage: str) -> Iterator[None]:
        hooks = [
            self._model.experts[layer][1].register_forward_hook(partial(self._watch, layer))
            for layer in self._layers
            if self._stages[layer] == stage
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, layer: int, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(partial(self._add, layer))  # type: ignore[no-untyped-call]

    def _add(self, layer: int, gradient: torch.Tensor) -> None:
        rows = gradient.flatten(0, -2).float()
        product = rows.t() @ rows
        self._products[layer] = product + self._products.get(layer, 0)


def _hidden(output: Any) -> torch.Tensor:
    """Return the hidden states among the outputs of a stage."""
    hidden: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return hidden
