"""Input schemas, the formats of activations when serving, and kernel specs, which decide a kernel's layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError, close_to
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.untrusted_files import read_toml, unicode_name
from hqconv.schemas.weight_schema import LayerSchema, WeightSchema

A_DTYPES = ("float8e4m3", "float8e5m2", "float8e3m4", "int8", "int4", "float4e2m1", "float4e0m3")
INPUT_SCALE_DTYPES = ("float32", "float8e8m0", "float8e4m3")
QUANT_MODES = (
    "none",
    "static_tensor",
    "dynamic_token",
    "dynamic_group",
    "static_tensor_dynamic_group",
    "dynamic_group_token",
)
# Humming's names of the static scales of modes (`HummingInputSchema.static_tensor_scale_name`).
STATIC_SCALES = {"static_tensor": "input_scale", "static_tensor_dynamic_group": "input_scale_2"}
_GROUP_SIZES = (16, 32, 64, 128)  # K is padded to 128
_GROUPED = ("dynamic_group", "static_tensor_dynamic_group", "dynamic_group_token")


@dataclass(frozen=True)
class InputSchema:
    """One format of activations. Field names and meanings are Humming's; `name` is its common name.

    a_dtype: None for 16 bits, unquantized. input_scale_dtype, input_quant_mode: None for Humming's default for the
    others.
    """

    name: str
    a_dtype: str | None = None
    input_scale_group_size: int = 0
    input_scale_dtype: str | None = None
    input_quant_mode: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def is_static(self) -> bool:
        """True if a scale per GEMM was calibrated beforehand."""
        return self.static_scale != ""

    @property
    def static_scale(self) -> str:
        """Humming's name of the tensor with a GEMM's calibrated scale; "" if there is none."""
        return STATIC_SCALES.get(self.input_quant_mode or "", "")

    def humming_fields(self) -> dict[str, Any]:
        """Return the schema as keyword arguments of `HummingInputSchema`."""
        document = asdict(self)
        del document["name"]
        return document

    def describe(self) -> str:
        """Format one line for people."""
        if self.a_dtype is None:
            return "16-bit activations, as they come"
        per = f"group of {self.input_scale_group_size}" if self.input_scale_group_size else "token"
        if self.input_quant_mode == "static_tensor":
            per = "tensor, measured beforehand"
        elif self.is_static:
            per += ", under one per tensor, measured beforehand"
        return f"{self.a_dtype} activations, a scale per {per}"


def _check(schema: InputSchema) -> None:
    """Refuse fields that Humming's LayerConfig refuses by assertion."""

    def need(condition: bool, field: str, expected: str) -> None:
        if not condition:
            found = repr(getattr(schema, field))
            raise RequestError(
                f"The input schema '{schema.name}' cannot be built.",
                where=field,
                expected=expected,
                found=found,
            )

    size = schema.input_scale_group_size
    mode = schema.input_quant_mode
    is_quantized = schema.a_dtype is not None
    need(schema.a_dtype in (None, *A_DTYPES), "a_dtype", ", ".join(A_DTYPES))
    sizes: tuple[int, ...] = (0,)
    if is_quantized and mode in _GROUPED:
        sizes = _GROUP_SIZES
    elif is_quantized and mode is None:
        sizes = (0, *_GROUP_SIZES)
    is_size = type(size) is int and size in sizes
    need(is_size, "input_scale_group_size", f"{' or '.join(map(str, sizes))}")
    dtypes = INPUT_SCALE_DTYPES if is_quantized else ()
    is_dtype = schema.input_scale_dtype in (None, *dtypes)
    need(is_dtype, "input_scale_dtype", f"{', '.join(dtypes)}, or nothing")
    modes = QUANT_MODES[1:] if is_quantized else QUANT_MODES[:1]
    need(mode in (None, *modes), "input_quant_mode", f"{', '.join(modes)}, or nothing")


