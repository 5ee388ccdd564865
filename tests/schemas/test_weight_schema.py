"""Target schemas: presets as the contract lists them, the shorthand's grammar, TOML files, and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.weight_schema import (
    PRESETS,
    RECOMMENDED,
    WeightSchema,
    load_schema,
    resolve_layer_schema,
    resolve_schema,
    shorthand_of,
)

# b_dtype, bs_dtype, scale type, group size along K, along N, second scale: "Target schemas" of the contract.
PRESET_TABLE = {
    "mxfp4": ("float4e2m1", "float8e8m0", "group", 32, 0, "none"),
    "nvfp4": ("float4e2m1", "float8e4m3", "group", 16, 0, "tensor"),
    "mxfp8": ("float8e4m3", "float8e8m0", "group", 32, 0, "none"),
    "fp8": ("float8e4m3", None, "channel", 0, 0, "none"),
    "fp8-e5m2": ("float8e5m2", None, "channel", 0, 0, "none"),
    "fp8-block": ("float8e4m3", "float32", "block", 128, 128, "none"),
    "fp8-tensor": ("float8e4m3", "float32", "tensor", 0, 0, "none"),
    "fp6-e3m2": ("float6e3m2", None, "group", 128, 0, "none"),
    "fp6-e2m3": ("float6e2m3", None, "group", 128, 0, "none"),
    "int8": ("uint8", None, "channel", 0, 0, "none"),
    "int4": ("uint4", None, "group", 128, 0, "none"),
}
FIELDS = ("b_dtype", "bs_dtype", "weight_scale_type", "weight_scale_group_size")
FIELDS += ("weight_scale_group_size_n", "weight_scale_2_type")


@pytest.mark.parametrize("name", PRESET_TABLE)
def test_preset(name: str) -> None:
    plain = {"has_zero_point": False, "is_fp_zero_point": False, "hadamard_block_size": 0}
    assert (
        resolve_schema(name).humming_fields()
        == dict(zip(FIELDS, PRESET_TABLE[name], strict=True)) | plain
    )
    assert resolve_schema(name).name == name
    assert PRESETS.keys() == PRESET_TABLE.keys()


# b_dtype, group size, has_zero_point, is_fp_zero_point
SHORTHAND = {
    "int4-g64-zp": ("uint4", 64, True, False),
    "int3-g64": ("uint3", 64, False, False),
    "int4-g128-fpzp": ("uint4", 128, True, True),
    "int7-c": ("uint7", 0, False, False),
    "int4-c": ("uint4", 0, False, False),
    "int4-zp": ("uint4", 128, True, False),
    "int8-zp": ("uint8", 0, True, False),
    "int8-g32": ("uint8", 32, False, False),
    "int5-c-fpzp": ("uint5", 0, True, True),
    "int2": ("uint2", 128, False, False),
    "int1-g16": ("uint1", 16, False, False),
}


@pytest.mark.parametrize("text", SHORTHAND)
def test_shorthand(text: str) -> None:
    b_dtype, size, *zero_points = SHORTHAND[text]
    scale_type = "group" if size else "channel"
    schema = resolve_schema(text)
    assert schema == WeightSchema(text, b_dtype, None, scale_type, size, 0, "none", *zero_points)
    assert resolve_schema(shorthand_of(schema)).humming_fields() == schema.humming_fields()


SCALED = {
    "int4-g32-e4m3": ("uint4", "float8e4m3", 32, "tensor"),
    "int4-g16-e4m3": ("uint4", "float8e4m3", 16, "tensor"),
    "int4-g32-e4m3-row": ("uint4", "float8e4m3", 32, "channel"),
    "int1-g64-e5m2": ("uint1", "float8e5m2", 64, "tensor"),
    "int8-g128-e8m0": ("uint8", "float8e8m0", 128, "none"),
    "fp4-g32-e4m3": ("float4e2m1", "float8e4m3", 32, "tensor"),
    "fp4-g32-e8m0-row": ("float4e2m1", "float8e8m0", 32, "channel"),
    "fp6-e3m2-g64-e4m3": ("float6e3m2", "float8e4m3", 64, "tensor"),
    "fp6-e2m3-g64-e5m2-row": ("float6e2m3", "float8e5m2", 64, "channel"),
    "fp8-g32-e5m2": ("float8e4m3", "float8e5m2", 32, "tensor"),
    "fp8-e5m2-g32-e4m3-row": ("float8e5m2", "float8e4m3", 32, "channel"),
}


@pytest.mark.parametrize("text", SCALED)
def test_shorthand_with_8_bit_scales(text: str) -> None:
    code, scale, size, second = SCALED[text]
    found = resolve_schema(text)
    assert found == WeightSchema(text, code, scale, "group", size, 0, second)
    assert shorthand_of(found) == text
    assert found.has_row_scale == text.endswith("-row")
    assert found.is_coupled == (second == "tensor")
    assert found.bits_per_weight() == found.num_bits + 8 / size


@pytest.mark.parametrize("plain", ["mxfp4", "int3-g64", "int4-g32-e4m3-row", "fp8-e5m2"])
def test_a_name_may_end_in_a_rotation(plain: str) -> None:
    found = resolve_schema(f"{plain}-h64")
    assert found == dataclasses.replace(
        resolve_schema(plain), name=f"{plain}-h64", hadamard_block_size=64
    )
    for wrong in (f"{plain}-h65", f"{plain}-h8", f"{plain}-h64-h64", f"{plain}-h", f"{plain}-h064"):
        with pytest.raises(RequestError):
            resolve_schema(wrong)


def test_a_name_close_to_the_shorthand_is_suggested() -> None:
    for text, meant in {
        "INT4-g32-E4M3": "int4-g32-e4m3",
        "int4_g32_e4m3": "int4-g32-e4m3",
        "int4-e4m3": "int4-g32-e4m3",
        "fp4-g32-e4m3-rows": "fp4-g32-e4m3-row",
        "mxpf4": "mxfp4",
        "int9": "int8",
    }.items():
        with pytest.raises(RequestError, match=rf"Did you mean {meant}\?"):
            resolve_schema(text)
    for text in ("4bit", "Q4_K_M", "w4a16", "gptq", "AWQ", "nf4"):
        with pytest.raises(RequestError, match=f"Did you mean {RECOMMENDED[0]}, the recommended"):
            resolve_schema(text)


UNKNOWN = """
int4-g32-e4m3-zp int4-e4m3 int4-c-e4m3 int4-g32-e4m3-tensor int9-g32-e4m3 fp4-e4m3 fp6-g32-e4m3 fp5-g32-e4m3
int4-g32-row int4-g032-e4m3 int4-g32-e5m3 int4-g32-e4m3-row-row int int0 int9 int16 uint4 INT4 int4- int4-g int4-gx
int4-g-64 int4-g0 int4-g064 int4-64 int4-c-g64 int4-zp-g64 int4-g64-zp-fpzp int4-g64zp int4-g64-zp2 int4-zp-zp
fp4 mxfp fp8-g128 mxfp4-zp nvfp4.tom fp8-Block float4e2m1
"""


def test_unknown_names_are_refused() -> None:
    grammar = ("intN[-gG|-c][-zp|-fpzp]", "CODE-gG-e4m3|e5m2|e8m0[-row]")
    for text in ("", "int4 ", *UNKNOWN.split()):
        with pytest.raises(RequestError) as error:
            resolve_schema(text)
        message = str(error.value)
        for word in (
            f"'{text}'",
            "--schema",
            "mxfp4",
            "fp8-block",
            *grammar,
            ".toml",
            "hqconv schemas",
        ):
            assert word in message
        assert error.value.exit_code == 2


BLOCK = {"weight_scale_type": "block", "weight_scale_group_size_n": 64}
NO_GROUP = {"weight_scale_group_size": 0}
ZERO = {"b_dtype": "uint4", "has_zero_point": True}
# What is wrong with a schema that is otherwise fine, by the field that is named.
IMPOSSIBLE: dict[str, list[dict[str, object]]] = {
    "b_dtype": [
        *({"b_dtype": name} for name in ("uint9", "uint0", "float16", "float9e5m3", "float4e2m2")),
        *({"b_dtype": name} for name in ("float4e3m0", "float8e6m1", "float7e5m1", "float4e1m2")),
        {**BLOCK, "b_dtype": "uint4"},
    ],
    "bs_dtype": [
        *({"bs_dtype": name} for name in ("float64", "float32")),
        {**BLOCK, "bs_dtype": "bfloat16"},
        {"weight_scale_2_type": "tensor"},
        {"weight_scale_2_type": "tensor", "bs_dtype": "float8e8m0"},
        {"weight_scale_2_type": "channel"},
        {"weight_scale_2_type": "channel", "bs_dtype": "float8e5m3"},
        {**ZERO, "weight_scale_2_type": "tensor", "bs_dtype": "float8e4m3"},
        {**ZERO, "weight_scale_2_type": "tensor", "bs_dtype": "bfloat16"},
        {**ZERO, "weight_scale_2_type": "tensor"},
        {**ZERO, "bs_dtype": "float8e8m0"},
    ],
    "weight_scale_type": [
        {"weight_scale_type": "row"},
        {**NO_GROUP, "weight_scale_type": "channel", "weight_scale_2_type": "tensor"},
        {**ZERO, **NO_GROUP, "weight_scale_type": "tensor"},
    ],
    "weight_scale_group_size": [
        *({"weight_scale_group_size": size} for size in (0, -64, 8, 24, 96)),
        {"weight_scale_type": "channel"},
        {"weight_scale_type": "tensor"},
    ],
    "weight_scale_group_size_n": [
        {"weight_scale_group_size_n": 64},
        {"weight_scale_type": "block"},
        {**BLOCK, "weight_scale_group_size_n": 32},
    ],
    "weight_scale_2_type": [{"weight_scale_2_type": "block"}],
    "has_zero_point": [{"has_zero_point": True}],
    "is_fp_zero_point": [{"is_fp_zero_point": True, "b_dtype": "uint4"}],
    "hadamard_block_size": [{"hadamard_block_size": size} for size in (-1, 2, 8, 96, 1024)],
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_impossible_combinations_name_field_expected_and_found(field: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(WeightSchema)}
    for changes in IMPOSSIBLE[field]:
        values = {"name": "mine", "b_dtype": "float4e2m1", "weight_scale_group_size": 64, **changes}
        with pytest.raises(RequestError, match="'mine'") as error:
            WeightSchema(**values)  # type: ignore[arg-type]
        found = repr({**defaults, **values}[field])
        assert (error.value.where, error.value.found) == (field, found), changes
        assert error.value.expected


def test_weights_may_be_rotated() -> None:
    for size, rotation in {0: 0, 1: 0, 16: 16, 512: 512}.items():
        schema = WeightSchema("mine", "uint4", weight_scale_group_size=64, hadamard_block_size=size)
        assert schema.rotation == rotation
        assert schema.describe().endswith(f" in blocks of {size}") == bool(rotation)


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_with_every_field(tmp_path: Path) -> None:
    words = """
        b_dtype = "uint4"
        bs_dtype = "bfloat16"
        weight_scale_type = "group"
        weight_scale_group_size = 128
        weight_scale_group_size_n = 0
        weight_scale_2_type = "none"
        has_zero_point = true
        is_fp_zero_point = true
        hadamard_block_size = 0
    """
    expected = WeightSchema("recipe", "uint4", "bfloat16", "group", 128, 0, "none", True, True, 0)
    assert resolve_schema(str(write(tmp_path, words))) == expected


def test_toml_scale_type_follows_the_sizes(tmp_path: Path) -> None:
    size, size_n = "weight_scale_group_size = 32\n", "weight_scale_group_size_n = 64"
    for text, scale_type in {"": "channel", size: "group", size + size_n: "block"}.items():
        assert (
            load_schema(write(tmp_path, f'b_dtype = "float8e4m3"\n{text}')).weight_scale_type
            == scale_type
        )
    assert load_schema(write(tmp_path, 'b_dtype = "int5"')).b_dtype == "uint5"  # Humming's word


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "recipe.toml"),
        ("b_dtype = uint4", "recipe.toml"),
        ('b_dtype = "uint4"\nb_dtype = "uint5"', "recipe.toml"),
        ("b_dtype = 4", "recipe.toml"),
        ('b_dtype = "uint4"\ngroup_size = 64', ": group_size"),
        ('b_dtype = "uint4"\nname = "x"', ": name"),
        ('b_dtype = "uint4"\n[more]\nx = 1', ": more"),
        *(
            (f'b_dtype = "uint4"\nweight_scale_group_size = {size}', "weight_scale_group_size")
            for size in ('"64"', "64.0", "true", "24")
        ),
        ('b_dtype = "uint4"\nhas_zero_point = 1', "has_zero_point"),
    ],
)
def test_toml_mistakes_say_where(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(RequestError) as error:
        load_schema(write(tmp_path, text))
    assert where in error.value.where


# Bits of a code, bits of a weight with its scales, and the description.
FACTS = {
    "mxfp4": (4, 4.25, "float4e2m1, float8e8m0 scale per group 32"),
    "nvfp4": (4, 4.5, "float4e2m1, float8e4m3 scale per group 16, second scale per tensor"),
    "fp8-block": (8, 8 + 32 / 128**2, "float8e4m3, float32 scale per block 128x128"),
    "fp8-tensor": (8, 8.0, "float8e4m3, float32 scale per tensor"),
    "int4-g64-zp": (4, 4.3125, "uint4, parameter-dtype scale per group 64, integer zero point"),
    "int4-fpzp": (4, 4.25, "uint4, parameter-dtype scale per group 128, float zero point"),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    schema = resolve_schema(name)
    assert (schema.num_bits, schema.bits_per_weight(), schema.describe()) == FACTS[name]
    assert schema.is_integer == name.startswith("int")
    assert schema.is_coupled == ("per tensor" in FACTS[name][2])


def test_bits_of_a_pair_are_those_of_all_weights() -> None:
    """w13 has twice the weights of w2."""
    assert resolve_layer_schema("int4-g32+int8").bits_per_weight() == (2 * (4 + 16 / 32) + 8) / 3
