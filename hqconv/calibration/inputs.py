"""Inputs of a model's experts over a text: transformers runs the source, one layer's weights at a time.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size, B sequences.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hqconv.calibration.activations import activate
from hqconv.calibration.forward_pass import Stream
from hqconv.calibration.gptq import Products
from hqconv.calibration.streamed_model import StreamedModel
from hqconv.calibration.transformers_model import (
    Text,
    folder_of,
    import_transformers,
    quiet_loading,
    read_text,
    running,
)
from hqconv.errors import RequestError, plural
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation

_LOG = logging.getLogger(__name__)
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of a calibration
_HELD_EVERY = 4  # of so many sequences one is held back for choices
_FEW_TOKENS = 64  # of an expert with n tokens, n / (n + 64) of its products are its own
_PASS_TOKENS = 512  # of one forward pass, if a context is not longer
_ROWS = 4096  # tokens whose products are summed at once
_REMEDY = "Convert without --calibrate."


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of a layer's experts: x [T, H], chosen experts int64 [T, k], and their weights [T, k].

    The weight of a choice that is no expert of the layer is 0. held: bool [T], tokens that are held back for choices.
    power: float32 [T], each token's squared norm of the hidden state that the layer gives.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    held: torch.Tensor
    power: torch.Tensor

    @cached_property
    def of_hidden(self) -> Products:
        """Return the products of x, one for all experts: each token counts with the squares of its weights."""
        power = self.weights.float().square().sum(1)
        fit, held = (
            _products(lambda some: [self._rows(some)], tokens, power[tokens])
            for tokens in (part.nonzero().view(-1) for part in (~self.held, self.held))
        )
        return Products(fit, held)

    def of_intermediate(
        self,
        numbers: Sequence[int],
        values: Mapping[str, torch.Tensor],
        activation: Activation,
        quantized: Mapping[str, torch.Tensor] | None = None,
    ) -> Products:
        """Return the products of what w2 of some experts is given, [E, I, I].

        values: the experts' w1 (if gated) and w3, [E, I, H], and biases b1 and b3, [E, I], of the source. quantized:
        w1 and w3 as they will be; then w2 is given what these compute, and the products know the difference. Of an
        expert with few tokens the products are blended towards their diagonal; of one without any they are a unit's.
        """
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        others = {**values, **(quantized or {})}
        for place, expert in enumerate(numbers):
            own, other = (
                {role: one[place].float() for role, one in w.items() if role != "w2"}
                for w in (values, others)
            )

            def rows_of(
                tokens: torch.Tensor, own: Any = own, other: Any = other
            ) -> list[torch.Tensor]:
                rows = self._hidden(other, activation, tokens)
                return (
                    [rows]
                    if quantized is None
                    else [rows, self._hidden(own, activation, tokens) - rows]
                )

            token, choice = (self.experts == expert).nonzero(as_tuple=True)
            power, held = self.weights[token, choice].float().square(), self.held[token]
            for part, into in zip((~held, held), found, strict=True):
                into.append(_blended(_products(rows_of, token[part], power[part]), int(part.sum())))
        fit, held_back = (torch.stack(one, 1) for one in found)
        return Products(fit[0], held_back[0], None if quantized is None else (fit[1], held_back[1]))

    def output_errors(
        self,
        expert: int,
        values: Mapping[str, torch.Tensor],
        other: Mapping[str, torch.Tensor],
        activation: Activation,
    ) -> torch.Tensor:
        """Return what other weights of w13, and of w2, change in an expert's output, float64 [2].

        Over all tokens: the sum of the squared difference, times the squared router weight, over `power`.
        values: the expert's w1 (if gated), w3 and w2 [N, K], and b1 and b3 [N]. other: the same with other weights.
        """
        token, choice = (self.experts == expert).nonzero(as_tuple=True)
        shares = self.weights[token, choice].double().square() / self.power[token]
        total = torch.zeros(2, dtype=torch.float64, device=token.device)
        for some, share in zip(torch.split(token, _ROWS), torch.split(shares, _ROWS), strict=True):
            hidden = self._hidden(values, activation, some)
            changed = (
                (self._hidden(other, activation, some) - hidden, values["w2"]),
                (hidden, other["w2"] - values["w2"]),
            )
            errors = (
                nn.functional.linear(x, weight).double().square().sum(1) for x, weight in changed
            )
            total += torch.stack([error @ share for error in errors])
        return total

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.x[tokens].float()

    def _hidden(
        self, values: Mapping[str, torch.Tensor], activation: Activation, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return what w2 of an expert is given for some tokens, [T, I]."""
        x = self._rows(tokens)
        gate = nn.functional.linear(x, values["w1"], values.get("b1")) if "w1" in values else None
        return activate(activation, gate, nn.functional.linear(x, values["w3"], values.get("b3")))


