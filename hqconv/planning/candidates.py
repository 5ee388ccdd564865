"""Candidates of an allocation: the schemas that each MoE layer may get, planned one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hqconv.errors import RequestError
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.planning.plan import ConversionPlan, plan_conversion
from hqconv.planning.source_schema import source_param_dtype
from hqconv.planning.spec import ConversionOptions, default_param_dtype
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import SOURCE, WeightSchema, resolve_schema

# From 2.6 to 8 bits per weight. Of presets of one size the more exact ones, and those that any server runs.
DEFAULT_CANDIDATES = (
    *("int2-g32-zp", "int3-g128", "int3-g32-e4m3", "int3-g32", "int4", "int4-g64", "int4-g32-e4m3", "mxfp4"),
    *("int4-g32", "int4-g16-e4m3", "nvfp4", "int5-g128", "int6-g128", "fp6-e2m3", "fp8", "int8"),
)


@dataclass(frozen=True)
class Candidate:
    """A schema for some or all layers. name: as it was given; schema: None for the source's own.

    layers: the plan of each layer that may get the schema.
    """

    name: str
    schema: WeightSchema | None
    plan: ConversionPlan

    @cached_property
    def layers(self) -> dict[str, MoeLayerPlan]:
        return {layer.name: layer for layer in self.plan.layers}


@dataclass(frozen=True)
class Candidates:
    """All candidates, in the order of preference among equals. left_out: name → reason, of default ones."""

    each: tuple[Candidate, ...]
    options: ConversionOptions
    left_out: Mapping[str, str]

    @cached_property
    def layers(self) -> dict[str, dict[str, MoeLayerPlan]]:
        """Layer → name of a candidate → the layer's plan, in the order of the model."""
        found: dict[str, dict[str, MoeLayerPlan]] = {}
        order = {name: number for one in self.each for number, name in enumerate(one.layers)}
        for name in sorted(order, key=lambda name: (self._first(name).layer.index, order[name])):
            found[name] = {one.name: one.layers[name] for one in self.each if name in one.layers}
        return found

    def _first(self, name: str) -> MoeLayerPlan:
        return next(one.layers[name] for one in self.each if name in one.layers)

    def __getitem__(self, name: str) -> Candidate:
        return next(one for one in self.each if one.name == name)


def plan_candidates(
    options: ConversionOptions, names: Sequence[str] | None, source: Source, target: GpuTarget
) -> Candidates:
    """Plan a conversion under every candidate. names: None for the source's own schema and DEFAULT_CANDIDATES.

    A candidate that the target, the activations or the ranks do not allow is refused if it was named, else left out.
    Raises RequestError then, and where no candidate is left, and InputError for the source.
    """
    experts = source.map_experts()
    given = names or [*_own_schemas(options, source, target), *DEFAULT_CANDIDATES]
    if options.dtype is None:
        own = source_param_dtype(experts) if SOURCE in given else None
        options = replace(options, dtype=own or default_param_dtype(source.config, experts))
    found: list[Candidate] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(given):
        try:
            schema = None if name == SOURCE else resolve_schema(name)
            plan = plan_conversion(replace(options, schema=schema), source, target)
        except RequestError as error:
            if names is not None:
                where = f"--candidates {name}" + (f": {error.where}" if error.where else "")
                parts = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
                raise RequestError(error.what, where=where, **parts) from error
            left_out[name] = " ".join(filter(None, [error.what, f"({error.found})" if error.found else ""]))
            continue
        if not any(_is_same(one, plan) for one in found):
            found.append(Candidate(name, schema, plan))
    if not found:
        name, reason = next(iter(left_out.items()))
        raise RequestError(
            "No candidate fits this request.",
            where="--candidates",
            found=f"{name}: {reason}",
            remedy="Name some with --candidates.",
        )
    return Candidates(tuple(found), options, left_out)


def _own_schemas(options: ConversionOptions, source: Source, target: GpuTarget) -> list[str]:
    """Return the candidates that keep a quantized source's codes: `source`, or presets that keep most of them.

    Where gate and up may have different tensor-level scales, `source` would refuse an expert only when it is read.
    """
    try:
        plan = plan_conversion(replace(options, schema=None), source, target)
    except RequestError:
        return []
    schemas = [layer.encoding.schema for layer in plan.layers]
    if not any(schema.is_coupled for schema in schemas):
        return [SOURCE]
    return [name for name in dict.fromkeys(schema.name for schema in schemas) if name != SOURCE]


def _is_same(known: Candidate, plan: ConversionPlan) -> bool:
    """Return whether an earlier candidate gives every layer the same schema: `source` and its own preset."""
    fields = [
        {layer.name: layer.encoding.schema.humming_fields() for layer in one.layers} for one in (known.plan, plan)
    ]
    return fields[0] == fields[1]
