"""Allocate schemas to the GEMMs of a source's MoE layers: measure candidates, choose, and write a recipe.

One pass of transformers over a text gives the inputs of each layer's experts. A candidate is quantized as a calibrated
conversion quantizes it. Its loss in a GEMM is what it changes in the experts' outputs, relative to the hidden state
after the layer, squared: the mean over the tokens. The losses of all GEMMs together stand for the model's.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hqconv.calibration.gptq import quantize_by_outputs
from hqconv.calibration.inputs import LayerInputs
from hqconv.conversion.convert import calibrated_inputs
from hqconv.conversion.encode import coupled_roles
from hqconv.conversion.encode_batch import Batch, split_unit
from hqconv.conversion.resources import Resources, bounded_gpu, plan_staging
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import printable_line
from hqconv.formats.source_matrix import resized
from hqconv.io.durable_files import FileKind, output_file, write_whole
from hqconv.io.pipeline import pipeline
from hqconv.models.source_protocol import Source
from hqconv.planning.allocation import Candidates, Gemm, Option, choose, gemm_bytes, limit_bytes
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.planning.plan import ConversionPlan, plan_conversion
from hqconv.quantization.torch_ops import decoded
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.options import BUILTIN, LayerChoice, Override, conversion_options
from hqconv.schemas.weight_schema import resolve_schema

_HEAD = "a schema for each GEMM, chosen by measured losses"
_RECIPE = FileKind("a recipe of hqconv allocate", lambda head: _HEAD.encode() in head)

Losses = Mapping[Gemm, Mapping[str, float]]  # of a GEMM under each candidate


@dataclass(frozen=True)
class AllocationReport:
    """The result of an allocation: the recipe's path, and the document with the choice and all losses."""

    out: Path
    document: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {**self.document, "out": str(self.out), "warnings": list(self.warnings)}


def run_allocation(
    source: Source,
    candidates: Candidates,
    budget: tuple[int | None, float | None],
    given: Mapping[str, Any],
    out: Path,
    resources: Resources,
    progress: Callable[[Progress], None] | None = None,
) -> AllocationReport:
    """Measure the candidates, choose within the budget (bytes or bits), and write the recipe; see `hqconv.allocate`.

    given: the options of a conversion that are not the default, for the recipe.
    Raises RequestError for a budget that no choice keeps, OutputError for the recipe, and as a calibrated conversion.
    """
    place = output_file(out, "-o", _RECIPE, [source.root])
    first, costs, count = candidates.first, candidates.costs(), candidates.num_weights
    limit = limit_bytes(*budget, count)

    def options(losses: Losses) -> dict[Gemm, list[Option]]:
        return {
            gemm: [Option(of[name], losses[gemm][name], name) for name in of]
            for gemm, of in costs.items()
        }

    nothing = {gemm: dict.fromkeys(of, 0.0) for gemm, of in costs.items()}
    choose(options(nothing), limit, count)  # a budget that is too small is refused before the work
    calibrated = replace(
        candidates.options.calibrated(resources.device_name), schema=first.spec.schema
    )
    losses = _measure(
        source,
        candidates,
        plan_conversion(calibrated, source, first.spec.target),
        resources,
        progress,
    )
    source.guard.check_unchanged()
    room, size_bytes = limit, limit + 1
    while size_bytes > limit:  # the GEMMs of a layer share the padding of their intermediate size
        chosen = choose(options(losses), room, count)
        made = _planned(source, candidates, chosen)
        size_bytes = sum(gemm_bytes(one, gemm) for one in made.layers for gemm in GEMMS)
        room -= max(0, size_bytes - limit)
    document = _document(candidates, costs, losses, chosen)
    document |= {"budget": {"size_bytes": budget[0], "bits": budget[1], "limit_bytes": limit}}
    write_whole(place.parent, place.name, _recipe(document, candidates, given, out).encode())
    return AllocationReport(out, document, (*made.warnings, *made.notices))


def _planned(
    source: Source, candidates: Candidates, chosen: Mapping[Gemm, Option]
) -> ConversionPlan:
    """Plan the conversion that a recipe stands for, without its calibration."""
    schemas = {gemm: resolve_schema(option.name) for gemm, option in chosen.items()}
    overrides = [
        Override(
            one.name,
            (),
            LayerChoice(schemas[one.name, "w13"], schemas[one.name, "w2"]),
            where=one.name,
        )
        for one in candidates.first.layers
    ]
    options = replace(
        candidates.options, schema=candidates.first.spec.schema, overrides=tuple(overrides)
    )
    return plan_conversion(options, source, candidates.first.spec.target)


