"""The inverse layout for every activation and GPU: each kind's own path, against Humming's transform on the CPU."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hqconv.errors import RequestError, VerificationError
from hqconv.humming_ops import cpu_ops
from hqconv.kernel_layout.transform import kernel_form, to_kernel, why_not
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.layout_form import LayoutForm, read_config
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema, KernelSpec
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, WeightSchema, resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.kernel_tensors import (
    assert_is_packed,
    decoded,
    decoded_both_ways,
    field_codes,
    flipped,
    problems,
    random_packed,
    raw,
    values_of,
)

NUM_EXPERTS = 2
COMPILERS = ((12, 0), (13, 0), (13, 2))
NAMES = (
    *PRESETS,
    "int4-c",
    "int4-g64-zp",
    "int4-g128-fpzp",
    "int2-g64",
    "int6",
    "int8-g128",
    "int8-g32-zp",
    "int8-zp",
)
_E8M0_G32 = {"bs_dtype": "float8e8m0", "weight_scale_group_size": 32}
_E4M3_G16 = {"bs_dtype": "float8e4m3", "weight_scale_group_size": 16}
SCALES = (
    *({"weight_scale_group_size": size} for size in (32, 64, 128)),
    *({"weight_scale_type": "channel"}, {"weight_scale_type": "tensor"}),
    *({"weight_scale_type": "channel", "bs_dtype": "float8e4m3"}, _E8M0_G32, _E4M3_G16),
    *({**_E4M3_G16, "weight_scale_2_type": kind} for kind in ("tensor", "channel")),
    {**_E8M0_G32, "weight_scale_2_type": "channel"},
    *(
        {"bs_dtype": "float8e4m3", "weight_scale_group_size": 32, "weight_scale_2_type": k}
        for k in ("tensor", "channel")
    ),
    {"bs_dtype": "float8e5m3", "weight_scale_group_size": 32},
    {
        "weight_scale_type": "block",
        "weight_scale_group_size": 128,
        "weight_scale_group_size_n": 128,
    },
)
CODES = (
    *(f"uint{bits}" for bits in range(1, 9)),
    *(
        "float2e0m1",
        "float3e0m2",
        "float4e0m3",
        "float3e1m1",
        "float4e2m1",
        "float5e2m2",
        "float5e3m1",
    ),
    *(
        "float6e3m2",
        "float6e2m3",
        "float7e3m3",
        "float8e4m3",
        "float8e5m2",
        "float8e3m4",
        "float4e3m0",
    ),
)


def schemas() -> Iterator[WeightSchema]:
    """The presets, every type of code with the usual scales, and every sort of scales, with and without zero points."""
    yield from map(resolve_schema, NAMES)
    zeros = ({}, {"has_zero_point": True}, {"has_zero_point": True, "is_fp_zero_point": True})
    usual = ({"weight_scale_group_size": 128}, {"weight_scale_type": "channel"}, _E8M0_G32)
    facts = (*itertools.product(CODES, usual), *itertools.product(("uint4", "float4e2m1"), SCALES))
    for (code, scale), zero in itertools.product(facts, zeros):
        try:
            yield WeightSchema(f"{code} {scale} {zero}", code, **scale, **zero)
        except RequestError:
            continue


def inputs() -> Iterator[InputSchema]:
    """The presets, and the other activations of Humming's."""
    yield from INPUT_PRESETS.values()
    yield from (InputSchema(name, name) for name in ("float8e3m4", "float4e0m3", "float4e2m1"))
    yield InputSchema(
        "nvfp4 per tensor", "float4e2m1", 16, "float8e4m3", "static_tensor_dynamic_group"
    )


def size_of(schema: WeightSchema) -> tuple[int, int]:
    """A small matrix that is padded along N, and along K where its groups allow it."""
    group = schema.weight_scale_group_size
    return (128 if schema.weight_scale_type == "block" else 192), {128: 256, 64: 192}.get(
        group, 160
    )


def form_of(kind: KernelSpec) -> LayoutForm:
    form = kernel_form(*size_of(kind.schema), kind, True)
    return read_config(form.config, form.flags, has_row_scale=kind.schema.has_row_scale)