INPUT_PRESETS = {
    schema.name: schema
    for schema in (
        InputSchema("a16"),
        InputSchema("fp8", "float8e4m3"),
        InputSchema("fp8-g128", "float8e4m3", 128),
        InputSchema("fp8-e5m2", "float8e5m2"),
        InputSchema("int8", "int8"),
        InputSchema("int4", "int4"),
        InputSchema("mxfp8", "float8e4m3", 32, "float8e8m0"),
        InputSchema("mxfp4", "float4e2m1", 32, "float8e8m0"),
        InputSchema("nvfp4", "float4e2m1", 16, "float8e4m3", "dynamic_group_token"),
    )
}
A16 = INPUT_PRESETS["a16"]
# With the source's calibrated scale of each GEMM's whole input: never chosen by the names above.
STATIC_PRESETS = {
    f"{name}-static": InputSchema(f"{name}-static", a_dtype, input_quant_mode="static_tensor")
    for name, a_dtype in (("fp8", "float8e4m3"), ("int8", "int8"))
}
STATIC_PRESETS["nvfp4-static"] = InputSchema(
    "nvfp4-static", "float4e2m1", 16, "float8e4m3", "static_tensor_dynamic_group"
)
NAMED_INPUTS = {**INPUT_PRESETS, **STATIC_PRESETS}


def resolve_inputs(text: str) -> InputSchema:
    """Return the input schema of `--input-schema TEXT`: a preset, or a path ending in .toml.

    Raises RequestError for an unknown name, an unreadable file or an impossible combination.
    """
    if text.endswith(".toml"):
        path = Path(text)
        return inputs_of(
            unicode_name(path.stem), read_toml(path, "input schema's file"), where=str(path)
        )
    if text in NAMED_INPUTS:
        return NAMED_INPUTS[text]
    close = close_to(text.lower().replace("_", "-"), NAMED_INPUTS)
    raise RequestError(
        f"There is no input schema named '{text}'.",
        where="--input-schema",
        expected=f"{', '.join(NAMED_INPUTS)}, or a .toml file",
        found=text,
        remedy=f"{close} `hqconv schemas` explains each.".strip(),
    )


def inputs_of(name: str, document: dict[str, Any], *, where: str) -> InputSchema:
    """Return an input schema with Humming's field names. Raises RequestError for unknown ones."""
    known = [f.name for f in fields(InputSchema) if f.name != "name"]
    for key in document:
        if key not in known:
            raise RequestError(
                "The input schema has a key that is unknown.",
                where=f"{where}: {key}",
                expected=", ".join(known),
            )
    return InputSchema(name, **document)


@dataclass(frozen=True)
class KernelSpec:
    """Weights, parameters, activations and GPU of a Humming kernel: all that decides a matrix's layout but its size.

    param_dtype: bfloat16 or float16, of the model's parameters and outputs.
    """

    schema: WeightSchema
    param_dtype: str
    target: GpuTarget
    inputs: InputSchema = A16

    @property
    def a_dtype(self) -> str:
        """Humming's name of the type of a GEMM's activations."""
        return self.inputs.a_dtype or self.param_dtype

    def __str__(self) -> str:
        """Format for people."""
        text = f"{self.schema.name} with {self.inputs.name} activations"
        return f"{text}, {self.param_dtype} parameters, on {self.target}"


@dataclass(frozen=True)
class LayerSpec:
    """Kernel specs of a layer's two GEMMs, which differ in their weights only.

    param_dtype, target, inputs: as of `KernelSpec`.
    """

    schema: LayerSchema
    param_dtype: str
    target: GpuTarget
    inputs: InputSchema

    def of(self, gemm: str) -> KernelSpec:
        """Return the kernel spec of the GEMM `w13` or `w2`."""
        return KernelSpec(self.schema.of(gemm), self.param_dtype, self.target, self.inputs)

    @property
    def each(self) -> tuple[KernelSpec, ...]:
        """The distinct kernel specs: one, or that of w13 and that of w2."""
        specs = (self.param_dtype, self.target, self.inputs)
        return tuple(KernelSpec(schema, *specs) for schema in self.schema.each)

    def __str__(self) -> str:
        """Format for people."""
        return "; ".join(map(str, self.each))