# --- losses


def _measure(
    source: Source,
    candidates: Candidates,
    plan: ConversionPlan,
    resources: Resources,
    progress: Callable[[Progress], None] | None,
) -> Losses:
    """Return the loss of each GEMM under each candidate. plan: of a calibrated conversion.

    A layer that transformers does not run (for multi-token prediction) counts as the mean of the others.
    """
    specs = {
        name: replace(one.spec, encoding=plan.spec.encoding)
        for name, one in candidates.plans.items()
    }
    layers = [
        replace(one, encoding=specs[name].encoding_of(one.layer))
        for name, found in candidates.plans.items()
        for one in found.layers
    ]
    staging = plan_staging(layers, resources, reads_ahead=False)
    meter = Meter(sum(one.num_bytes_read for one in plan.layers), len(plan.layers), progress)
    losses: dict[Gemm, dict[str, float]] = {}
    gpu = bounded_gpu(resources, "Then run the same command again.", is_calibrated=True)
    with calibrated_inputs(source, plan, plan.layers, resources, 1) as inputs, gpu:
        assert inputs is not None
        for one in plan.layers:
            inputs.expect(one.layer, 1)
        for planned in sorted(plan.layers, key=lambda one: one.layer.index):
            found = inputs.of(planned.layer)
            encodings = {name: spec.encoding_of(planned.layer) for name, spec in specs.items()}
            for batch in split_unit(planned, staging.num_experts, 1) if found is not None else ():
                assert found is not None
                assert isinstance(batch, Batch)
                lost = _lost(source, batch, encodings, found, resources.device, staging.num_lanes)
                for name, both in lost.items():
                    for gemm, loss in zip(GEMMS, both, strict=True):
                        of_gemm = losses.setdefault((planned.name, gemm), {})
                        of_gemm[name] = of_gemm.get(name, 0.0) + loss / len(found.x)
                meter.advance(planned.name, batch.num_bytes)
            meter.finish(planned.name)
    count = len(losses) // len(GEMMS)
    means = {
        gemm: {
            name: math.fsum(of[name] for (_, one), of in losses.items() if one == gemm) / count
            for name in specs
        }
        for gemm in GEMMS
    }
    return {gemm: losses.get(gemm, means[gemm[1]]) for gemm in candidates.costs()}


def _lost(
    source: Source,
    batch: Batch,
    encodings: Mapping[str, LayerEncoding],
    inputs: LayerInputs,
    device: torch.device,
    num_threads: int,
) -> dict[str, list[float]]:
    """Return what each candidate changes in the outputs of some experts, by its w13 and by its w2.

    encodings: candidate → of the batch's layer. Kept codes change nothing.
    """
    layer, experts = batch.planned.layer, batch.experts
    each = [source.read_expert(layer, expert, layer.roles, device) for expert in experts]
    stacks = {
        role: torch.stack([one[role].values().float() for one in each]) for role in layer.roles
    }
    for role in layer.roles:
        if biases := [bias.float() for one in each if (bias := one[role].bias) is not None]:
            stacks[f"b{role[1:]}"] = torch.stack(biases)
    down = inputs.of_intermediate(experts, stacks, layer.activation)
    sizes = {one.shapes["w2"][1] for one in encodings.values()}
    downs = {}  # with zeros for the columns that fill the last scale group
    for size in sizes:
        fit, held = (resized(one, (size, size)) for one in (down.fit, down.held))
        downs[size] = replace(down, fit=fit, held=held)

    def lost(name: str) -> list[float]:
        encoding, total = (
            encodings[name],
            torch.zeros(len(GEMMS), dtype=torch.float64, device=device),
        )
        other: dict[str, torch.Tensor] = {}
        for roles in coupled_roles(layer):
            of_gemm, is_down = encoding.of(roles[0]), roles == ["w2"]
            if of_gemm.is_direct:
                continue
            products = downs[encoding.shapes["w2"][1]] if is_down else inputs.of_hidden
            matrices = [resized(stacks[role], encoding.shapes[role]) for role in roles]
            found = quantize_by_outputs(matrices, of_gemm.schema, of_gemm.param_dtype, products)
            for role, one in zip(roles, found, strict=True):
                other[role] = resized(decoded(one.tensors, of_gemm.schema), layer.shape(role))
        for place, expert in enumerate(experts):
            own, changed = (
                {name: of[place] for name, of in one.items()} for one in (stacks, stacks | other)
            )
            total += inputs.output_errors(expert, own, changed, layer.activation)
        return total.tolist()

    def on_device(name: str) -> list[float]:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return lost(name)

    with closing(
        pipeline(encodings, on_device, num_threads, num_threads, runs_torch=True)
    ) as results:
        return dict(zip(encodings, results, strict=True))