@functools.cache
def each_path(names_inputs: str) -> list[KernelSpec]:
    """One kind of every form that there is for an activation: another number format, order, or tile."""
    found: dict[LayoutForm, KernelSpec] = {}
    of_name = [one for one in inputs() if one.name == names_inputs]
    facts = itertools.product(schemas(), PARAM_DTYPES, TARGETS, COMPILERS, of_name)
    for schema, param, sm_version, cuda, one in facts:
        if cuda != (12, 0) and sm_version < 89:
            continue
        if one.a_dtype is None and sm_version not in (75, 90, 89, 100):
            continue  # `tests.layout_decoder.test_layout_decoder` has these: only the order of a word can be another
        kind = KernelSpec(schema, param, GpuTarget(sm_version, cuda), one)
        if why_not(kind) is None and schema.bs_dtype not in set(PARAM_DTYPES) - {param}:
            found.setdefault(form_of(kind), kind)
    return list(found.values())


class Laid:
    """Random packed tensors and their kernel form, as the transform makes it."""

    def __init__(self, kind: KernelSpec, seed: int = 0, **sizes: int) -> None:
        n, k = size_of(kind.schema)
        n, k = sizes.get("n", n), sizes.get("k", k)
        self.kind, self.size = kind, (n, k)
        self.packed = random_packed(n, k, kind.schema, kind.param_dtype, NUM_EXPERTS, seed)
        form = kernel_form(n, k, kind, has_bias=True)
        self.config, self.flags = json.loads(form.config_json(NUM_EXPERTS)), form.flags
        self.kernel = {name: raw(one) for name, one in to_kernel(form, self.packed).items()}

    def read(self, kernel: dict[str, np.ndarray] | None = None) -> DecodedStack:
        is_row = self.kind.schema.has_row_scale
        return decoded_both_ways(
            self.config, kernel or self.kernel, self.flags, has_row_scale=is_row
        )

    @property
    def is_fused(self) -> bool:
        return form_of(self.kind).is_fused


def assert_inverts(laid: Laid) -> None:
    stack = laid.read()
    if laid.is_fused:
        assert_is_fused(laid, stack)
    else:
        assert_is_packed(stack, laid.packed, laid.kind.schema)
    assert not stack.wrong.any()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("names_inputs", [one.name for one in inputs()])
def test_every_path_is_inverted(names_inputs: str) -> None:
    """Codes, scales, zero points and biases come back bit for bit, by loops and by array operations."""
    kinds = each_path(names_inputs)
    assert kinds
    for kind in kinds:
        try:
            assert_inverts(Laid(kind))
        except AssertionError as error:
            raise AssertionError(f"{kind}: {kind.schema}") from error


# --- one flipped bit, one difference -----------------------------------------------------------------------

FLIPPED = (
    *(("mxfp4", "fp8", 100, None), ("mxfp4", "fp8", 120, None), ("nvfp4", "nvfp4", 100, None)),
    *(("nvfp4", "nvfp4", 120, None), ("mxfp4", "mxfp4", 120, None), ("mxfp8", "mxfp8", 120, None)),
    *(("int4", "fp8", 90, None), ("int4", "fp8", 89, None), ("int6", "fp8", 90, None)),
    *(("int4-g64-zp", "fp8", 89, None), ("int4", "int8", 90, None), ("int8", "int8", 90, None)),
    *(("int8", "int8", 100, None), ("fp8-block", "fp8-g128", 90, None), ("int4", "int4", 89, None)),
    *(
        ("int2-g64", "int4", 89, None),
        ("int3-g64", "int4", 89, None),
        ("mxfp4", "a16", 100, (13, 2)),
    ),
    *(
        ("fp6-e3m2", "a16", 120, (13, 2)),
        ("fp6-e2m3", "fp8", 100, None),
        ("mxfp4", "fp8", 90, None),
    ),
    *(("mxfp4", "int8", 80, None), ("mxfp4", "fp8-g128", 90, None)),
)
_ids = [f"{schema}-{inputs}-sm{sm}" for schema, inputs, sm, _ in FLIPPED]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("schema", "inputs", "sm_version", "cuda"), FLIPPED, ids=_ids)
def test_a_flipped_bit_changes_one_value_or_is_reported(
    schema: str, inputs: str, sm_version: int, cuda: tuple[int, int] | None
) -> None:
    """Each bit of weight, scale and bias belongs to one value, or to padding."""
    laid = Laid(kernel_spec_of(schema, "bfloat16", sm_version, inputs, cuda))
    clean = laid.read()
    random = np.random.default_rng(len(schema))
    for tensor, field in (("weight", "codes"), ("weight_scale", "scale"), ("bias", "bias")):
        found_any = False
        for bit in random.integers(0, laid.kernel[tensor].nbytes * 8, 24):
            kernel = flipped(laid.kernel, tensor, int(bit))
            changed = laid.read(kernel)
            differing = np.argwhere(raw(getattr(changed, field)) != raw(getattr(clean, field)))
            bad = {int(line.split("expert ")[1].split(":")[0]) for line in problems(changed)}
            assert len(differing) == 1 or (len(differing) == 0 and len(bad) == 1), (tensor, bit)
            found_any |= len(differing) == 1
            others = {"codes", "scale", "bias"} - {field}
            assert all(torch.equal(getattr(changed, o), getattr(clean, o)) for o in others)
            assert set(np.flatnonzero(changed.wrong.numpy())) == bad
        assert found_any


