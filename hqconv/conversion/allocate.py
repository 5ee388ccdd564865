"""Allocate schemas to the GEMMs of a source's MoE layers: measure candidates, choose, and write a recipe.

One pass of transformers over a text gives the inputs of each layer's experts. A candidate is quantized as a calibrated
conversion quantizes it. Its loss in a GEMM is what it changes in the experts' outputs, relative to the hidden state
after the layer, squared: the mean over the tokens. The losses of all GEMMs together stand for the model's.
"""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hqconv.calibration.gptq import quantize_by_outputs
from hqconv.calibration.inputs import ExpertActivations
from hqconv.conversion.convert import calibrated_inputs
from hqconv.conversion.resources import Resources, bounded_gpu, plan_staging
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import RequestError
from hqconv.formats.encoding import resized
from hqconv.io.durable_files import FileKind, output_file, write_whole
from hqconv.io.pipeline import pipeline
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.planning.plan import ConversionPlan, plan_conversion
from hqconv.planning.spec import ConversionOptions
from hqconv.quantization.quantized import decoded
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.options import LEFT
from hqconv.schemas.weight_schema import SOURCE, resolve_schema

DEFAULT_CANDIDATES = (
    "int2-g32-zp",
    "int3-g64",
    "int3-g32-e4m3",
    "int4-g32-e4m3",
    "int4-g16-e4m3",
    "int6-g64",
    "fp8",
)
_BITS_ROUNDING = 0.005  # second scales are some thousandths of a bit
_HEAD = "# a schema for each GEMM, chosen by measured losses. Use it with convert --config."
_RECIPE = FileKind("a recipe of hqconv allocate", lambda head: _HEAD.encode() in head)


@dataclass
class GemmChoice:
    """A GEMM, w13 or w2 of a layer: bytes on all ranks and loss under each candidate, and the chosen candidate."""

    layer: str
    gemm: str
    sizes: dict[str, int]
    losses: dict[str, float]
    chosen: str = ""


