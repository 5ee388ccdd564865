"""The inverse layout against the forward path, Humming's own dequantization, and what a real GPU recorded."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest
import torch

from hqconv.artifact.expert_reader import TENSOR_OF
from hqconv.errors import RequestError, VerificationError
from hqconv.humming_ops.runtime import humming, resident, target_facts
from hqconv.kernel_layout.transform import humming_schema, kernel_form, to_kernel
from hqconv.layout_decoder.codes import unpack_fields
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.scales import float_values
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import PARAM_DTYPES, WeightSchema, resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.kernel_tensors import (
    array_operations,
    assert_is_packed,
    decoded,
    decoded_both_ways,
    field_codes,
    flipped,
    problems,
    raw,
    values_of,
)
from tests.make.matrices import SCHEMAS, hard_matrix
from tests.make.places import GOLDEN
from tests.make.quantized import quantize

NUM_EXPERTS = 3
SIZES = ((320, 1184), (256, 416), (32, 96), (640, 1024))
RARE = (
    WeightSchema("e0m3", "float4e0m3", weight_scale_group_size=32),
    WeightSchema("e0m7", "float8e0m7", weight_scale_type="channel"),
    WeightSchema("e2m2", "float5e2m2", weight_scale_group_size=16),
    WeightSchema("e3m3-e4m3", "float7e3m3", bs_dtype="float8e4m3", weight_scale_group_size=32),
    WeightSchema("uint4-e5m3", "uint4", bs_dtype="float8e5m3", weight_scale_group_size=16),
    WeightSchema("uint8-e5m2-channel", "uint8", bs_dtype="float8e5m2", weight_scale_type="channel"),
    WeightSchema(
        "int8-fpzp", "uint8", weight_scale_group_size=32, has_zero_point=True, is_fp_zero_point=True
    ),
    WeightSchema("int8-c-zp", "uint8", weight_scale_type="channel", has_zero_point=True),
    WeightSchema("int7-c-zp", "uint7", weight_scale_type="channel", has_zero_point=True),
    WeightSchema("int3-zp", "uint3", weight_scale_group_size=32, has_zero_point=True),
    WeightSchema("int6-zp", "uint6", weight_scale_group_size=32, has_zero_point=True),
    WeightSchema(
        "block-64x32",
        "float8e5m2",
        weight_scale_type="block",
        weight_scale_group_size=32,
        weight_scale_group_size_n=64,
    ),
    WeightSchema(
        "e2m1-channel-2",
        "float4e2m1",
        bs_dtype="float8e4m3",
        weight_scale_group_size=16,
        weight_scale_2_type="channel",
    ),
    *map(resolve_schema, ("int4-g32-e4m3", "int4-g16-e4m3-row", "int8-g32-e5m2", "fp8-g32-e4m3")),
)
ALL = {
    **{name: resolve_schema(name) for name in SCHEMAS},
    **{schema.name: schema for schema in RARE},
}
IN_TURN = [
    *((name, PARAM_DTYPES[number % 2]) for number, name in enumerate(ALL)),
    ("mxfp4", "float16"),
]  # split scales


@dataclasses.dataclass
class Case:
    """One stack of experts: packed tensors, and their kernel form as raw bits with its LayerConfig words."""

    schema: WeightSchema
    packed: dict[str, torch.Tensor]
    config: dict[str, Any]
    kernel: dict[str, np.ndarray]

    def reference(self) -> np.ndarray:
        with resident(torch.device("cpu")), target_facts(GpuTarget(90)):
            return humming_schema(self.schema).dequant_tensors(dict(self.packed)).numpy()


@functools.cache
def forward(
    name: str, param_dtype: str, size: tuple[int, int] = SIZES[0], tame: bool = False
) -> Case:
    schema = ALL[name]
    group, group_n = schema.weight_scale_group_size or 32, schema.weight_scale_group_size_n or 32
    n, k = max(size[0] // group_n, 1) * group_n, max(size[1] // group, 1) * group
    experts = []
    for seed in range(NUM_EXPERTS):
        matrix = hard_matrix(n, k, torch.bfloat16, seed)
        if tame:
            matrix = (
                torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
                .mul(2.0 ** (-6 * seed))
                .bfloat16()
            )
        experts.append(quantize([matrix], schema, param_dtype)[0].tensors)
    packed = {}
    for key, first in experts[0].items():
        stack = torch.stack([expert[key] for expert in experts])
        is_scalar = first.shape == (1,) and key.startswith("weight_scale") and k > group
        packed[key] = stack.reshape(NUM_EXPERTS) if is_scalar else stack
    packed["bias"] = torch.randn(NUM_EXPERTS, n, generator=torch.Generator().manual_seed(9)).to(
        getattr(torch, param_dtype)
    )
    form = kernel_form(n, k, kernel_spec_of(schema, param_dtype, 90), has_bias=True)
    kernel = {key: raw(tensor) for key, tensor in to_kernel(form, packed).items()}
    return Case(schema, packed, json.loads(form.config_json(NUM_EXPERTS)), kernel)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_inverts_the_forward_path(name: str, param_dtype: str) -> None:
    """The sizes take turns."""
    size = SIZES[([*ALL].index(name) + 2 * PARAM_DTYPES.index(param_dtype)) % len(SIZES)]
    case = forward(name, param_dtype, size)
    stack = decoded_both_ways(case.config, case.kernel)
    assert_is_packed(stack, case.packed, case.schema)
    assert not stack.wrong.any()
    values, expected = values_of(stack, case.schema, param_dtype), case.reference()
    if stack.flushed is not None:
        is_flushed = np.repeat(stack.flushed.numpy(), case.schema.weight_scale_group_size, axis=2)
        assert not values[is_flushed].any()
        values, expected = values[~is_flushed], expected[~is_flushed]
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


# --- compiled loops and array operations


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_fields_are_little_endian(num_bits: int) -> None:
    words = np.random.default_rng(num_bits).integers(0, 1 << 32, (3, 5, 2 * num_bits), np.uint32)
    expected, bits = field_codes(words, num_bits), torch.from_numpy(words.view(np.int32))
    assert np.array_equal(unpack_fields(bits, num_bits).numpy(), expected)
    with array_operations():
        assert np.array_equal(unpack_fields(bits, num_bits).numpy(), expected)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_ordinary_e8m0_scales_lose_nothing_in_float16(name: str) -> None:
    case = forward(name, "float16", tame=True)
    stack = decoded(case.config, case.kernel)
    assert stack.flushed is not None
    assert not stack.flushed.any()
    assert np.array_equal(stack.scale, raw(case.packed["weight_scale"]))
    assert np.array_equal(values_of(stack, case.schema, "float16"), case.reference())


def test_the_second_scale_of_e8m0_is_a_power_of_two() -> None:
    case = forward("mxfp4", "float16", tame=True)
    scale = case.kernel["weight_scale_2"].view(np.float32) * np.float32([1.0, 1.0, 1.5])
    kernel = {**case.kernel, "weight_scale_2": scale.view(np.uint32)}
    [problem] = problems(decoded_both_ways(case.config, kernel))
    assert problem.startswith(
        "weight_scale_2: expert 2: a second scale of e8m0 scales that is no power of two"
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.npz")))
def test_recordings_of_a_real_gpu(name: str) -> None:
    schema = resolve_schema(name)
    form = kernel_form(128, 128, kernel_spec_of(schema, "bfloat16", 90))
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        recorded = {key: arrays[key] for key in arrays.files}
    with target_facts(GpuTarget(90)):
        attrs = humming_schema(schema).get_tensors_attrs(128, 128, torch.bfloat16, num_experts=1)
    packed = {
        key: torch.from_numpy(recorded[f"packed.0.{key}"]).view(a["dtype"]).reshape(a["shape"])
        for key, a in attrs.items()
    }
    kernel = {}
    for key, tensor in form.tensors.items():
        size = tensor.num_bytes // int(np.prod(tensor.shape, dtype=int))
        kernel[key] = recorded[f"kernel.{key}"].view(f"u{size}").reshape(1, *tensor.shape)
    stack = decoded_both_ways(form.config, kernel, form.flags)
    assert_is_packed(stack, packed, schema)
    with resident(torch.device("cpu")), target_facts(GpuTarget(90)):
        expected = humming_schema(schema).dequant_tensors(packed).numpy()
    values = values_of(stack, schema, "bfloat16")
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


# --- one flipped bit, one difference -----------------------------------------------------------------------


def bad_experts(stack: DecodedStack) -> set[int]:
    return {int(line.split("expert ")[1].split(":")[0]) for line in problems(stack)}


def differing(left: DecodedStack, right: DecodedStack) -> dict[str, np.ndarray]:
    """Tensor → indices of its unequal values."""
    pairs = {
        tensor: (raw(getattr(left, field)), raw(getattr(right, field)))
        for field, tensor in TENSOR_OF.items()
        if getattr(left, field) is not None
    }
    places = {name: np.argwhere(a != b) for name, (a, b) in pairs.items()}
    return {name: where for name, where in places.items() if len(where)}


@pytest.mark.parametrize(("name", "param_dtype"), IN_TURN)
def test_a_flipped_bit_changes_the_one_value_it_belongs_to(name: str, param_dtype: str) -> None:
    case = forward(name, param_dtype, SIZES[1])
    clean = decoded(case.config, case.kernel)
    random = np.random.default_rng(len(name))
    is_centred = case.config["b_dtype"] in ("uint7", "uint8") and param_dtype == "bfloat16"
    for tensor in case.kernel:
        places = set()
        for bit in random.integers(0, case.kernel[tensor].nbytes * 8, 6):
            changed = decoded_both_ways(case.config, flipped(case.kernel, tensor, int(bit)))
            assert set(np.flatnonzero(changed.wrong.numpy())) == bad_experts(changed)
            found = differing(clean, changed)
            affected = tensor
            if tensor == "weight_scale_2" and clean.flushed is not None:
                # a factor of all e8m0 scales of its expert: another power of two moves them, all else is a fault
                assert found.keys() <= {"weight_scale"}
                changed_experts = {
                    int(place[0]) for of_tensor in found.values() for place in of_tensor
                }
                assert changed_experts | bad_experts(changed) == {int(bit) // 32}
                places.add((int(bit) // 32,))
                continue
            if (
                tensor == "zero_point"
                and is_centred
                and not case.schema.is_fp_zero_point
                and "weight" in found
            ):
                group = case.schema.weight_scale_group_size or changed.codes.shape[2]
                e, n, g = found["zero_point"][0]
                codes = found.pop("weight")
                assert {(e, n, g)} == {(a, b, c // group) for a, b, c in codes}
            if affected in found:
                assert list(found) == [affected]
                assert len(found[affected]) == 1
                places.add(tuple(found[affected][0]))
            else:
                assert not found
                assert len(problems(changed)) == 1 or (problems(changed) and tensor == "zero_point")
                assert all(p.startswith((tensor, "weight")) for p in problems(changed))
        assert places or case.config["pad_shape_n"]


# --- padding -----------------------------------------------------------------------------------------------


def test_unused_bits_are_reported() -> None:
    case = forward("int3-zp", "bfloat16")
    zero = case.kernel["zero_point"].copy()
    zero[1, 0, 0] |= 1 << 3
    changed = decoded(case.config, {**case.kernel, "zero_point": zero})
    assert problems(changed) == [
        "zero_point: expert 1: bits set above 3: first at [0, 0], 1 in all"
    ]
    assert not differing(decoded(case.config, case.kernel), changed)
    case = forward("mxfp4", "float16")
    scale = case.kernel["weight_scale"].copy()
    scale[2, 1, 1] ^= 4  # stored row 1 is row 8
    changed = decoded(case.config, {**case.kernel, "weight_scale": scale})
    assert problems(changed)[0].startswith(
        "weight_scale: expert 2: not a float16 exponent over three zero bits: first at [8, 1]"
    )


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        ({"a_dtype": "float32"}, {}, "activations in float32 cannot be read back"),
        ({"a_dtype": "int8"}, {}, "sm90 for int8 is not known without its layout flags"),
        ({"use_int_weight_scale": True}, {}, "use_int_weight_scale cannot be read back"),
        ({}, {"use_int_weight_scale": True}, "use_int_weight_scale cannot be read back"),
        ({"sm_version": 100}, {}, "sm100 for bfloat16 is not known without its layout flags"),
        (
            {"sm_version": 100},
            {"use_native_dequant": False},
            "is not known without its layout flags",
        ),
    ],
)
def test_layouts_that_are_not_known_are_refused(
    words: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    case = forward("mxfp4", "bfloat16")
    with pytest.raises(RequestError, match=message):
        decoded({**case.config, **words}, case.kernel, flags)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"shape_k": 1152}, r"weight\n.*\[3, 72, 1024\]\n.*\[3, 80, 1024\]"),
        ({"b_dtype": "uint8"}, r"weight\n.*\[3, 80, 2048\]"),
        ({"weight_scale_group_size": 64}, r"weight_scale\n.*\[3, 20, 512\]\n.*\[3, 40, 512\]"),
        ({"bs_dtype": "bfloat16"}, r"weight_scale\n.*uint16"),
        ({"has_zero_point": True, "b_dtype": "uint4"}, r"zero_point\n.*present\n.*absent"),
        ({"has_bias": False}, r"bias\n.*absent\n.*present"),
        ({"b_dtype": "float4e2m2"}, "b_dtype float4e2m2"),
        ({"weight_scale_type": "rows"}, "weight_scale_type group, channel"),
        ({"pad_shape_n": 512}, "0 < shape"),
        ({"weight_scale_group_size": 48}, "groups that divide K"),
        ({"shape_n": None}, "layer config"),
        ({"shape_n": 256.0}, "layer config"),
        ({"weight_scale_group_size": True}, "layer config"),
    ],
)
def test_contradictions_are_named(words: dict[str, Any], message: str) -> None:
    case = forward("mxfp4", "bfloat16", (320, 1184 + 96))
    with pytest.raises(VerificationError, match=message):
        decoded({**case.config, **words}, case.kernel)


def test_tensors_of_different_expert_counts_are_refused() -> None:
    case = forward("int4", "bfloat16")
    with pytest.raises(VerificationError, match=r"weight_scale\n.*\[3, "):
        decoded(case.config, {**case.kernel, "weight_scale": case.kernel["weight_scale"][:2]})
    one = {name: tensor[1:2] for name, tensor in case.kernel.items()}
    assert np.array_equal(
        decoded(case.config, one).codes, decoded(case.config, case.kernel).codes[1:2]
    )
    with pytest.raises(VerificationError, match="weight"):
        decoded(case.config, {name: tensor[0] for name, tensor in case.kernel.items()})


# --- values, and where they come from ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
    ],
)
def test_scale_values_are_torchs(dtype: torch.dtype, name: str) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    patterns = np.arange(256**size, dtype=f"u{size}")
    expected = (
        torch.from_numpy(patterns.view(f"i{size}" if size > 1 else "u1").copy())
        .view(dtype)
        .float()
        .numpy()
    )
    bits = torch.from_numpy(patterns.view(f"i{size}" if size > 1 else "u1"))
    assert np.array_equal(float_values(bits, name).numpy(), expected, equal_nan=True)


def test_e5m3_values_are_hummings() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    with resident(torch.device("cpu")):
        expected = humming().weight.decode_e5m3_scale(codes).numpy()
    assert np.array_equal(float_values(codes, "U8").numpy(), expected)
