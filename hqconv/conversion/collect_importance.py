"""Importance files from a text: the mean square of each input column of a model's experts, as transformers runs them.

The model runs in transformers in its own dtype, on one device. Legend: H hidden size, I expert intermediate size.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn
from torch.overrides import TorchFunctionMode

from hqconv.errors import InputError, OutputError, RequestError, plural
from hqconv.io.durable_files import write_whole
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.sources.opening import open_source

_LOG = logging.getLogger(__name__)

# The last word of a weight's name, in transformers' models; biases have others.
_W13 = ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "v1")
_W2 = ("down_proj", "w2")
_PRODUCTS = ("linear", "matmul", "bmm")  # x is the first operand, the weight the second


class Place(NamedTuple):
    """The GEMM whose weights lie at some bytes of memory, up to `end`."""

    end: int
    name: str
    num_columns: int


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
    """Sums of x² over every product x · W with an expert's weight, or a part of one, while the mode is entered."""

    def __init__(self, modules: Mapping[str, tuple[MoeLayer, nn.Module]]) -> None:
        """modules: the result of `matched`. Raises RequestError for weights with unknown names or without memory."""
        super().__init__()
        self._sizes: dict[str, int] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)
        places: dict[int, Place] = {}
        for name, (layer, module) in modules.items():
            sizes = {f"{name}.w13": layer.hidden_size, f"{name}.w2": layer.intermediate_size}
            self._sizes |= sizes
            for path, weight in module.named_parameters():
                words = path.removesuffix(".weight").rpartition(".")[2]
                gemm = "w13" if words in _W13 else "w2" if words in _W2 else ""
                if not gemm and (words.endswith("bias") or weight.dim() < 2):
                    continue
                if not gemm or weight.is_meta:
                    what, known = "A weight of the experts is not understood.", ", ".join((*_W13, *_W2))
                    raise RequestError(what, where=f"{name}: {path}", expected=f"{known}, in memory")
                key, begin = f"{name}.{gemm}", weight.data_ptr()
                places[begin] = Place(begin + weight.nbytes, key, sizes[key])
        self._begins = sorted(places)
        self._places = [places[begin] for begin in self._begins]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the operands of a product, then call the function."""
        if getattr(func, "__name__", "") in _PRODUCTS and len(args) > 1:
            x, weight = args[:2]
            if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
                place = self._place_of(weight)
                if place is not None:
                    self._add(place, x.detach())
        return func(*args, **(kwargs or {}))

    def _place_of(self, weight: torch.Tensor) -> Place | None:
        address = weight.data_ptr()
        index = bisect_right(self._begins, address) - 1
        place = self._places[index] if index >= 0 else None
        return place if place is not None and address < place.end else None

    def _add(self, place: Place, x: torch.Tensor) -> None:
        if x.size(-1) != place.num_columns:
            what, found = "The experts' input has another size than the checkpoint says.", x.size(-1)
            raise RequestError(what, where=place.name, expected=place.num_columns, found=found)
        rows = x.reshape(-1, x.size(-1)).double()
        total = rows.square().sum(0)
        self._sums[place.name] = self._sums[place.name] + total if place.name in self._sums else total
        self._counts[place.name] += len(rows)

    def means(self) -> dict[str, torch.Tensor]:
        """Return float32 [H] or [I] by `<layer>.<gemm>`.

        Raises RequestError where no product was seen, InputError for NaN and infinity.
        """
        found = {}
        for name in self._sizes:
            if not self._counts[name]:
                what = "No product with these experts' weights was seen: transformers multiplies in another way."
                remedy = "A model whose weights are 16-bit or float32, and run by transformers' eager experts."
                raise RequestError(what, where=name, expected=remedy)
            found[name] = (self._sums[name] / self._counts[name]).float().cpu()
            if not bool(torch.isfinite(found[name]).all()):
                raise InputError("The experts' input has numbers that are NaN or infinite.", where=name)
        return found


def collect(model: nn.Module, batches: Iterable[torch.Tensor], layers: Iterable[MoeLayer]) -> dict[str, torch.Tensor]:
    """Return the means of x² of a model that reads `batches` of token ids [B, T], under the layers' names.

    Raises RequestError where model and layers do not match, or the experts run in an unknown way.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation = "eager"  # one product after the other, not one kernel
    collector = Collector(matched(model, layers))
    with torch.inference_mode(), collector:
        for number, ids in enumerate(batches, start=1):
            model(input_ids=ids, use_cache=False)
            _LOG.info("Batch %d is done: %s.", number, plural(ids.numel(), "token"))
    return collector.means()


def token_batches(ids: Sequence[int], context: int, device: torch.device) -> list[torch.Tensor]:
    """Cut token ids into batches [1, context]; the last may be shorter."""
    cut = [ids[begin : begin + context] for begin in range(0, len(ids), context)]
    return [torch.tensor([part], device=device) for part in cut]


def collect_importance(
    model: str,
    text: Path,
    columns: Path,
    *,
    num_tokens: int,
    context_length: int,
    device: str,
    revision: str | None,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Write the importance file `columns` of a model and return a document; see `hqconv.api.collect_importance`."""
    transformers = import_transformers("An importance file is made")
    if columns.exists() or columns.is_symlink():
        remedy = "Remove it, or choose another file with -o."
        raise OutputError("The importance file exists already.", where=str(columns), remedy=remedy)
    with open_source(model, revision) as source:
        layers, root = source.map_experts().layers, source.root
        ids = token_ids(transformers, root, text)[:num_tokens]
        announce(f"Running {plural(len(ids), 'token')} through the model on {device}.")
        with _loading(model):
            loaded = _model_class(transformers, source).from_pretrained(root, dtype="auto").to(device).eval()
        means = collect(loaded, token_batches(ids, context_length, torch.device(device)), layers)
    write_whole(columns.parent, columns.name, save(means, {"tokens": str(len(ids))}))
    counts = {"num_tensors": len(means), "num_tokens": len(ids)}
    return {"kind": "importance", "model": model, "out": str(columns), **counts}


def import_transformers(what: str) -> Any:
    """Import transformers, which does `what`. Raises RequestError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise RequestError(
            f"{what} with transformers, which is not installed.",
            found=error,
            remedy="Run: pip install 'transformers>=5.0'.",
        ) from error
    return transformers


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Turn the errors of transformers about a model or a tokenizer into a RequestError."""
    try:
        yield
    except (ImportError, OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        what, found = (
            "The transformers library cannot load this model.",
            f"{type(error).__name__}: {str(error).strip()}",
        )
        remedy = "Try it with transformers alone; this command needs a model that transformers runs."
        raise RequestError(what, where=model, found=found.split("\n")[0], remedy=remedy) from error


def _model_class(transformers: Any, source: Source) -> Any:
    """Return the class of the model in transformers, by its config."""
    architectures = source.config.get("architectures") or []
    return getattr(transformers, next(iter(architectures), ""), transformers.AutoModelForCausalLM)


def token_ids(transformers: Any, root: Path, text: Path) -> list[int]:
    """Return the token ids of a text file. Raises RequestError for a file without text, or an unusable tokenizer."""
    try:
        read = text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError("The text cannot be read.", where=f"--text {text}", found=error) from error
    with _loading(str(root)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(root)
        ids: list[int] = tokenizer(read, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RequestError("The text has no tokens.", where=f"--text {text}", expected="a text of the model's use")
    return ids
