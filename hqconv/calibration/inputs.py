"""Inputs of a model's experts over a text: transformers runs the source, one layer's weights at a time.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size, K input columns of a GEMM,
B sequences.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hqconv.calibration.activations import activate
from hqconv.calibration.gptq import InputProducts, OutputGradients, in_tf32
from hqconv.calibration.output_gradients import output_gradients
from hqconv.calibration.streamed_model import Stream, StreamedModel
from hqconv.calibration.transformers_model import (
    Text,
    folder_of,
    import_transformers,
    quiet_loading,
    read_text,
    running,
)
from hqconv.errors import RequestError
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation

_LOG = logging.getLogger(__name__)
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of a calibration
_VALIDATION_SHARE = 0.25  # of the tokens, the last ones: neighbours are alike
_GRADIENT_TOKENS = 16_384  # of the text, the first ones
_LARGEST = 2.0**40  # of inputs whose squares are summed in float32
_FEW_TOKENS = 64  # of w2 of an expert with n tokens, n / (n + 64) of the products are its own
_SHARED_TOKENS = 2048  # the same of w13, whose input all experts share
_PASS_TOKENS = 512  # of one forward pass, if a context is not longer
_GPU_PASS_TOKENS = 4096  # of a calibration
_GRADIENT_CONTEXT = 512  # at most
_ROWS = 4096  # tokens whose products are summed at once
_REMEDY = "Convert without --calibrate."

Weights = Mapping[str, torch.Tensor]  # w1 (if gated), w3 and w2, and biases b1 and b3


# --- the inputs of one layer


@dataclass(frozen=True, eq=False)
class ExpertActivations:
    """Inputs of a layer's experts: x [T, H], chosen experts int64 [T, k], and their weights [T, k].

    The weight of a choice that is no expert of the layer is 0. is_validation: bool [T], tokens for choices between
    solutions. power: float32 [T], each token's squared norm of the hidden state that the layer gives. gradients: of
    the loss by the experts' outputs, where they are known.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    is_validation: torch.Tensor
    power: torch.Tensor
    gradients: OutputGradients | None = None

    def num_tokens(self, experts: Sequence[int]) -> list[int]:
        """Return the number of tokens that chose each of some experts."""
        return [self._counts[expert] for expert in experts]

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(self.experts[self.weights != 0].tolist())

    @in_tf32()
    def hidden_products(self, experts: Sequence[int]) -> InputProducts:
        """Return the products of x, the input of w13, for some experts: each token counts with its weight.

        Of an expert with few tokens its own are blended towards those of all experts, which choose the damping.
        """
        shared = self._shared_products
        h = shared.fit[0] + shared.validation[0]
        own = torch.empty(len(experts), *h.shape, device=h.device)
        for index, expert in enumerate(experts):
            token, choice = (self.experts == expert).nonzero(as_tuple=True)
            products = self._products(token, self.weights[token, choice].float().abs())
            blend = len(token) / (len(token) + _SHARED_TOKENS)
            size = (h.trace() / products.trace()).nan_to_num(0.0, 0.0, 0.0)  # of none
            own[index] = blend * size * products + (1 - blend) * h
        return replace(shared, own=own, damping=shared.best_damping)

    @cached_property
    def _shared_products(self) -> InputProducts:
        shares = self.weights.float().abs().sum(1)
        each = [mask.nonzero().view(-1) for mask in (~self.is_validation, self.is_validation)]
        fit, validation = (self._products(tokens, shares[tokens]).unsqueeze(0) for tokens in each)
        _bound(fit, validation)
        return InputProducts(fit, validation)

    def _products(self, tokens: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the products of x over some tokens, float64 [H, H]."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for some, share in _in_chunks(tokens, shares):
            x = self._rows(some)
            total = total + _weighted_product(x, share, x)
        return total.nan_to_num(0.0, 0.0, 0.0)

    @in_tf32()
    def intermediate_products(
        self,
        experts: Sequence[int],
        weights: Weights,
        activation: Activation,
        quantized: Weights | None = None,
    ) -> InputProducts:
        """Return the products of what w2 of some experts is given, [E, I, I].

        weights: stacks of the source, in the experts' order. quantized: w1 and w3 as they will be; then w2 is given
        what these compute, and the products have drifts. Of an expert with few tokens the products are blended towards
        their diagonal; of one without any they are a unit's.
        """
        fit, validation = [], []
        for index, expert in enumerate(experts):
            own = {name: stack[index].float() for name, stack in weights.items() if name != "w2"}
            changed = None
            if quantized is not None:
                changed = own | {name: stack[index].float() for name, stack in quantized.items()}
            token, choice = (self.experts == expert).nonzero(as_tuple=True)
            share = self.weights[token, choice].float().abs()  # inkling has negative ones
            mask = self.is_validation[token]
            fit.append(self._expert_products(token[~mask], share[~mask], activation, own, changed))
            validation.append(
                self._expert_products(token[mask], share[mask], activation, own, changed)
            )
        gradients = self.gradients
        if gradients is not None:
            gradients = gradients.resized(weights["w2"].size(1))
        sums = [torch.stack([pair[0] for pair in pairs]) for pairs in (fit, validation)]
        if quantized is None:
            _bound(*sums)
            return InputProducts(sums[0], sums[1], gradients=gradients)
        drifts = [torch.stack([pair[1] for pair in pairs]) for pairs in (fit, validation)]
        _bound(*sums, *drifts)
        return InputProducts(sums[0], sums[1], drifts[0], drifts[1], gradients)

    def _expert_products(
        self,
        tokens: torch.Tensor,
        shares: torch.Tensor,
        activation: Activation,
        own: Weights,
        changed: Weights | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an expert's products of w2's input, and the drift of this under changed weights, [I, I] each."""
        products = torch.zeros((), dtype=torch.float64, device=tokens.device)
        drift = products
        for some, share in _in_chunks(tokens, shares):
            hidden = self._hidden(own, activation, some)
            x = hidden if changed is None else self._hidden(changed, activation, some)
            products = products + _weighted_product(x, share, x)
            if changed is not None:
                drift = drift + _weighted_product(hidden - x, share, x)
        products, drift = products.nan_to_num(0.0, 0.0, 0.0), drift.nan_to_num(0.0, 0.0, 0.0)
        num_tokens, diagonal = len(tokens), products.diagonal()
        if not num_tokens:
            diagonal = torch.ones_like(diagonal)
        blend = num_tokens / (num_tokens + _FEW_TOKENS)
        return blend * products + (1 - blend) * torch.diag(diagonal), blend * drift

    def output_errors(
        self, expert: int, weights: Weights, changed: Weights, activation: Activation
    ) -> torch.Tensor:
        """Return what changed weights of w13, and of w2, change in an expert's output, float64 [2].

        Over all tokens: the sum of the squared difference, times the squared router weight, over `power`.
        weights, changed: matrices [N, K] and biases [N].
        """
        token, choice = (self.experts == expert).nonzero(as_tuple=True)
        shares = self.weights[token, choice].double().square() / self.power[token]
        total = torch.zeros(2, dtype=torch.float64, device=token.device)
        for some, share in _in_chunks(token, shares):
            hidden = self._hidden(weights, activation, some)
            drift = self._hidden(changed, activation, some) - hidden
            by_w13 = nn.functional.linear(drift, weights["w2"])
            by_w2 = nn.functional.linear(hidden, changed["w2"] - weights["w2"])
            for index, error in enumerate((by_w13, by_w2)):
                total[index] += error.double().square().sum(1) @ share
        return total

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.x[tokens].float()

    def _hidden(
        self, weights: Weights, activation: Activation, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return what w2 of an expert is given for some tokens, [T, I]."""
        x = self._rows(tokens)
        up = nn.functional.linear(x, weights["w3"], weights.get("b3"))
        if "w1" not in weights:
            return activate(activation, None, up)
        return activate(activation, nn.functional.linear(x, weights["w1"], weights.get("b1")), up)


class LinearInputs:
    """Sums of products of a linear layer's inputs over a text, for all matrices that share them."""

    def __init__(self) -> None:
        self._fit = self._validation = torch.zeros((), dtype=torch.float64)

    def add(self, x: torch.Tensor, is_validation: torch.Tensor) -> None:
        """Add the inputs [T, K] of a pass. is_validation: bool [T]."""
        self._fit = self._fit.to(x.device) + self._products(x[~is_validation])
        self._validation = self._validation.to(x.device) + self._products(x[is_validation])

    @staticmethod
    def _products(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for rows in torch.split(x, _ROWS):
            values = rows.float()
            total = total + _weighted_product(values, values.new_ones(len(values)), values)
        return total.nan_to_num(0.0, 0.0, 0.0)

    def hidden_products(self, _: Sequence[int]) -> InputProducts:
        """Return the products, as those of one expert."""
        return self._products_of_all

    @cached_property
    def _products_of_all(self) -> InputProducts:
        fit, validation = (sums.clone().unsqueeze(0) for sums in (self._fit, self._validation))
        _bound(fit, validation)
        return InputProducts(fit, validation)


def _in_chunks(
    tokens: torch.Tensor, shares: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens with their shares in chunks, one at least: so many rows exist at a time."""
    return zip(torch.split(tokens, _ROWS), torch.split(shares, _ROWS), strict=True)


def _weighted_product(y: torch.Tensor, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return Σ share y xᵀ over tokens, float64 [K, K], of y and x [T, K]."""
    if not len(x):
        return x.new_zeros(x.size(1), x.size(1), dtype=torch.float64)
    y_scale = _scale_to(y.abs().amax(), _LARGEST)
    x_scale = _scale_to(x.abs().amax(), _LARGEST)
    product = (y * (y_scale * share.unsqueeze(1))).t() @ (x * x_scale)
    return product.double() / y_scale.double() / x_scale.double()


def _bound(*products: torch.Tensor) -> None:
    """Scale products [E, K, K] that float32 cannot hold, by a power of two for each expert, which changes no choice."""
    sizes = [product.diagonal(dim1=1, dim2=2).abs().amax(1) for product in products]
    scale = _scale_to(torch.stack(sizes).amax(0), _LARGEST**2)
    for product in products:
        product.mul_(scale.view(-1, 1, 1))


def _scale_to(size: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the power of two that brings a size to about `largest` if it is beyond; else 1."""
    return torch.exp2(-(size / largest).clamp_min(1.0).log2().ceil())


# --- the run of the model


def batches_of(
    text: Text, context_length: int, device: torch.device, pass_tokens: int = 0
) -> list[torch.Tensor]:
    """Return a text's sequences of `context_length` tokens in passes [B, T]; a rest is a pass of its own.

    A rest of one token predicts nothing and is left out.
    """
    size = max(pass_tokens, _PASS_TOKENS, context_length) // context_length
    sequences = [ids for ids in text.sequences(context_length) if len(ids) > 1]
    batches: list[torch.Tensor] = []
    for _, same_length in itertools.groupby(sequences, len):
        ids = torch.tensor([*same_length], device=device)
        batches += torch.split(ids, size)
    return batches


def _validation_masks(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the mask of the last tokens, bool [B * T] of each batch."""
    sizes = [ids.numel() for ids in batches]
    is_validation = torch.arange(sum(sizes)) >= (1 - _VALIDATION_SHARE) * sum(sizes)
    masks = zip(torch.split(is_validation, sizes), batches, strict=True)
    return [mask.to(ids.device) for mask, ids in masks]


@contextmanager
def expert_inputs(
    source: Source,
    path: Path,
    num_tokens: int,
    context_length: int,
    device: torch.device,
    limit: tuple[int, str],
    num_layers: tuple[int, int],
    least_bytes: int,
    held_out: Sequence[torch.Tensor] = (),
    num_threads: int = 1,
) -> Iterator[ExpertInputs]:
    """Yield the inputs of a source's experts over the first tokens of a text file, two at least.

    The model computes in float32 on the CPU, in bfloat16 on a GPU. limit: memory for the model, and the limit's name.
    num_layers: whose inputs are in memory at a time, and under any limit. least_bytes: of the same limit, for other
    work. held_out: token ids [B, T] of other tokens, which go through the same layers in float32, for an evaluation
    (`ExpertInputs.reference`), with `num_threads` of the CPU, if memory allows. Raises RequestError, before any work,
    where transformers cannot decode or run the model, or its run does not fit into the limit.
    """
    transformers = import_transformers("A calibration runs the model")
    dtype, place = _DTYPES[device.type], str(source.place)
    with ExitStack() as stack:
        stack.enter_context(quiet_loading(transformers))
        folder = stack.enter_context(folder_of(source))
        text = read_text(transformers, folder, path, num_tokens, "--calibrate", place)
        pass_tokens = _GPU_PASS_TOKENS if device.type == "cuda" else 0
        batches = batches_of(text, context_length, device, pass_tokens)
        with running(str(source.root)):
            model = StreamedModel(transformers, source, folder, dtype, device)
            first = text._replace(ids=text.ids[:_GRADIENT_TOKENS])
            context_length = min(context_length, _GRADIENT_CONTEXT)
            gradient_batches = batches_of(first, context_length, device, pass_tokens)
            num_kept, most_layers = num_layers
            model.check_memory(
                [batches],
                *limit,
                num_layers=num_kept,
                most_layers=most_layers,
                least_bytes=least_bytes,
                gradients_of=gradient_batches,
            )
            beside = [held_out] * (4 // dtype.itemsize)  # they are run in float32
            if model.needed_bytes([batches, *beside], num_layers=num_kept) > limit[0]:
                _LOG.info("Memory is short: the held-out tokens are run after the conversion.")
                held_out = ()
            inputs = ExpertInputs(model, batches, gradient_batches, held_out, num_threads)
        stack.callback(inputs.stop)
        yield inputs


class ExpertInputs:
    """The inputs of one layer of experts after the other, for threads that convert them in about this order."""

    def __init__(
        self,
        model: StreamedModel,
        batches: Sequence[torch.Tensor],
        gradient_batches: Sequence[torch.Tensor] = (),
        held_out: Sequence[torch.Tensor] = (),
        num_threads: int = 1,
    ) -> None:
        """Start passes. num_threads: for held_out; bytes depend on batches and gradient_batches.

        batches, gradient_batches, held_out: token ids [B, T] of each pass.
        """
        self._model, self._num_threads = model, num_threads
        self._gradient_batches = gradient_batches
        self._gradients: dict[int, OutputGradients] = {}
        self._uses: dict[int | str, int] = {}
        self._num_experts: dict[int, int] = {}
        self._found: dict[int | str, ExpertActivations | LinearInputs] = {}
        self._calls: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        self._linear: dict[str, LinearInputs] = {}  # of the stage that runs
        self._num_passes: Counter[str] = Counter()
        self._is_recording = False
        self._lock = threading.Lock()
        self._hooks = [
            module.register_forward_pre_hook(partial(self._record, layer), with_kwargs=True)
            for layer, (_, module) in model.experts.items()
        ]
        self._masks = _validation_masks(batches)
        self._stream = Stream(model, batches)
        self._num_tokens = sum(ids.numel() for ids in batches)
        self.announce: Callable[[str], None] = lambda step: None
        self._reference = Stream(model, held_out) if held_out else None

    def runs(self, layer: MoeLayer) -> bool:
        """Return whether the model runs a layer: transformers leaves out layers for multi-token prediction."""
        if layer.is_linear:
            return self._model.module_of_tensor(layer.tensor_names()[0]) is not None
        return layer.index in self._model.experts

    def expect(self, layer: MoeLayer, num_uses: int) -> None:
        """Record the inputs of a layer until `of` was called so often for it; those of other layers are not."""
        self._uses[_key(layer)] = num_uses
        if not layer.is_linear:
            self._num_experts[layer.index] = layer.num_experts
        elif (module := self._model.module_of_tensor(layer.tensor_names()[0])) is not None:
            record = partial(self._record_linear, layer.name)
            self._hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))

    def of(self, layer: MoeLayer) -> ExpertActivations | LinearInputs | None:
        """Return the inputs of a layer; the model runs as far as this layer. None for a layer that it does not run.

        Raises InputError where the model's weights are NaN or infinite, RequestError where its hidden states become so.
        """
        if not self.runs(layer):
            return None
        with self._lock, self._on_one_stream(), running(self._model.place):
            self._find_gradients()
            key = _key(layer)
            layers = [*self._num_experts]
            if key not in self._found and layer.index in layers:
                number = f"{layers.index(layer.index) + 1} of {len(layers)}"
                self.announce(f"calibrating layer {number}, {self._num_tokens:,} tokens")
            while key not in self._found:
                self._run_stage()
            self._uses[key] -= 1
            return self._found[key] if self._uses[key] else self._found.pop(key)

    def _find_gradients(self) -> None:
        """Run the model back, before the calibration, for the layers that are expected."""
        if self._gradient_batches and self._num_experts:
            num_tokens = sum(ids.numel() for ids in self._gradient_batches)
            self.announce(f"computing gradients of {num_tokens:,} tokens")
            layers = self._num_experts.keys() & self._model.experts.keys()
            self._gradients = output_gradients(self._model, self._gradient_batches, layers)
        self._gradient_batches = ()

    def reference(self) -> Stream | None:
        """End the calibration, and return the held-out tokens' passes; the model computes in float32 from now on.

        They went through the layers that the calibration ran.
        """
        self._end_calibration()
        if self._reference is not None:
            self._model.use_float32()
        return self._reference

    def stop(self) -> None:
        """End all passes and free the model."""
        self._end_calibration()
        if self._reference is not None:
            self._reference.stop()

    def _end_calibration(self) -> None:
        self._stream.stop()
        for hook in self._hooks:
            hook.remove()
        self._found.clear()

    def _record(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_recording:
            given = (*args, *kwargs.values())
            tensors = [value.flatten(0, -2) for value in given if isinstance(value, torch.Tensor)]
            self._calls.setdefault(layer, []).append(tuple(tensors))

    def _record_linear(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_recording:
            number = self._num_passes[name]
            self._num_passes[name] += 1
            x = next(iter((*args, *kwargs.values()))).flatten(0, -2)
            self._linear.setdefault(name, LinearInputs()).add(x, self._masks[number])

    @contextmanager
    def _on_one_stream(self) -> Iterator[None]:
        """Compute on the stream of the passes' threads, and nothing beside it: streams do not wait for each other."""
        device = self._model.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            torch.cuda.synchronize(device)
            yield
            torch.cuda.synchronize(device)

    def _run_stage(self) -> None:
        stage = self._stream.stage
        self._model.load(stage)
        self._is_recording = True
        powers = self._stream.advance(partial(self._power, stage))
        self._is_recording = False
        for layer, calls in self._calls.items():
            if self._uses.get(layer):
                self._found[layer] = self._joined(layer, calls, powers)
        self._calls.clear()
        self._found |= {name: found for name, found in self._linear.items() if self._uses.get(name)}
        self._linear.clear()
        if self._reference is not None and self._reference.stage == stage:
            self._advance_reference(self._reference)
        self._model.drop(stage)

    def _advance_reference(self, reference: Stream) -> None:
        """Run the held-out tokens through the stage, in float32. They are given up where that fails."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            self._model.widen(reference.stage)
            reference.advance()
        except Exception as error:  # noqa: BLE001 - what calibrates goes on, and an evaluation afterwards tells it
            _LOG.info("The held-out tokens are not run beside the calibration's: %s.", error)
            reference.stop()
            self._reference = None
        torch.set_num_threads(before)

    def _power(self, stage: str, answer: Any) -> torch.Tensor:
        """Return the squared norms of a stage's hidden states [B * T]. Raises where they are not finite numbers."""
        hidden = answer[0] if isinstance(answer, (tuple, list)) else answer
        if not isinstance(hidden, torch.Tensor):
            return torch.empty(0)
        if not bool(hidden.isfinite().all()):
            self._model.check_finite(stage)
            raise RequestError(
                "The model's hidden states become NaN or infinite when transformers runs it.",
                where=f"{self._model.place}: {stage}",
                expected="finite numbers",
                remedy=_REMEDY,
            )
        return hidden.float().square().sum(-1).flatten()

    def _joined(
        self, layer: int, calls: list[tuple[torch.Tensor, ...]], powers: list[torch.Tensor]
    ) -> ExpertActivations:
        """Join what the passes gave to a layer. Raises RequestError where it is no input, choices and weights."""
        path, module = self._model.experts[layer]
        num_experts, each = self._num_experts[layer], []
        for call, mask, power in zip(calls, self._masks, powers, strict=False):
            power = power.view(len(mask), -1).sum(1)  # deepseek_v4 has several states of a token
            if type(module).__name__ == "Llama4TextExperts":
                call, tokens = _routed(call[0], num_experts)
                mask, power = mask[tokens], power[tokens]
            each.append((*call, mask, power))
        if len(calls) != len(self._masks) or not all(map(_is_known, each)):
            raise RequestError(
                "The experts of this model are called in a way that a calibration does not know.",
                where=f"{self._model.place}: {path}",
                expected="one call, with hidden states, chosen experts, and their weights",
                found=f"{len(calls)} calls in {len(self._masks)} passes",
                remedy=_REMEDY,
            )
        x, experts, weights, mask, power = (
            torch.cat(tensors) for tensors in zip(*each, strict=True)
        )
        is_expert = (experts >= 0) & (experts < num_experts)  # longcat_flash has others
        gradients = self._gradients.pop(layer, None)
        return ExpertActivations(x, experts, weights * is_expert, mask, power, gradients)


def _key(layer: MoeLayer) -> int | str:
    return layer.name if layer.is_linear else layer.index


def _is_known(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether these are hidden states, choices and weights of the same tokens, and two facts of each token."""
    if len(tensors) != 5:
        return False
    x, experts, weights, mask, _ = tensors
    is_choice = not experts.is_floating_point() and experts.shape == weights.shape
    return is_choice and len(x) == len(experts) == len(mask)


def _routed(
    scaled: torch.Tensor, num_experts: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return inputs, choices and weights of experts that each get all tokens, times their weights; and the tokens.

    So llama4 calls its experts, with [E * T, H]; tokens that did not choose an expert are zeros there.
    """
    place = scaled.ne(0).any(1).nonzero()
    num_tokens = len(scaled) // num_experts
    experts, tokens = place // num_tokens, place[:, 0] % num_tokens
    weights = torch.ones_like(experts, dtype=scaled.dtype)
    return (scaled[place[:, 0]], experts, weights), tokens
