"""Conversion options, and the spec that they resolve to for one source: every value that decides the bytes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Unpack

from hqconv.errors import RequestError
from hqconv.models.expert_map import ExpertMap
from hqconv.models.linear_layers import FUSED, is_linear_group
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.calibration import CalibrationText
from hqconv.planning.layer_encoding import (
    EncodingOptions,
    LayerEncoding,
    encoding_of,
    own_schema_text,
    source_param_dtype,
    source_schemas,
)
from hqconv.schemas.artifact_names import CHECKPOINT, GEMMS, KERNEL, text_config
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GpuTarget, class_of
from hqconv.schemas.grid import EVEN, Grid, is_split_even
from hqconv.schemas.input_schema import A16, InputSchema, KernelSpec, LayerSpec, resolve_inputs
from hqconv.schemas.options import (
    GPTQ,
    LEFT,
    ConversionArguments,
    ConversionKeywords,
    LayerChoice,
    Override,
    group_by_schema,
)
from hqconv.schemas.tensors import num_bits
from hqconv.schemas.weight_schema import (
    PARAM_DTYPES,
    PRESETS,
    RECOMMENDED,
    SOURCE,
    LayerSchema,
    SchemaPair,
    WeightSchema,
    resolve_layer_schema,
    resolve_schema,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DenseSchemas:
    """Schemas of the linear layers beside the experts.

    schema: None where they are copied unchanged. patterns: of names, with the schema of these layers, or None; the
    last that fits counts.
    """

    schema: WeightSchema | None = None
    patterns: tuple[tuple[str, WeightSchema | None], ...] = ()

    @classmethod
    def parse(cls, given: ConversionArguments) -> DenseSchemas:
        """Return the options of the API's arguments. Raises RequestError for unknown schemas."""
        patterns = tuple(
            (pattern, _dense_schema(name)) for pattern, name in (given.dense_layers or {}).items()
        )
        return cls(None if given.dense is None else _dense_schema(given.dense), patterns)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any] | None) -> DenseSchemas:
        """Read `to_dict`'s document, if there is one. Raises HqconvError, or Python's errors, for another one."""
        if document is None:
            return cls()
        schemas = {
            name: None if fields is None else WeightSchema(name=name, **fields)
            for name, fields in document["schemas"].items()
        }
        patterns = tuple((pattern, schemas[name]) for pattern, name in document["layers"])
        return cls(schemas[document["schema"]], patterns)

    def to_dict(self) -> dict[str, Any]:
        """Return the schemas for JSON."""
        schemas = {
            LEFT if schema is None else schema.name: schema and schema.to_dict()
            for schema in (self.schema, *(schema for _, schema in self.patterns))
        }
        layers = [
            [pattern, LEFT if schema is None else schema.name] for pattern, schema in self.patterns
        ]
        return {
            "schema": LEFT if self.schema is None else self.schema.name,
            "layers": layers,
            "schemas": schemas,
        }

    @property
    def used(self) -> list[WeightSchema]:
        """The distinct schemas."""
        schemas = dict.fromkeys((self.schema, *(schema for _, schema in self.patterns)))
        return [schema for schema in schemas if schema is not None]

    def of(self, group: str) -> WeightSchema | None:
        """Return the schema of a linear group, by its name or those of its modules; None where it is copied."""
        parent, _, name = group.rpartition(".")
        names = [group, *(f"{parent}.{module}" for module in FUSED.get(name, ()))]
        found = self.schema
        for pattern, schema in self.patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                found = schema
        return found

    def summary(
        self, groups: Iterable[tuple[str, str, Iterable[Sequence[int]]]]
    ) -> dict[str, Any] | None:
        """Return numbers of linear layers by schema, and their bytes before and after; None where there are none.

        groups: name, dtype in the source, shapes of the matrices.
        """
        counts: Counter[str] = Counter()
        bits_in = bits_out = 0.0
        for name, dtype, shapes in groups:
            schema = self.of(name)
            assert schema is not None
            num_weights = sum(map(math.prod, shapes))
            counts[schema.name] += 1
            bits_in += num_weights * num_bits(dtype)
            bits_out += num_weights * schema.bits_per_weight()
        num_bytes = {"num_bytes_in": int(bits_in // 8), "num_bytes_out": int(bits_out // 8)}
        return {"layers": dict(counts), **num_bytes} if counts else None

    def __bool__(self) -> bool:
        return self != DenseSchemas()


def _dense_schema(name: str | Path | WeightSchema) -> WeightSchema | None:
    if isinstance(name, WeightSchema):
        return name
    return None if name == LEFT else resolve_schema(str(name))


@dataclass(frozen=True)
class ConversionOptions:
    """Parsed conversion options: weight schema, parallel grid, GPU target, activations, encoding, overrides.

    schema, dtype: None for the source's own. target: a GPU's name or sm75 …, None for the GPU of this machine. cuda:
    the version of the serving machine's compiler, None where the layout does not depend on it. is_schema_open: no
    schema was named, and `with_schema` may replace None.
    """

    schema: LayerSchema | None
    dtype: str | None = None
    grid: Grid = field(default_factory=Grid)
    target: str | None = None
    cuda: str | None = None
    layout: str = KERNEL
    inputs: InputSchema = A16
    encoding: EncodingOptions = field(default_factory=EncodingOptions)
    calibrate: CalibrationText | None = None
    overrides: tuple[Override, ...] = ()
    dense: DenseSchemas = DenseSchemas()
    allow_unserved: bool = False
    is_schema_open: bool = False

    @classmethod
    def parse(cls, **arguments: Unpack[ConversionKeywords]) -> ConversionOptions:
        """Parse arguments of the API; missing ones have their defaults.

        Raises TypeError for unknown names, and RequestError for values that no conversion can have.
        """
        given = ConversionArguments(**arguments)
        inputs = given.input_schema
        return cls(
            schema=_weight_schema(given.schema),
            is_schema_open=given.schema is None,
            dtype=given.dtype,
            grid=Grid(
                given.tp, given.ep, given.expert_placement, given.redundant_experts, given.tp_split
            ),
            target=given.target,
            cuda=given.cuda,
            layout=given.layout,
            inputs=inputs if isinstance(inputs, InputSchema) else resolve_inputs(str(inputs)),
            encoding=EncodingOptions.parse(given),
            calibrate=CalibrationText.parse(given),
            overrides=tuple(given.overrides),
            dense=DenseSchemas.parse(given),
            allow_unserved=given.allow_unserved,
        )

    def calibrated(self, device: str) -> ConversionOptions:
        """Return the options with the calibration in `encoding`, if one is asked for. device: cpu or cuda:N."""
        if self.calibrate is None:
            return self
        calibration = self.calibrate.calibration(device)
        return replace(
            self, encoding=replace(self.encoding, quantizer=GPTQ, calibration=calibration)
        )

    def with_schema(
        self, experts: ExpertMap, config: Mapping[str, Any], target: GpuTarget
    ) -> ConversionOptions:
        """Return the options with a schema where none was named, and log which and why.

        It is the source's own where some kernel reads the codes of quantized experts, else the recommended one.
        """
        if not self.is_schema_open:
            return self
        own_dtype = source_param_dtype(experts) or default_param_dtype(config, experts)
        quantized = [layer for layer in experts.layers if not layer.format.is_float]
        if quantized and own_schema_text(experts, own_dtype):
            _LOG.warning(
                "Schema source: the experts are quantized already (%s); codes and scales are kept.",
                quantized[0].format.describe(),
            )
            return replace(self, is_schema_open=False)
        found = recommended_schema(target, self.dtype or own_dtype, self.inputs, self.layout)
        schema = found or resolve_schema(RECOMMENDED[0])  # its refusal says what runs
        _LOG.warning(
            "Schema %s, the recommended one for %s%s; `hqconv schemas` shows others.",
            schema.name,
            target.name if self.layout == KERNEL else ENGINE.name,
            ", since no kernel reads the source's codes" if quantized else "",
        )
        return replace(self, schema=schema, is_schema_open=False)


def _weight_schema(schema: str | Path | LayerSchema | None) -> LayerSchema | None:
    """Return the schema of `--schema`, None for the source's own, and where none is named."""
    if schema is None or isinstance(schema, WeightSchema | SchemaPair):
        return schema
    return None if schema == SOURCE else resolve_layer_schema(str(schema))


def recommended_schema(
    target: GpuTarget, param_dtype: str, inputs: InputSchema, layout: str
) -> WeightSchema | None:
    """Return the first schema that runs, or None: of the target's class for fp8 activations, `RECOMMENDED`, presets."""
    from hqconv.kernel_layout.transform import why_not

    is_fp8 = (inputs.a_dtype or "").startswith("float8")
    of_class = class_of(target).fp8_schema if is_fp8 else None
    for name in filter(None, (of_class, *RECOMMENDED, *PRESETS)):
        schema = resolve_schema(name)
        if layout == CHECKPOINT:
            obstacle = ENGINE.checkpoint_layout_obstacle(schema, param_dtype)
        else:
            obstacle = why_not(KernelSpec(schema, param_dtype, target, inputs))
        if obstacle is None:
            return schema
    return None


@dataclass(frozen=True)
class ConversionSpec:
    """Conversion options resolved against one source: every value that decides the bytes of the artifact.

    `schema` and `inputs` are of all layers but those in `of_layers`, which have a spec of their own.
    `must_be_direct` changes no bytes: a GEMM that cannot keep the source's codes and scales is refused, except the
    GEMMs (layer, w13 or w2) `renamed`, whose schema an override names.
    """

    schema: LayerSchema
    param_dtype: str
    target: GpuTarget
    grid: Grid = field(default_factory=Grid)
    layout: str = KERNEL
    inputs: InputSchema = A16
    must_be_direct: bool = False
    of_layers: Mapping[str, LayerSpec] = field(default_factory=dict)
    encoding: EncodingOptions = field(default_factory=EncodingOptions)
    renamed: frozenset[tuple[str, str]] = frozenset()
    dense: DenseSchemas = DenseSchemas()

    @property
    def layer_spec(self) -> LayerSpec:
        """Kernel specs of the layers without an override."""
        return LayerSpec(self.schema, self.param_dtype, self.target, self.inputs)

    def layer_spec_of(self, layer: str) -> LayerSpec:
        """Return the kernel specs of one layer, or linear group."""
        if is_linear_group(layer):
            schema = self.dense.of(layer)
            return replace(self.layer_spec, schema=schema or self.schema, inputs=A16)
        return self.of_layers.get(layer, self.layer_spec)

    def otherwise(self) -> dict[str, list[str]]:
        """Return the layers that differ from `layer_spec`, by schema and activations: see `group_by_schema`."""
        return group_by_schema(
            (name, one.schema.name, one.inputs.name) for name, one in self.of_layers.items()
        )

    def encoding_of(self, layer: MoeLayer) -> LayerEncoding:
        """Return the encoding of one layer."""
        schema = self.layer_spec_of(layer.name).schema
        kept = [
            gemm for gemm in GEMMS if self.must_be_direct and (layer.name, gemm) not in self.renamed
        ]
        return encoding_of(layer, schema, self.param_dtype, self.encoding, must_be_direct=kept)

    def static_layers(self, experts: ExpertMap) -> list[MoeLayer]:
        """Return the layers whose activation scales are carried into the artifact."""
        return [
            layer for layer in experts.layers if self.layer_spec_of(layer.name).inputs.is_static
        ]

    def request(self, left: Iterable[str]) -> dict[str, Any]:
        """Return the options that decide the bytes of the artifact, by their names on the command line.

        left: layers that are copied unchanged.
        """
        layers = {
            name: {"schema": layer.schema.name, "input_schema": layer.inputs.name}
            for name, layer in self.of_layers.items()
        }
        return {
            "schema": self.schema.name,
            "input_schema": self.inputs.name,
            "target": self.target.name,
            "cuda": self.target.cuda_name,
            "dtype": self.param_dtype,
            "layout": self.layout,
            "tp": self.grid.tp,
            "tp_split": self.grid.split,
            "ep": self.grid.ep,
            "expert_placement": self.grid.placement,
            "redundant_experts": self.grid.redundant,
            **self.encoding.request(),
            "overrides": layers | dict.fromkeys(left, LEFT),
            **({"dense": self.dense.to_dict()} if self.dense else {}),
        }

    @property
    def kernel_specs(self) -> list[KernelSpec]:
        """The distinct kernel specs of all GEMMs, the first of them those of `layer_spec`."""
        return list(
            dict.fromkeys(
                one for spec in (self.layer_spec, *self.of_layers.values()) for one in spec.each
            )
        )


def default_param_dtype(config: Mapping[str, Any], experts: ExpertMap) -> str:
    """Return the parameter dtype of a checkpoint's config, else of its experts; float32 becomes bfloat16."""
    for values in (config, text_config(config)):
        for key in ("torch_dtype", "dtype"):
            if values.get(key) in PARAM_DTYPES:
                return str(values[key])
            if values.get(key) == "float32":
                return "bfloat16"
    return "float16" if experts.layers[0].dtype == "F16" else "bfloat16"


def make_spec(
    options: ConversionOptions,
    experts: ExpertMap,
    config: Mapping[str, Any],
    target: GpuTarget,
    choices: Mapping[str, LayerChoice] | None = None,
) -> ConversionSpec:
    """Resolve options against a source: its own schema and parameter dtype where the options name none.

    choices: the overrides by layer, of the layers `experts`. Raises RequestError as `source_schemas` does, and if
    overrides leave no layer to `--schema source`.
    """
    from hqconv.kernel_layout.transform import needs_cuda

    own_dtype = source_param_dtype(experts) if options.schema is None else None
    dtype = (
        options.dtype
        if options.dtype is not None
        else own_dtype or default_param_dtype(config, experts)
    )
    choices = choices or {}
    renamed = frozenset(
        (name, gemm)
        for name, choice in choices.items()
        for gemm, schema in (("w13", choice.w13), ("w2", choice.w2))
        if schema is not None
    )
    own: dict[str, LayerSchema] = {}
    if options.schema is None:
        own = source_schemas(experts.layers, dtype, options.grid, options.encoding, choices)
    spec = ConversionSpec(
        schema=options.schema or _most_common(own),
        param_dtype=dtype,
        target=target,
        grid=options.grid,
        layout=options.layout,
        inputs=options.inputs,
        must_be_direct=options.schema is None,
        encoding=options.encoding,
        renamed=renamed,
        dense=options.dense,
    )
    spec = replace(spec, of_layers=_of_layers(experts, spec, choices, own))
    if target.cuda is not None and not any(
        needs_cuda(kernel_spec) for kernel_spec in spec.kernel_specs
    ):
        target = replace(target, cuda=None)  # equal bytes get equal manifests
    layers = [(layer.format, spec.layer_spec_of(layer.name).schema) for layer in experts.layers]
    return replace(
        spec,
        grid=_effective_grid(experts, spec),
        target=target,
        of_layers={
            name: replace(of_layer, target=target) for name, of_layer in spec.of_layers.items()
        },
        encoding=spec.encoding.effective(layers, dtype),
    )


def _effective_grid(experts: ExpertMap, spec: ConversionSpec) -> Grid:
    """Return the grid without a TP split that changes no layer: equal bytes get equal manifests."""
    is_even = all(
        is_split_even(
            layer.intermediate_size,
            spec.layer_spec_of(layer.name).schema,
            spec.grid,
            pads_last_rank=layer.pads_last_rank,
        )
        for layer in experts.layers
    )
    return replace(spec.grid, split=EVEN) if is_even else spec.grid


def _most_common(own: Mapping[str, LayerSchema]) -> LayerSchema:
    """Return the schema of most layers, the first one of equal counts."""
    if not own:
        raise RequestError(
            "Overrides leave no layer to the source's own schema.",
            where="--schema source",
            found="overrides of all layers",
            remedy="Name a schema.",
        )
    return Counter(own.values()).most_common(1)[0][0]


def _of_layers(
    experts: ExpertMap,
    spec: ConversionSpec,
    choices: Mapping[str, LayerChoice],
    own: Mapping[str, LayerSchema],
) -> dict[str, LayerSpec]:
    """Return the specs of layers that differ from `spec.layer_spec`; layers left out are not in `experts`."""
    usual = spec.layer_spec
    found = {}
    for layer in experts.layers:
        choice = choices.get(layer.name, LayerChoice())
        schema = choice.schema(own.get(layer.name, usual.schema))
        found[layer.name] = replace(usual, schema=schema, inputs=choice.inputs or usual.inputs)
    return {name: of_layer for name, of_layer in found.items() if of_layer != usual}
