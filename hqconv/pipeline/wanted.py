"""What is to be made of a source, with what, and where: the options of a conversion, understood."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.artifact.opening import without_gc
from hqconv.errors import RequestError
from hqconv.pipeline.environment import local_place
from hqconv.pipeline.options import choose_device, default_out, parse_bytes
from hqconv.schemas.gpu_target import Target
from hqconv.schemas.grid import Grid
from hqconv.schemas.inputs import InputSchema, resolve_inputs
from hqconv.schemas.recipe import Choice, Override, assign
from hqconv.schemas.target import SOURCE, TargetSchema, resolve_schema

if TYPE_CHECKING:
    from hqconv.pipeline.resources import Resources
    from hqconv.pipeline.supply import CacheUse
    from hqconv.planning.plan import Plan
    from hqconv.sources.source import Headers


@dataclass(frozen=True)
class Wanted:
    """What is to be made of a source, before the source is looked at."""

    schema: str | Path | TargetSchema
    dtype: str | None
    grid: Grid
    target: Target
    layout: str
    inputs: str | Path | InputSchema
    overrides: tuple[Override, ...] = ()
    round_scales: bool = False
    quantizer: str = "rtn"
    importance: str | Path | None = None
    allow_unserved: bool = False

    @without_gc()
    def plan(self, source: Headers) -> Plan:
        """The plan for a source. Raises what `convert` raises before it writes."""
        from hqconv.planning.checks import refuse_unserved
        from hqconv.planning.importance import read_importance
        from hqconv.planning.own_schema import plain_blocks
        from hqconv.planning.plan import make_plan
        from hqconv.planning.request import make_request

        chosen = self.schema if isinstance(self.schema, TargetSchema) else None
        if chosen is None and self.schema != SOURCE:
            chosen = resolve_schema(str(self.schema))
        inputs = self.inputs if isinstance(self.inputs, InputSchema) else resolve_inputs(str(self.inputs))
        experts = source.map_experts()
        choices = assign(self.overrides, {block.name: block.layer for block in experts.blocks})
        left = {name for name, choice in choices.items() if choice.is_left}
        if chosen is None:
            left |= {name for name in plain_blocks(experts) if choices.get(name, Choice()).schema is None}
        if left:
            experts = experts.without(left, source.tensors)
        words = {"target": self.target, "layout": self.layout, "inputs": inputs, "quantizer": self.quantizer}
        request = make_request(
            experts,
            source.config,
            chosen,
            self.dtype,
            self.grid,
            choices,
            round_scales=self.round_scales,
            importance=None if self.importance is None else read_importance(Path(self.importance)),
            **words,
        )
        planned = make_plan(source, experts, request)
        if not self.allow_unserved:
            refuse_unserved(planned.experts, request)
        return planned


def place_of(planned: Plan, out: str | Path | None) -> Path:
    """Where an artifact goes: `out`, or the folder that is named after model and request."""
    if out is not None:
        return Path(out)
    request = planned.request
    name = SOURCE if request.must_be_direct else request.schema.name
    return default_out(planned.source.name, name, request)


def cache_use(limit: str | int | None, *, keep_source: bool) -> CacheUse:
    """What a conversion may take of the Hub's cache. Raises RequestError for a limit on what is to be kept."""
    from hqconv.pipeline.supply import CacheUse

    if limit is not None and keep_source:
        what, remedy = "--cache-limit and --keep-source exclude each other.", "Give one of the two."
        raise RequestError(what, remedy=remedy)
    return CacheUse(None if limit is None else parse_bytes(limit, "--cache-limit"), keep_source)


def resources_of(
    device: str,
    max_memory: str | int,
    max_gpu_memory: str | int | None,
    threads: int | None,
    *,
    in_team: bool = False,
) -> Resources:
    """What may be used; a process of a team has a GPU of its own, and its part of the processors."""
    from hqconv.pipeline.resources import Resources, default_threads

    number, num_here = local_place() if in_team else (0, 1)
    gpu_bytes = None if max_gpu_memory is None else parse_bytes(max_gpu_memory, "--max-gpu-memory")
    num_threads = max(1, default_threads() // num_here) if threads is None else threads
    return Resources(choose_device(device, number), parse_bytes(max_memory), num_threads, gpu_bytes)