def _products(
    rows_of: Callable[[torch.Tensor], list[torch.Tensor]], tokens: torch.Tensor, power: torch.Tensor
) -> torch.Tensor:
    """Return Σ power y xᵀ over the rows of some tokens, float64 [C, K, K]; 4096 rows exist at a time.

    rows_of: some tokens' x [T, K], which is the first y, and further y. Zeros for NaN and infinity, whose weights are
    refused.
    """
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for some, weights in zip(torch.split(tokens, _ROWS), torch.split(power, _ROWS), strict=True):
        each = rows_of(some)
        total = (
            total + torch.stack([(y * weights.unsqueeze(1)).t() @ each[0] for y in each]).double()
        )
    return total.nan_to_num_(0.0, 0.0, 0.0)


def _blended(products: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return products [C, K, K] of an expert: the first towards their diagonal, others towards 0."""
    share, rest = num_tokens / (num_tokens + _FEW_TOKENS), torch.zeros_like(products)
    diagonal = products[0].diagonal()
    rest[0] = torch.diag(diagonal if num_tokens else torch.ones_like(diagonal))
    return share * products + (1 - share) * rest


def batches_of(text: Text, context_length: int, device: torch.device) -> list[torch.Tensor]:
    """Return a text's sequences of `context_length` tokens in passes [B, T]; a rest is a pass of its own.

    A rest of one token predicts nothing and is left out.
    """
    sequences = text.sequences(context_length)
    whole, size = (
        [ids for ids in sequences if len(ids) == context_length],
        max(1, _PASS_TOKENS // context_length),
    )
    found = list(torch.split(torch.tensor(whole, device=device), size)) if whole else []
    return [
        *found,
        *(torch.tensor([ids], device=device) for ids in sequences if 1 < len(ids) < context_length),
    ]


@contextmanager
def expert_inputs(
    source: Source,
    text: Sequence[Path],
    num_tokens: int,
    context_length: int,
    device: torch.device,
    limit: tuple[int, str],
    num_kept: int,
    held_out: Sequence[torch.Tensor] = (),
    num_threads: int = 1,
) -> Iterator[ExpertInputs]:
    """Yield the inputs of a source's experts over the first tokens of text files.

    The model computes in float32 on the CPU, in bfloat16 on a GPU. limit: memory for the model, and the limit's name.
    num_kept: layers whose inputs are kept at a time. held_out: token ids [B, T] of other tokens, which go through the
    same layers in float32, for an evaluation (`ExpertInputs.reference`), with `num_threads` of the CPU, if memory
    allows. Raises RequestError, before any work, where transformers cannot decode or run the model, or its run does not
    fit into the limit.
    """
    transformers = import_transformers("A calibration runs the model")
    dtype = _DTYPES[device.type]
    with ExitStack() as stack:
        stack.enter_context(quiet_loading(transformers))
        folder = stack.enter_context(folder_of(source))
        words = read_text(transformers, folder, text, num_tokens, "--calibrate", str(source.place))
        batches = batches_of(words, context_length, device)
        if not batches:
            what, expected, found = (
                "The text is too short.",
                "two tokens at least",
                plural(len(words.ids), "token"),
            )
            raise RequestError(what, where=f"--calibrate {text[0]}", expected=expected, found=found)
        with running(str(source.root)):
            model = StreamedModel(transformers, source, folder, dtype, device)
            model.check_memory([batches], *limit, num_kept=num_kept)
            if held_out:
                try:
                    wide = [held_out] * (4 // dtype.itemsize)  # they are run in float32
                    model.check_memory([batches, *wide], *limit, num_kept=num_kept)
                except RequestError as error:
                    _LOG.info(
                        "The held-out tokens are not run beside the calibration's. %s",
                        error.message(),
                    )
                    held_out = ()
            inputs = ExpertInputs(model, batches, held_out, num_threads)
        stack.callback(inputs.stop)
        yield inputs


class ExpertInputs:
    """The inputs of one layer of experts after the other, for threads that convert them in about this order."""

    def __init__(
        self,
        model: StreamedModel,
        batches: Sequence[torch.Tensor],
        held_out: Sequence[torch.Tensor] = (),
        num_threads: int = 1,
    ) -> None:
        """batches, held_out: token ids [B, T] of each pass. num_threads: for held_out; bytes depend on batches."""
        self._uses: dict[int, int] = {}
        self._num_experts: dict[int, int] = {}
        self._model, self._where = model, model.place
        self._lock = threading.Lock()
        self._found: dict[int, LayerInputs] = {}
        self._given: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._watching(layer), with_kwargs=True)
            for layer, (_, module) in model.experts.items()
        ]
        self._held = _held(batches)
        self._stream = Stream(model, batches)
        self._reference, self._num_threads = (
            Stream(model, held_out) if held_out else None,
            num_threads,
        )

    def runs(self, layer: MoeLayer) -> bool:
        """Return whether the model runs a layer: transformers leaves out layers for multi-token prediction."""
        return layer.index in self._model.experts

    def expect(self, layer: MoeLayer, num_uses: int) -> None:
        """Keep the inputs of a layer until `of` was called so often for it; those of other layers are not kept."""
        self._uses[layer.index], self._num_experts[layer.index] = num_uses, layer.num_experts

    def of(self, layer: MoeLayer) -> LayerInputs | None:
        """Return the inputs of a layer; the model runs as far as this layer. None for a layer that it does not run.

        Raises InputError where the model's weights are NaN or infinite, RequestError where its hidden states become so.
        """
        if not self.runs(layer):
            return None
        with self._lock, self._on_one_stream(), running(self._where):
            while layer.index not in self._found:
                self._run_stage()
            found = self._found[layer.index]
            self._uses[layer.index] -= 1
            if not self._uses[layer.index]:
                del self._found[layer.index]
            return found

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

    def _watching(self, layer: int) -> Any:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            self._given.setdefault(layer, []).append(tuple(one.flatten(0, -2) for one in given))

        return enter

    @contextmanager
    def _on_one_stream(self) -> Iterator[None]:
        """Compute on the stream of the passes' threads, and nothing beside it: streams do not wait for each other."""
        if self._model.device.type != "cuda":
            yield
            return
        with torch.cuda.stream(torch.cuda.default_stream(self._model.device)):
            torch.cuda.synchronize(self._model.device)
            yield
            torch.cuda.synchronize(self._model.device)

    def _run_stage(self) -> None:
        stage = self._stream.stage
        if stage == self._model.head:
            raise RequestError(
                "The transformers library runs none of these experts.",
                where=self._where,
                remedy=_REMEDY,
            )
        self._model.load(stage)
        powers = self._stream.advance(partial(self._power, stage))
        for layer, given in self._given.items():
            if self._uses.get(layer):
                self._found[layer] = self._joined(layer, given, powers)
        if self._reference is not None and self._reference.stage == stage:
            self._advance_reference(self._reference)
        self._given.clear()
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
        if bool(hidden.isfinite().all()):
            return hidden.float().square().sum(-1).flatten()
        self._model.check_finite(stage)
        raise RequestError(
            "The model's hidden states become NaN or infinite when transformers runs it.",
            where=f"{self._where}: {stage}",
            expected="finite numbers",
            remedy=_REMEDY,
        )

    def _joined(
        self, layer: int, given: list[tuple[torch.Tensor, ...]], powers: list[torch.Tensor]
    ) -> LayerInputs:
        """Join what the passes gave to a layer. Raises RequestError where it is no input, choices and weights."""
        num_experts, held = self._num_experts[layer], self._held
        if (
            len(given) == len(held)
            and type(self._model.experts[layer][1]).__name__ == "Llama4TextExperts"
        ):
            routed = [_routed(one[0], num_experts) for one in given]
            tokens, given = [one[3] for one in routed], [one[:3] for one in routed]
            held, powers = (
                [one[at.to(one.device)] for one, at in zip(ones, tokens, strict=True)]
                for ones in (held, powers)
            )
        for one in given:
            if (
                len(given) != len(held)
                or len(one) != 3
                or one[1].is_floating_point()
                or one[1].shape != one[2].shape
                or len(one[0]) != len(one[1])
            ):
                raise RequestError(
                    "The experts of this model are called in a way that a calibration does not know.",
                    where=f"{self._where}: {self._model.experts[layer][0]}",
                    expected="one call, with hidden states, chosen experts, and their weights",
                    found=f"{len(given)} calls in {len(held)} passes, with {[list(part.shape) for part in one]}",
                    remedy=_REMEDY,
                )
        x, experts, weights = (torch.cat([one[n] for one in given]) for n in range(3))
        is_expert = (experts >= 0) & (
            experts < num_experts
        )  # longcat_flash has choices that are none
        return LayerInputs(
            x, experts, weights * is_expert, torch.cat(held).to(x.device), torch.cat(powers)
        )


def _held(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the mask of the tokens of every fourth sequence, bool [B * T] of each batch."""
    number, masks = 0, []
    for ids in batches:
        sequences = torch.arange(number, number + len(ids)) % _HELD_EVERY == _HELD_EVERY - 1
        masks.append(sequences.repeat_interleave(ids.size(1)))
        number += len(ids)
    return masks


def _routed(
    x: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, choices, weights and tokens of experts that each get all tokens, times their weights.

    So llama4 calls its experts, with x [E * T, H]; tokens that did not choose an expert are zeros there.
    """
    place = x.ne(0).any(1).nonzero()
    experts, tokens = place // (len(x) // num_experts), place[:, 0] % (len(x) // num_experts)
    return x[place[:, 0]], experts, torch.ones_like(experts, dtype=x.dtype), tokens
