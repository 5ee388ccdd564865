"""Importance files from a text: mean squares of the input columns of a model's experts, weighted by the router.

The model runs in transformers in its own dtype, on one device. An expert's output is multiplied by the router's weight
p of the token, so that a token's squared error counts p² in every sum here: a mean is Σ p² x² / Σ p².
Legend: H hidden size, I expert intermediate size, E experts, K input columns (H or I), T tokens of an expert.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn
from torch.overrides import TorchFunctionMode

from hqconv.conversion.option_values import check_places
from hqconv.conversion.resources import explained_gpu_memory
from hqconv.conversion.transformers_model import (
    check_counts,
    folder_of,
    import_transformers,
    load,
    positions_warning,
    quiet_loading,
    read_text,
    running,
)
from hqconv.errors import InputError, OutputError, RequestError, plural
from hqconv.io.durable_files import write_whole
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import GEMMS, HESSIAN, HESSIAN_TILE
from hqconv.sources.opening import open_source

_LOG = logging.getLogger(__name__)

# The last word of a weight's name, in transformers' models; biases have others.
_W13 = ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "v1")
_W2 = ("down_proj", "w2")
_PRODUCTS = ("linear", "matmul", "bmm")  # x is the first operand, the weight the second


# Modules without the router's weights in their arguments: their caller has multiplied the inputs by them.
_SCALED_INPUTS = ("Llama4TextExperts",)


class Place(NamedTuple):
    """Weights of a GEMM at some bytes of memory, `begin` up to `end`; `expert`: of a single expert's weight."""

    begin: int
    end: int
    layer: str
    gemm: str
    num_columns: int
    num_experts: int
    expert: int | None

    @property
    def name(self) -> str:
        """Name of the GEMM's tensor in the file."""
        return f"{self.layer}.{self.gemm}"

    def expert_at(self, address: int) -> int:
        """Return the expert whose weight begins at an address; experts lie one after the other."""
        if self.expert is not None:
            return self.expert
        return (address - self.begin) * self.num_experts // (self.end - self.begin)


class Routing(NamedTuple):
    """Arguments of a running experts module: inputs [T, H], chosen experts [T, k] and the router's weights [T, k]."""

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of an expert in the order of transformers' eager modules, and their router weights."""
        place, token = torch.where(self.experts.t() == expert)
        return token, self.weights[token, place]


