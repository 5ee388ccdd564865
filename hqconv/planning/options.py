"""Parsed options of a conversion, from the API, the command line or a recipe; the source is not opened yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast

from hqconv.planning.encoding import EncodingOptions
from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16, InputSchema, resolve_inputs
from hqconv.schemas.options import ConversionArguments, conversion_options
from hqconv.schemas.overrides import Override
from hqconv.schemas.weight_schema import SOURCE, WeightSchema, resolve_schema


@dataclass(frozen=True)
class ConversionOptions:
    """Parsed conversion options: weight schema, parallel grid, GPU target, activations, encoding, overrides.

    schema, dtype: None for the source's own. target: sm75 …, None for the GPU of this machine. cuda: the version of the
    serving machine's compiler, None where the layout does not depend on it.
    """

    schema: WeightSchema | None
    dtype: str | None = None
    grid: Grid = field(default_factory=Grid)
    target: str | None = None
    cuda: str | None = None
    layout: str = KERNEL
    inputs: InputSchema = A16
    encoding: EncodingOptions = field(default_factory=EncodingOptions)
    overrides: tuple[Override, ...] = ()
    allow_unserved: bool = False

    @classmethod
    def parse(cls, **arguments: Unpack[ConversionArguments]) -> ConversionOptions:
        """Parse arguments of the API; missing ones have the defaults of `conversion_options`.

        Raises TypeError for unknown names, RequestError for values that no conversion can have, and InputError for a
        damaged importance file.
        """
        known = conversion_options()
        if unknown := arguments.keys() - known.keys():
            raise TypeError(f"unexpected keyword argument '{min(unknown)}'")
        if "schema" not in arguments:
            raise TypeError("missing 1 required keyword-only argument: 'schema'")
        values: dict[str, Any] = {name: option.default for name, option in known.items()} | arguments
        given = cast(ConversionArguments, values)
        inputs = given["input_schema"]
        return cls(
            schema=_weight_schema(given["schema"]),
            dtype=given["dtype"],
            grid=Grid(given["tp"], given["ep"], given["expert_placement"], given["redundant_experts"]),
            target=given["target"],
            cuda=given["cuda"],
            layout=given["layout"],
            inputs=inputs if isinstance(inputs, InputSchema) else resolve_inputs(str(inputs)),
            encoding=EncodingOptions.parse(given),
            overrides=tuple(given["overrides"]),
            allow_unserved=given["allow_unserved"],
        )


def _weight_schema(schema: str | Path | WeightSchema) -> WeightSchema | None:
    """Return the schema of `--schema`, None for the source's own."""
    if isinstance(schema, WeightSchema):
        return schema
    return None if schema == SOURCE else resolve_schema(str(schema))