# --- exponents fused into codes ----------------------------------------------------------------------------


def fused_reference(laid: Laid) -> tuple[np.ndarray, np.ndarray]:
    """What Humming's own pre-pass leaves of the weights, and the source's weights: float64 [E, N, K].

    The shifts are worked out here, of the padded matrix; the codes are shifted by the twin of Humming's op.
    """
    n, _ = laid.size
    padded_n = n + -n % 256
    is_fp8 = laid.kind.a_dtype == "float8e4m3"
    bytes_ENG = raw(laid.packed["weight_scale"]).astype(np.int64)
    padded = np.full((NUM_EXPERTS, padded_n, bytes_ENG.shape[2]), 127)
    padded[:, :n] = bytes_ENG
    rows = laid.packed.get("weight_scale_2")
    is_whole = is_fp8 and rows is None
    largest = (
        padded.max(axis=(1, 2), keepdims=True) if is_whole else bytes_ENG.max(axis=2, keepdims=True)
    )
    kept = np.maximum(bytes_ENG, largest - (11 if is_fp8 else 3))
    shifts = torch.from_numpy((kept - bytes_ENG).astype(np.uint8))
    shifted = cpu_ops.process_mxfp4_w4a8_weight(laid.packed["weight"].clone(), shifts)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    group = laid.kind.schema.weight_scale_group_size

    def value(words: torch.Tensor, exponents: np.ndarray) -> np.ndarray:
        codes = grid[field_codes(words.numpy(), 4)]
        values = codes * np.repeat(2.0 ** (exponents - 127.0), group, axis=2)
        return values if rows is None else values * rows.double().numpy()[:, :, None]

    return value(shifted, kept), value(laid.packed["weight"], bytes_ENG)


def assert_is_fused(laid: Laid, unpacked: DecodedStack) -> None:
    """The values are those of the shifted codes, and off the source's by at most half a step of e2m1's subnormals."""
    assert problems(unpacked) == []
    floats = values_of(unpacked, laid.kind.schema, laid.kind.param_dtype).astype(np.float64)
    expected, source = fused_reference(laid)
    assert np.array_equal(floats, expected)
    largest = raw(laid.packed["weight_scale"]).astype(np.int64).max()
    lost = 2.0 ** (max(largest, 127) - 127 - (11 if laid.kind.a_dtype == "float8e4m3" else 3))
    lost *= float(laid.packed["weight_scale_2"].max()) if "weight_scale_2" in laid.packed else 1
    assert (
        np.abs(expected - source).max() <= lost
    )  # a step of e2m1 is at most 2, where its scale is the least
    assert unpacked.bias is not None
    assert np.array_equal(raw(unpacked.bias), raw(laid.packed["bias"]))


FUSED = (
    *(("fp8", sm, param) for sm in (89, 90) for param in PARAM_DTYPES),
    *(("int8", sm, "bfloat16") for sm in (80, 90, 100, 121)),
    *(("int8", 75, "float16"), ("fp8-g128", 90, "bfloat16"), ("fp8-g128", 90, "float16")),
)
FUSED_ROWS = (
    *(("fp8", sm) for sm in (89, 90)),
    *(("int8", sm) for sm in (80, 90, 100, 121)),
    ("fp8-g128", 90),
)


@pytest.mark.parametrize(
    ("inputs", "sm_version", "param", "schema"),
    [
        *((*one, "mxfp4") for one in FUSED),
        *((*one, "bfloat16", "fp4-g32-e8m0-row") for one in FUSED_ROWS),
    ],
)
@pytest.mark.parametrize("size", [(512, 384), (320, 416), (64, 96)])
def test_fused_weights_are_what_the_shift_leaves(
    inputs: str, sm_version: int, param: str, schema: str, size: tuple[int, int]
) -> None:
    laid = Laid(kernel_spec_of(schema, param, sm_version, inputs), n=size[0], k=size[1])
    stack = laid.read()
    assert_is_fused(laid, stack)
    assert not stack.wrong.any()
    if stack.scale_2 is not None:
        rows = stack.scale_2.view(torch.bfloat16).float()
        assert bool(((rows >= 1) & (rows < 2)).all())
    expected, source = fused_reference(laid)
    assert not np.array_equal(
        expected, source
    )  # something was lost: exponents differ by more than the range