# --- the result


def _document(
    candidates: Candidates,
    costs: Mapping[Gemm, Mapping[str, int]],
    losses: Losses,
    chosen: Mapping[Gemm, Option],
) -> dict[str, Any]:
    """Return the choice with all sizes and losses, and one schema for all GEMMs to compare with."""
    plan, spec = candidates.first, candidates.first.spec

    def point(names: Mapping[Gemm, str]) -> dict[str, Any]:
        size = sum(costs[gemm][name] for gemm, name in names.items())
        loss = math.fsum(losses[gemm][name] for gemm, name in names.items())
        return {
            "size_bytes": size,
            "bits_per_weight": 8 * size / candidates.num_weights,
            "loss": loss,
        }

    def of_gemm(gemm: Gemm) -> dict[str, Any]:
        each = {
            name: {"size_bytes": cost, "loss": losses[gemm][name]}
            for name, cost in costs[gemm].items()
        }
        return {"chosen": chosen[gemm].name, **each[chosen[gemm].name], "candidates": each}

    return {
        "kind": "allocation",
        "source": plan.source.origin,
        "target": spec.target.name,
        "dtype": spec.param_dtype,
        "input_schema": spec.inputs.name,
        "tp": spec.grid.tp,
        "ep": spec.grid.ep,
        "candidates": list(candidates.plans),
        "left_out": dict(candidates.left_out),
        "chosen": point({gemm: option.name for gemm, option in chosen.items()}),
        "uniform": {name: point(dict.fromkeys(costs, name)) for name in candidates.plans},
        "layers": {
            one.name: {gemm: of_gemm((one.name, gemm)) for gemm in GEMMS} for one in plan.layers
        },
    }


def _recipe(
    document: Mapping[str, Any], candidates: Candidates, given: Mapping[str, Any], out: Path
) -> str:
    """Return the text of the recipe. given: the options that are not the default. out: the recipe's path."""
    source, chosen = candidates.first.source, document["chosen"]
    schemas = {
        name: "+".join(dict.fromkeys(_beside(one["chosen"], out) for one in of.values()))
        for name, of in document["layers"].items()
    }
    base = Counter(schemas.values()).most_common(1)[0][0]
    options = {**given, "target": document["target"], "dtype": document["dtype"]}
    lines = [
        f"# {printable_line(source.repo_id or source.name)}: {_HEAD}. Use it with convert --config.",
        f"# {chosen['size_bytes']} bytes, {chosen['bits_per_weight']:.4f} bits per weight, loss {chosen['loss']:.3g}",
        f"schema = {_toml(base)}",
    ]
    for name, option in conversion_options().items():
        if option.in_recipes and (value := options.get(name)) is not None:
            is_file = option.is_path and value != BUILTIN
            value = (
                os.path.relpath(value, out.parent)
                if is_file
                else _beside(getattr(value, "name", value), out)
            )
            lines.append(f"{name} = {_toml(value)}")
    for name, of in document["layers"].items():
        figures = ", ".join(
            f"{gemm} {one['chosen']}, loss {one['loss']:.2g}" for gemm, one in of.items()
        )
        lines += ["", f"# {printable_line(name)}: {figures}"]
        if schemas[name] != base:
            pattern = "".join(f"[{char}]" if char in "*?[" else char for char in name)
            lines += [
                "[[override]]",
                f"blocks = {_toml(pattern)}",
                f"schema = {_toml(schemas[name])}",
            ]
    return "\n".join(lines) + "\n"


def _beside(value: Any, out: Path) -> Any:
    """Return a value as the recipe has it: the path of a schema's file is relative to the recipe's folder."""
    is_file = str(value).endswith(".toml") and os.path.lexists(
        value
    )  # else a packaged one, by its name
    return os.path.relpath(value, out.parent) if is_file else value


def _toml(value: Any) -> str:
    """Return a value of a TOML file: a text, a whole number or a truth value."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
