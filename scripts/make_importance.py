"""Collects what each input column of a model's experts sees: an importance file for `hqconv convert --importance`.

    python scripts/make_importance.py MODEL TEXT OUT [--tokens 65536] [--context 512] [--device cuda]

MODEL is a folder or a Hub repo id, TEXT a text file of the kind that the model will be used on, OUT the file to write:
per MoE layer `<layer>.w13` [H] and `<layer>.w2` [I], the mean of x² over all tokens that an expert of the layer takes,
in float32, under the names that `hqconv inspect` shows. The model runs in transformers as it is, in its own dtype, and
must fit on the device. Legend: H hidden size, I expert intermediate size.
"""

from __future__ import annotations

import argparse
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.models.moe_layer import MoeLayer
from hqconv.sources.opening import open_source

# The last word of a weight's name, in transformers' models; biases have others.
_W13 = ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "v1")
_W2 = ("down_proj", "w2")
_PRODUCTS = ("linear", "matmul", "bmm")  # x is the first operand, the weight the second


class Place(NamedTuple):
    """Which GEMM's weights lie at some bytes of memory: up to `end`."""

    end: int
    name: str
    num_columns: int


def experts_modules(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Layer, path and module of all routed experts; a module inside another is that one's."""
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
    """Each layer of the checkpoint by name, with its module. Raises RequestError unless each has one, by layer."""
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
                where=f"layer {block.name}, layer {block.index}",
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
    """While it is entered, sums x² of every product x · W of which W is, or is a part of, an expert's weight."""

    def __init__(self, modules: Mapping[str, tuple[MoeLayer, nn.Module]]) -> None:
        """modules: of `matched`. Raises RequestError for weights whose names are not known, or that lie nowhere."""
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
        """Calls the function, once its operands were looked at."""
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
        """float32 [H] or [I] by `<layer>.<gemm>`. RequestError where nothing was seen, InputError for no numbers."""
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
    """The means of x² of a model that reads `batches` of token ids [B, T], under the layers' names.

    Raises RequestError where model and layers do not match, or how the experts are run is not understood.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation = "eager"  # one product after the other, not one kernel
    collector = Collector(matched(model, layers))
    with torch.inference_mode(), collector:
        for ids in batches:
            model(input_ids=ids, use_cache=False)
    return collector.means()


def token_batches(ids: Sequence[int], context: int, device: torch.device) -> list[torch.Tensor]:
    """Token ids, cut to [1, context] each; the last may be shorter."""
    cut = [ids[begin : begin + context] for begin in range(0, len(ids), context)]
    return [torch.tensor([part], device=device) for part in cut]


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect and write; exits with the error's code where that cannot be."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "out"):
        parser.add_argument(name)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    try:
        with open_source(args.model, is_lazy=True) as source:
            layers, architectures = source.map_experts().layers, source.config.get("architectures") or []
        text = Path(args.text).read_text(encoding="utf-8")
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: args.tokens]
        if not ids:
            raise RequestError("There is nothing to read.", where=args.text, expected="text")
        auto = getattr(transformers, next(iter(architectures), ""), transformers.AutoModelForCausalLM)
        model = auto.from_pretrained(args.model, dtype="auto")
        model = model.to(args.device).eval()
        means = collect(model, token_batches(ids, args.context, torch.device(args.device)), layers)
    except HqconvError as error:
        print(f"error: {error.message()}", file=sys.stderr)
        sys.exit(error.exit_code)
    save_file(means, args.out, {"tokens": str(len(ids))})
    print(f"{args.out}: {len(means)} tensors from {len(ids)} tokens")


if __name__ == "__main__":
    main()