class ProductSums:
    """Sums of products of inputs in tiles of neighbouring columns, float64, and of their squares."""

    def __init__(self, num_columns: int, device: torch.device) -> None:
        count = -(-num_columns // HESSIAN_TILE)
        shape, kind = (count, HESSIAN_TILE, HESSIAN_TILE), {"dtype": torch.float64, "device": device}
        self._products, self._squares = torch.zeros(shape, **kind), torch.zeros(shape, **kind)  # type: ignore[call-overload]
        self._total, self._total_square = torch.zeros((2,), **kind)  # type: ignore[call-overload]

    def add(self, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Add rows float64 [T, K], each as often as its count, float64 [T]."""
        missing = -rows.size(1) % HESSIAN_TILE
        tiles = nn.functional.pad(rows, (0, missing)).view(len(rows), -1, HESSIAN_TILE).transpose(0, 1)
        self._products.baddbmm_((tiles * counts[:, None]).transpose(1, 2), tiles)
        squares = tiles.square() * counts[:, None]
        self._squares.baddbmm_(squares.transpose(1, 2), squares)
        self._total += counts.sum()
        self._total_square += counts.square().sum()

    def means(self, repeats: float = 1.0) -> torch.Tensor:
        """Return the mean products, float32 [n, 128, 128], with shrunk correlations.

        The correlations of few rows are partly chance, and compensation would fit it. So those of a tile are multiplied
        by the factor with the least expected squared error (Schäfer and Strimmer 2005), which sets correlations that
        are all chance to 0. repeats: number of rows that are the same, such as of a token's experts.
        """
        mean = self._products / self._total
        scale = mean.diagonal(dim1=1, dim2=2).rsqrt().nan_to_num(posinf=0.0)
        relative = scale[:, :, None] * scale[:, None, :]
        chance = (self._squares - mean.square() * self._total_square).clamp_min(0) / self._total.square() * repeats
        off = 1 - torch.eye(HESSIAN_TILE, dtype=torch.float64, device=mean.device)
        noise, signal = ((off * one).sum((1, 2)) for one in (chance * relative.square(), (mean * relative).square()))
        share = torch.where(signal > 0, 1 - noise / signal, torch.zeros_like(signal)).clamp(0, 1)
        return torch.where(off > 0, mean * share[:, None, None], mean).float()


@dataclass(frozen=True)
class Measures:
    """Choice of the collected sums.

    per_expert: a row of its own for every expert that sees at least `min_tokens` tokens, the layer's for the others.
    hessian: also the diagonal tiles of the mean of p² x xᵀ, `HESSIAN_TILE` columns wide.
    """

    per_expert: bool = False
    hessian: bool = False
    min_tokens: int = 64


def experts_modules(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Return layer, path and module of all routed experts; a module inside another belongs to it."""
    found: list[tuple[int, str, nn.Module]] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for _, outer, _ in found)
        is_routed = path.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
        if is_inside or not is_routed or "shared" in path.rpartition(".")[2]:
            continue
        layer = re.search(r"\.(\d+)\.", f".{path}.")
        if layer is None:
            raise RequestError("The experts are of no layer.", where=path, expected="a number in the path")
        found.append((int(layer[1]), path, module))
    return found


def matched(model: nn.Module, blocks: Iterable[MoeLayer]) -> dict[str, tuple[MoeLayer, nn.Module]]:
    """Return each layer of the checkpoint by name, with its module. Raises RequestError unless each has one."""
    modules, wanted = experts_modules(model), list(blocks)
    of_layer = defaultdict(list)
    for layer, path, module in modules:
        of_layer[layer].append((path, module))
    found = {}
    for block in wanted:
        here = of_layer.pop(block.index, [])
        if len(here) != 1:
            raise RequestError(
                "A layer of experts has not one module in transformers' model.",
                where=f"{block.name}, layer {block.index}",
                expected="one module of routed experts in this layer",
                found=", ".join(path for path, _ in here) or "none",
                remedy="Layers that transformers does not run (multi-token prediction) cannot be measured so.",
            )
        found[block.name] = block, here[0][1]
    if of_layer:
        path = next(iter(of_layer.values()))[0][0]
        raise RequestError("Experts of transformers' model are no layer of the checkpoint.", where=path)
    return found


class Collector(TorchFunctionMode):
    """Sums over every product x · W with an expert's weight, or a part of one, while the mode is entered.

    Sums are float64, on the model's device; their last bits depend on the device and on the libraries.
    """

    def __init__(self, modules: Mapping[str, tuple[MoeLayer, nn.Module]], measures: Measures) -> None:
        """modules: the result of `matched`. Raises RequestError for weights with unknown names or without memory."""
        super().__init__()
        self._measures = measures
        self.num_tokens = 0  # that the model has read
        self._layers = {name: layer for name, (layer, _) in modules.items()}
        self._modules = {name: module for name, (_, module) in modules.items()}
        self._routing: dict[str, Routing] = {}  # of the modules that run
        self._is_weighted: dict[str, bool] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._powers: dict[str, torch.Tensor] = {}  # Σ p² of each expert
        self._counts: dict[str, torch.Tensor] = {}  # tokens of each expert
        self._products: dict[str, ProductSums] = {}
        places = [place for name in modules for place in self._places_of(name)]
        self._places = sorted(places)
        self._begins = [place.begin for place in self._places]

    def _places_of(self, name: str) -> Iterator[Place]:
        layer, module = self._layers[name], self._modules[name]
        sizes = {"w13": layer.hidden_size, "w2": layer.intermediate_size}
        for path, weight in module.named_parameters():
            words = path.removesuffix(".weight").rpartition(".")[2]
            gemm = "w13" if words in _W13 else "w2" if words in _W2 else ""
            if not gemm and (words.endswith("bias") or weight.dim() < 2):
                continue
            if not gemm or weight.is_meta:
                what, known = "A weight of the experts is not understood.", ", ".join((*_W13, *_W2))
                raise RequestError(what, where=f"{name}: {path}", expected=f"{known}, in memory")
            number = next((int(part) for part in path.split(".") if part.isdigit()), None)
            begin = weight.data_ptr()
            yield Place(begin, begin + weight.nbytes, name, gemm, sizes[gemm], layer.num_experts, number)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the router's weights that the modules are given."""
        handles = []
        for name, module in self._modules.items():

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
                if len(given) == 3 and not given[1].is_floating_point() and given[1].shape == given[2].shape:
                    x, experts, weights = (one.detach().flatten(0, -2) for one in given)
                    self._routing[name] = Routing(x, experts, weights)

            def leave(*_: Any, name: str = name) -> None:
                self._routing.pop(name, None)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the operands of a product, then call the function."""
        if getattr(func, "__name__", "") in _PRODUCTS and len(args) > 1:
            x, weight = args[:2]
            if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
                place = self._place_of(weight)
                if place is not None:
                    self._add_product(place, x.detach(), weight)
        return func(*args, **(kwargs or {}))

    def _place_of(self, weight: torch.Tensor) -> Place | None:
        address = weight.data_ptr()
        index = bisect_right(self._begins, address) - 1
        place = self._places[index] if index >= 0 else None
        return place if place is not None and address < place.end else None

    def _add_product(self, place: Place, x: torch.Tensor, weight: torch.Tensor) -> None:
        if x.size(-1) != place.num_columns:
            what, found = "The experts' input has another size than the checkpoint says.", x.size(-1)
            raise RequestError(what, where=place.name, expected=place.num_columns, found=found)
        if x.dim() == 3 and weight.dim() == 3 and len(weight) == len(x) == place.num_experts > 1:
            for expert, rows in enumerate(x):  # all experts in one product
                self._add(place, expert, rows)
        else:
            self._add(place, place.expert_at(weight.data_ptr()), x.reshape(-1, x.size(-1)))

    def _add(self, place: Place, expert: int, x: torch.Tensor) -> None:
        """Add the input rows [T, K] of an expert to the sums."""
        factor = self._router_weights(place, expert, x)
        rows, name = x.double(), place.name
        power = torch.ones_like(rows[:, 0]) if factor is None else factor.double().square()
        if name not in self._sums:
            self._start(place, rows)
        seen = rows.any(1)  # an expert that is given every token gets zeros for those of others
        self._counts[name][expert] += seen.sum()
        self._powers[name][expert] += (power * seen).sum()
        self._sums[name][expert if self._measures.per_expert else 0] += (power[:, None] * rows.square()).sum(0)
        if self._measures.hessian:
            self._products[name].add(rows, power * seen)

    def _start(self, place: Place, rows: torch.Tensor) -> None:
        num_rows = place.num_experts if self._measures.per_expert else 1
        self._sums[place.name] = rows.new_zeros(num_rows, place.num_columns)
        self._powers[place.name] = rows.new_zeros(place.num_experts)
        self._counts[place.name] = rows.new_zeros(place.num_experts, dtype=torch.int64)
        if self._measures.hessian:
            self._products[place.name] = ProductSums(place.num_columns, rows.device)

    def _router_weights(self, place: Place, expert: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return the router's weight of each row of `x`; None where it is not known, or is in the rows already.

        Known rows are in the order of `Routing.of_expert`: those of w13 must equal the module's input.
        """
        routing, found = self._routing.get(place.layer), None
        if routing is not None and self._is_weighted.get(place.layer, True):
            token, weights = routing.of_expert(expert)
            is_known = len(token) == len(x) and (place.gemm != "w13" or torch.equal(routing.x[token], x))
            found = weights if is_known else None
        if self._is_weighted.setdefault(place.layer, found is not None) != (found is not None):
            what = "Only some products of these experts could be matched with the router's weights."
            remedy = "Transformers' eager experts are expected; report the model, please."
            raise RequestError(what, where=place.name, remedy=remedy)
        return found

    @property
    def unweighted_layers(self) -> list[str]:
        """Layers whose tokens all count the same, since the router's weights were not seen."""
        return [
            name
            for name, is_weighted in self._is_weighted.items()
            if not is_weighted and type(self._modules[name]).__name__ not in _SCALED_INPUTS
        ]

    def num_few(self) -> int:
        """Return the number of experts that saw fewer tokens than a row of their own needs."""
        return sum(int((self._num_tokens(name) < self._measures.min_tokens).sum()) for name in self._layers)

    def _num_tokens(self, layer: str) -> torch.Tensor:
        """Return the tokens of each expert, int64 [E]; gate and up may be two products, down is one."""
        return self._counts[f"{layer}.w2"]

    def means(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the file, float32: `<layer>.<gemm>` [K] or [E, K], `<layer>.<gemm>.hessian` [n, t, t].

        Raises RequestError where no product was seen, InputError for NaN and infinity.
        """
        found, names = {}, [f"{layer}.{gemm}" for layer in self._layers for gemm in GEMMS]
        unseen = next((name for name in names if name not in self._sums), None)
        if unseen is not None:
            what = "No product with these experts' weights was seen: transformers multiplies in another way."
            remedy = "A model whose weights are 16-bit or float32, and run by transformers' eager experts."
            raise RequestError(what, where=unseen, expected=remedy)
        for name in names:
            total = self._powers[name].sum()
            found[name] = self._rows(name, self._sums[name].sum(0) / total)
            if self._measures.hessian:
                found[f"{name}{HESSIAN}"] = self._products[name].means(self._repeats(name)).cpu()
        for name, values in found.items():
            if not bool(torch.isfinite(values).all()):
                raise InputError("The experts' input has numbers that are NaN or infinite.", where=name)
        return found

    def _repeats(self, name: str) -> float:
        """Return how often the input of a token was counted: w13 has it for each chosen expert, w2 has others."""
        return max(1.0, float(self._counts[name].sum()) / max(1, self.num_tokens)) if name.endswith("w13") else 1.0

    def _rows(self, name: str, of_layer: torch.Tensor) -> torch.Tensor:
        """Return the mean of the layer, or a row for each expert."""
        if not self._measures.per_expert:
            return of_layer.float().cpu()
        powers = self._powers[name][:, None]
        counts = self._num_tokens(name.rpartition(".")[0])[:, None]
        has_own = (counts >= self._measures.min_tokens) & (powers > 0)
        return torch.where(has_own, self._sums[name] / powers, of_layer).float().cpu()


def collect(
    model: nn.Module, batches: Iterable[torch.Tensor], layers: Iterable[MoeLayer], measures: Measures = Measures()
) -> Collector:
    """Return the sums over a model that reads `batches` of token ids [B, T].

    Raises RequestError where model and layers do not match, or the experts run in an unknown way.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation = "eager"  # one product after the other, not one kernel
    collector = Collector(matched(model, layers), measures)
    with torch.inference_mode(), collector.watching(), collector:
        for number, ids in enumerate(batches, start=1):
            model(input_ids=ids, use_cache=False)
            collector.num_tokens += ids.numel()
            _LOG.info("Batch %d is done: %s.", number, plural(ids.numel(), "token"))
    return collector


def collect_importance(
    model: str,
    text: Path,
    columns: Path,
    *,
    num_tokens: int,
    context_length: int,
    measures: Measures,
    device: str,
    revision: str | None,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Write the importance file `columns` of a model and return a document; see `hqconv.api.collect_importance`."""
    check_counts(num_tokens, context_length)
    transformers = import_transformers("An importance file is made")
    if columns.exists() or columns.is_symlink():
        remedy = "Remove it, or choose another file with -o."
        raise OutputError("The importance file exists already.", where=str(columns), remedy=remedy)
    with open_source(model, revision) as source:
        check_places(source.place, columns)
        layers = source.map_experts().layers
        remedy = "The whole model must fit: free the GPU, or use --device cpu."
        with folder_of(source, with_weights=True) as folder, explained_gpu_memory(device, remedy):
            read = read_text(transformers, folder, text, num_tokens)
            announce(f"Running {plural(len(read.ids), 'token')} through the model on {device}.")
            with running(model), quiet_loading(transformers):
                loaded = load(transformers, source, folder).to(device).eval()
            batches = [torch.tensor([ids], device=device) for ids in read.sequences(context_length)]
            warnings = positions_warning(loaded.config, max(ids.size(1) for ids in batches))
            for warning in warnings:
                announce(f"Warning: {warning}")
            with running(model):
                done = collect(loaded, batches, layers, measures)
    means = done.means()
    write_whole(columns.parent, columns.name, save(means, {"tokens": str(len(read.ids))}))
    return {
        "kind": "importance",
        "model": model,
        "out": str(columns),
        "num_tensors": len(means),
        "num_tokens": len(read.ids),
        "per_expert": measures.per_expert,
        "hessian": measures.hessian,
        "num_experts_below_min_tokens": done.num_few(),
        "layers_without_router_weights": done.unweighted_layers,
        "warnings": warnings,
    }
