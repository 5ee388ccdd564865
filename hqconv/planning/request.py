"""What a user asked for, with what was left open filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hqconv.errors import RequestError
from hqconv.experts.map import ExpertMap
from hqconv.planning.encoding import QUANTIZERS, RTN
from hqconv.planning.own_schema import source_param_dtype, source_schema
from hqconv.schemas import artifact
from hqconv.schemas.family import text_config
from hqconv.schemas.grid import Grid
from hqconv.schemas.target import PARAM_DTYPES, TargetSchema


@dataclass(frozen=True)
class Request:
    """What the user asked for, resolved: everything that decides the bytes of the artifact.

    `must_be_direct` decides none: it refuses what cannot keep the source's codes and scales.
    """

    schema: TargetSchema
    param_dtype: str
    sm_version: int
    grid: Grid = field(default_factory=Grid)
    layout: str = artifact.KERNEL
    input_schema: str = "a16"
    must_be_direct: bool = False
    quantizer: str = RTN

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--dtype", self.param_dtype, PARAM_DTYPES),
            ("--layout", self.layout, (artifact.KERNEL, artifact.CHECKPOINT)),
            ("--quantizer", self.quantizer, QUANTIZERS),
        ):
            if value not in known:
                what, expected = "The option does not know this value.", ", ".join(known)
                raise RequestError(what, where=option, expected=expected, found=value)


def default_param_dtype(config: Mapping[str, Any], experts: ExpertMap) -> str:
    """The parameter dtype a checkpoint implies: its config's, else its experts'; float32 becomes bfloat16."""
    for words in (config, text_config(config)):
        for key in ("torch_dtype", "dtype"):
            if words.get(key) in PARAM_DTYPES:
                return str(words[key])
            if words.get(key) == "float32":
                return "bfloat16"
    return "float16" if experts.blocks[0].dtype == "F16" else "bfloat16"


def make_request(
    experts: ExpertMap,
    config: Mapping[str, Any],
    schema: TargetSchema | None,
    param_dtype: str | None,
    grid: Grid,
    **words: Any,
) -> Request:
    """A request with what was left open filled in.

    `schema`: None for the source's own; `param_dtype`: None for the source's own; `words` are the other
    fields of `Request`. Raises RequestError as `source_schema` does.
    """
    own_dtype = source_param_dtype(experts) if schema is None else None
    dtype = param_dtype if param_dtype is not None else own_dtype or default_param_dtype(config, experts)
    chosen = schema or source_schema(experts, dtype, grid.tp)
    return Request(chosen, dtype, grid=grid, must_be_direct=schema is None, **words)