def run_allocation(
    source: Source,
    options: ConversionOptions,
    target: GpuTarget,
    names: Sequence[str] | None,
    size_bytes: int | None,
    bits: float | None,
    given: Mapping[str, Any],
    out: Path,
    resources: Resources,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Measure candidates, choose within the budget, and write the recipe; see `hqconv.allocate`.

    names: of candidates. given: the options of a conversion that are not the default, for the recipe.
    Raises RequestError for a budget that no choice keeps, OutputError for the recipe, and as a calibrated conversion.
    """
    place = output_file(out, "-o", _RECIPE, [source.root])
    plans = _plan_candidates(source, options.calibrated(resources.device_name), target, names)
    first = next(iter(plans.values()))
    choices = []
    num_weights = 0
    for number, planned in enumerate(first.layers):
        layer = planned.layer
        num_weights += layer.num_experts * len(layer.roles) * math.prod(layer.shape("w2"))
        for gemm in GEMMS:
            sizes = {name: _gemm_bytes(plan.layers[number], gemm) for name, plan in plans.items()}
            choices.append(GemmChoice(layer.name, gemm, sizes, dict.fromkeys(plans, 0.0)))
    limit = size_bytes
    if bits is not None:
        limit = int((bits + _BITS_ROUNDING) * num_weights / 8)
    assert limit is not None
    choose(choices, limit, num_weights)  # a small budget is refused before the work
    _measure(source, plans, choices, resources, progress)
    source.guard.check_unchanged()
    choose(choices, limit, num_weights)

    def total(names: Sequence[str]) -> dict[str, Any]:
        pairs = [*zip(choices, names, strict=True)]
        size = sum(choice.sizes[name] for choice, name in pairs)
        loss = math.fsum(choice.losses[name] for choice, name in pairs)
        return {"size_bytes": size, "bits_per_weight": 8 * size / num_weights, "loss": loss}

    layers: dict[str, dict[str, Any]] = {}
    for choice in choices:
        each = {
            name: {"size_bytes": size, "loss": choice.losses[name]}
            for name, size in choice.sizes.items()
        }
        result = {"chosen": choice.chosen, **each[choice.chosen], "candidates": each}
        layers.setdefault(choice.layer, {})[choice.gemm] = result
    given = {**given, "target": target.name, "dtype": first.spec.param_dtype}
    write_whole(place.parent, place.name, _recipe(choices, given, out).encode())
    return {
        "kind": "allocation",
        "source": first.source.origin,
        "out": str(out),
        "budget": {"size_bytes": size_bytes, "bits": bits, "limit_bytes": limit},
        "chosen": total([choice.chosen for choice in choices]),
        "uniform": {name: total([name] * len(choices)) for name in plans},
        "layers": layers,
    }


# --- candidates and the choice


def _plan_candidates(
    source: Source, options: ConversionOptions, target: GpuTarget, names: Sequence[str] | None
) -> dict[str, ConversionPlan]:
    """Plan a conversion to each candidate. names: None for the source's own schemas and DEFAULT_CANDIDATES.

    One that the target, the activations or the ranks do not allow is refused if it was named, else left out.
    """
    candidates = [*(names or ())]
    if names is None:
        with suppress(RequestError):
            own = plan_conversion(replace(options, schema=None), source, target)
            options = replace(options, dtype=own.spec.param_dtype)
            for planned in own.layers:
                candidates += [schema.name for schema in planned.encoding.schema.each]
        candidates += DEFAULT_CANDIDATES
    for name in candidates:
        if "+" in name or name in (SOURCE, LEFT):
            raise RequestError(
                "A candidate is one schema: it is chosen for w13 and w2 apart.",
                where=f"--candidates {name}",
                expected="names such as mxfp4,int4-g32,fp8",
                remedy="Name each schema alone; those that keep a quantized source's codes are the default's first.",
            )
    plans: dict[str, ConversionPlan] = {}
    for name in dict.fromkeys(candidates):
        try:
            schema = resolve_schema(name)
            plans[name] = plan_conversion(replace(options, schema=schema), source, target)
        except RequestError as error:
            if names is not None or (not plans and name == candidates[-1]):
                error.where = f"--candidates {name}: {error.where}"
                raise
    return plans


def _gemm_bytes(planned: MoeLayerPlan, gemm: str) -> int:
    """Return the bytes of one GEMM's tensors in the files of all ranks."""
    prefix = f"{planned.name}.{gemm}_"
    tensors = [tensor for file in planned.files for tensor in file.tensors.items()]
    return sum(ref.num_bytes for name, ref in tensors if name.startswith(prefix))


def choose(choices: Sequence[GemmChoice], limit: int, num_weights: int) -> None:
    """Choose a candidate for each GEMM, of small loss together, within a limit of bytes.

    Every GEMM begins with its smallest candidate. As long as a change fits, the one is made that gains most for each
    byte. No choice within the limit loses less than this one by the gain of one change or more.
    num_weights: of all GEMMs. Raises RequestError where the smallest candidates need more.
    """
    for choice in choices:
        choice.chosen = min(choice.sizes, key=choice.sizes.__getitem__)
    least = sum(choice.sizes[choice.chosen] for choice in choices)
    if least > limit:
        raise RequestError(
            "The budget is too small for these candidates.",
            where="--size, --bits",
            expected=f"at least {least} bytes of the experts' tensors, or {8 * least / num_weights:.2f} bits a weight",
            found=f"{limit} bytes",
            remedy="Allow more, or add candidates with fewer bits.",
        )
    room = limit - least

    def changes() -> Iterator[tuple[float, int, str, GemmChoice]]:
        for choice in choices:
            for name, size in choice.sizes.items():
                cost = size - choice.sizes[choice.chosen]
                gain = choice.losses[choice.chosen] - choice.losses[name]
                if gain > 0 and cost <= room:
                    yield gain / max(cost, 1), cost, name, choice

    while change := max(changes(), key=lambda change: change[0], default=None):
        _, cost, name, choice = change
        choice.chosen = name
        room -= cost


# --- losses


def _measure(
    source: Source,
    plans: Mapping[str, ConversionPlan],
    choices: Sequence[GemmChoice],
    resources: Resources,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Set the losses of each GEMM.

    A layer that transformers does not run (for multi-token prediction) counts as the layer before it.
    """
    first = next(iter(plans.values()))
    layers = sorted(first.layers, key=lambda planned: planned.layer.index)
    every = [planned for plan in plans.values() for planned in plan.layers]
    staging = plan_staging(every, resources, reads_ahead=False, has_model_limit=True)
    sizes = {planned.name: planned.num_bytes_read for planned in layers}
    meter = Meter(sum(sizes.values()), len(layers), progress, sizes)
    before: list[GemmChoice] = []
    with (
        calibrated_inputs(source, first, layers, resources, staging) as inputs,
        bounded_gpu(resources, "Then run the same command again."),
    ):
        assert inputs is not None
        inputs.announce = meter.announce
        for planned in layers:
            inputs.expect(planned.layer, 1)
        for planned in layers:
            layer = planned.layer
            activations = inputs.of(planned.layer)
            own = [choice for choice in choices if choice.layer == layer.name]
            encodings = [plan.encoding for plan in every if plan.name == layer.name]
            if not isinstance(activations, ExpertActivations):
                for choice, measured in zip(own, before, strict=True):
                    choice.losses = measured.losses
            else:
                for begin in range(0, layer.num_experts, staging.num_experts):
                    experts = range(layer.num_experts)[begin : begin + staging.num_experts]
                    batch = _Batch(source, layer, experts, activations, resources.device)
                    losses = batch.losses(encodings, staging.num_lanes)
                    for name, lost in zip(plans, losses, strict=True):
                        for choice, loss in zip(own, lost, strict=True):
                            choice.losses[name] += loss
            before = own
            meter.advance(layer.name, planned.num_bytes_read)
            meter.finish(layer.name)


class _Batch:
    """Some experts of a layer, and what they are given."""

    def __init__(
        self,
        source: Source,
        layer: MoeLayer,
        experts: range,
        activations: ExpertActivations,
        device: torch.device,
    ) -> None:
        """Read the experts' weights and biases to the device."""
        self.layer = layer
        self.experts = experts
        self.activations = activations
        self.device = device
        matrices = [source.read_expert(layer, expert, layer.roles, device) for expert in experts]
        self.weights: dict[str, torch.Tensor] = {}
        for role in layer.roles:
            values = [expert[role].values().float() for expert in matrices]
            biases = [bias for expert in matrices if (bias := expert[role].bias) is not None]
            self.weights[role] = torch.stack(values)
            if biases:
                self.weights[f"b{role[1:]}"] = torch.stack(biases).float()
        self.hidden = activations.hidden_products(experts)
        self.products = activations.intermediate_products(experts, self.weights, layer.activation)

    def losses(
        self, encodings: Sequence[LayerEncoding], num_threads: int
    ) -> list[tuple[float, ...]]:
        """Return what each candidate changes in the outputs, by its w13 and by its w2: the mean over all tokens."""
        results = pipeline(encodings, self._lost, num_threads, num_threads, runs_torch=True)
        with closing(results):
            return [*results]

    def _lost(self, encoding: LayerEncoding) -> tuple[float, ...]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        quantized = dict(self.weights)
        for roles in self.layer.coupled_roles:
            gemm = encoding.of(roles[0])
            products = self.hidden
            if gemm.is_direct:  # kept codes change nothing
                continue
            if roles == ("w2",):
                products = self.products.resized(encoding.shapes["w2"][1])
            stacks = [resized(self.weights[role], encoding.shapes[role]) for role in roles]
            results = quantize_by_outputs(stacks, gemm.schema, gemm.param_dtype, products)
            for role, result in zip(roles, results, strict=True):
                values = decoded(result.tensors, gemm.schema)
                quantized[role] = resized(values, self.layer.shape(role))
        total = torch.zeros(len(GEMMS), dtype=torch.float64, device=self.device)
        for index, expert in enumerate(self.experts):
            own = {name: stack[index] for name, stack in self.weights.items()}
            changed = {name: stack[index] for name, stack in quantized.items()}
            total += self.activations.output_errors(expert, own, changed, self.layer.activation)
        return tuple((total / len(self.activations.x)).tolist())


# --- the recipe


def _recipe(choices: Sequence[GemmChoice], options: Mapping[str, Any], out: Path) -> str:
    """Return the text of the recipe. options: beside the schemas. out: the recipe's path."""

    def toml(value: Any) -> str:
        """Return a text, a whole number or a truth value; paths relative to the recipe's folder."""
        is_file = isinstance(value, Path) or str(value).endswith(".toml")
        if is_file and os.path.lexists(value):  # else a packaged schema, by its name
            value = os.path.relpath(value, out.parent)
        return json.dumps(getattr(value, "name", value)).replace("\x7f", "\\u007f")

    lines = [_HEAD, f"schema = {toml(choices[0].chosen)}"]
    lines += [f"{name} = {toml(value)}" for name, value in options.items()]
    for choice in choices:
        lines += ["[[override]]", f"blocks = {toml(glob.escape(choice.layer))}"]
        loss = choice.losses[choice.chosen]
        lines.append(f"{choice.gemm}.schema = {toml(choice.chosen)}  # loss {loss:.2g}")
    return "\n".join(lines) + "\n"