@pytest.mark.parametrize("inputs", ["fp8", "int8"])
def test_exponents_that_no_fused_kernel_can_add_are_reported(inputs: str) -> None:
    laid = Laid(kernel_spec_of("mxfp4", "bfloat16", 90, inputs))
    for value in (13, 255) if inputs == "fp8" else (4, 255):
        scale = laid.kernel["weight_scale"].copy()
        scale[1, 2, 8] = value  # stored row 8 is row 1
        changed = laid.read({**laid.kernel, "weight_scale": scale})
        assert any(
            line.startswith("weight_scale: expert 1: not a fused exponent")
            and ": first at [1, 2]" in line
            for line in problems(changed)
        )


# --- contradictions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "inputs", "words", "flags", "message"),
    [
        ("int4", "fp8", {"use_packed_k_layout": False}, {}, "contradicts the manifest's flags"),
        (
            "int4",
            "fp8",
            {},
            {"use_native_dequant": True},
            "native dequantization of floats for 16-bit",
        ),
        ("int4", "fp8", {"b_dtype": "int4"}, {}, "signed integers in whole words"),
        ("int4", "fp8", {"b_dtype": "uint5"}, {}, "packed K of even bits"),
        ("fp8", "fp8", {}, {"use_flat_weight": False}, "codes narrower than activations"),
        (
            "mxfp4",
            "fp8",
            {"weight_scale_2_type": "none"},
            {},
            "a second scale where exponents are fused",
        ),
        ("mxfp4", "fp8", {"bs_dtype": "float8e4m3", "b_dtype": "uint4"}, {}, "fused into mxfp4"),
        ("int4", "fp8", {}, {"use_block_scaled_mma": True}, "8-bit group scales"),
    ],
)
def test_words_that_cannot_be_together_are_refused(
    schema: str, inputs: str, words: dict[str, object], flags: dict[str, object], message: str
) -> None:
    laid = Laid(kernel_spec_of(schema, "bfloat16", 90, inputs))
    with pytest.raises(VerificationError, match=message):
        decoded({**laid.config, **words}, laid.kernel, {**laid.flags, **flags})


def test_padding_of_words_of_scales_is_checked() -> None:
    """Tensor memory takes four groups at once: three are filled up with a one."""
    laid = Laid(kernel_spec_of("mxfp4", "bfloat16", 100, "fp8"), n=256, k=128)
    config = {**laid.config, "shape_k": 64, "pad_shape_k": 0}
    kernel = {**laid.kernel, "weight": laid.kernel["weight"][:, :, :8].copy()}
    stack = decoded_both_ways(config, kernel, laid.flags)
    assert stack.scale.shape == (NUM_EXPERTS, 256, 2)
    assert stack.wrong.all()
    assert [line.split(": first")[0] for line in problems(stack)] == [
        f"weight_scale: expert {e}: padding other than 0x7f" for e in range(NUM_EXPERTS)
    ]
    filled = laid.kernel["weight_scale"].copy()
    filled.view(np.uint8).reshape(-1, 4)[:, 2:] = 127
    stack = decoded_both_ways(config, {**kernel, "weight_scale": filled}, laid.flags)
    assert problems(stack) == []
    assert not stack.wrong.any()


def test_padding_is_checked_in_every_order() -> None:
    """A full matrix, read as if its last rows and columns were padding."""
    for schema, inputs_name, sm_version in (
        *(("int4", "fp8", 90), ("int4", "int8", 90), ("fp8", "fp8", 100), ("mxfp4", "fp8", 120)),
        *(
            ("nvfp4", "nvfp4", 100),
            ("int3-g64", "int4", 89),
            ("mxfp4", "fp8", 90),
            ("mxfp4", "int8", 90),
        ),
        *((name, "a16", 90) for name in ("mxfp4", "nvfp4", "int8-g32-zp", "fp8-block", "int4-c")),
    ):
        laid = Laid(kernel_spec_of(schema, "bfloat16", sm_version, inputs_name), n=512, k=512)
        laid.config = {**laid.config, "pad_shape_n": 128, "pad_shape_k": 128}
        stack = laid.read()
        reported = {line.split(":")[0] for line in problems(stack)}
        assert {"weight", "bias"} <= reported, schema
        assert {"weight_scale", "zero_point"} & {*laid.kernel} <= reported, schema
        assert stack.wrong.all()
