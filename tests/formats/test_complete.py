"""Completing formats from headers, and refusing tensors that contradict the config: every message names a tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hqconv.errors import InputError
from hqconv.formats.encoding import ResolvedFormat, part_names, resolve_format
from hqconv.formats.source_format import ANY, PLAIN, SourceFormat
from hqconv.schemas.tensors import TensorSpec
from tests.make.coded import Case, cases

ALL = {case.name: case for case in cases()}
FP8 = SourceFormat("fp8", "fp8", group_n=ANY, group_k=ANY)


def headers_of(**headers: tuple[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    """Headers by raw name; `__` in a keyword stands for a dot."""
    names = {key.replace("__", "."): value for key, value in headers.items()}
    return {name: TensorSpec(f"m.{name}", *header) for name, header in names.items()}


def refused(
    declared: SourceFormat, headers: dict[str, TensorSpec], n: int, k: int, *texts: str
) -> None:
    with pytest.raises(InputError) as info:
        resolve_format(declared, headers, n, k)
    for text in texts:
        assert text in str(info.value)


# --- what is filled in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_case_is_complete(name: str) -> None:
    case = ALL[name]
    done = case.completed()
    assert set(done.used.values()) | set(done.unused) == set(case.tensors)
    assert set(case.tensors) <= set(part_names())
    assert done.format.b_dtype
    assert ANY not in (done.format.group_n, done.format.group_k)
    assert done.format.scale_dtype
    assert resolve_format(done.format, case.headers(), *case.shape) == done


@pytest.mark.parametrize(
    ("scale", "groups"),
    [((), (0, 0)), ((1,), (0, 0)), ((1, 1), (0, 0)), ((64,), (1, 0)), ((64, 1), (1, 0))],
)
@pytest.mark.parametrize(
    ("code", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("U8", "float8e8m0")]
)
def test_fp8_groups_come_from_the_scale(
    scale: tuple[int, ...], groups: tuple[int, int], code: str, dtype: str
) -> None:
    headers = headers_of(weight=("F8_E5M2", (64, 32)), scale=(code, scale), input_scale=("F32", ()))
    done = resolve_format(FP8, headers, 64, 32)
    expected = replace(
        FP8, b_dtype="float8e5m2", scale_dtype=dtype, group_n=groups[0], group_k=groups[1]
    )
    reason = "activation scale, not used by 16-bit activations"
    assert done == ResolvedFormat(
        expected, {"weight": "weight", "scale": "scale"}, {"input_scale": reason}
    )


def test_desc_act_is_permuted_unless_there_is_one_group() -> None:
    case = ALL["gptq-desc-act"]
    assert case.completed().format.is_permuted
    channel = replace(case.declared, group_k=0, is_permuted=False)
    headers = {
        **case.headers(),
        "scales": TensorSpec("m.scales", "F16", (1, case.shape[0])),
        "qzeros": TensorSpec("m.qzeros", "I32", (1, case.shape[0] // 8)),
    }
    assert not resolve_format(channel, headers, *case.shape).format.is_permuted


def test_fp4_elements_and_bytes() -> None:
    declared = ALL["mxfp4-deepseek-v4"].declared
    for code, columns in (("U8", 32), ("I8", 32), ("F4", 32), ("F4", 64)):
        headers = headers_of(weight=(code, (16, columns)), scale=("F8_E8M0", (16, 2)))
        assert resolve_format(declared, headers, 16, 64).used == {
            "weight": "weight",
            "scale": "scale",
        }


def test_bitsandbytes() -> None:
    declared = SourceFormat("nf4", "bnb4", group_n=ANY, group_k=ANY)
    headers = headers_of(
        weight=("U8", (64, 1)),
        weight__absmax=("U8", (2,)),
        weight__quant_map=("F32", (16,)),
        weight__nested_absmax=("F32", (1,)),
        weight__nested_quant_map=("F32", (256,)),
        weight__quant_state__bitsandbytes__nf4=("U8", (90,)),
    )
    headers["weight.quant_state.bitsandbytes__nf4"] = headers.pop(
        "weight.quant_state.bitsandbytes.nf4"
    )
    done = resolve_format(declared, headers, 2, 64)
    assert done.used["quant_state"] == "weight.quant_state.bitsandbytes__nf4"
    del headers["weight.nested_absmax"]
    refused(declared, headers, 2, 64, "nested_absmax", "missing")


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_required_part_is_missed(name: str) -> None:
    case = ALL[name]
    optional = {"bias", "weight_shape", "input_scale", "input_global_scale"}
    if "desc" not in name:
        optional |= {"g_idx"}
    if not case.completed().format.has_zero_point:
        optional |= {"qzeros"}
    for raw in set(case.tensors) - optional:
        headers = case.headers()
        del headers[raw]
        where = ("where: e.",) if headers else ()
        refused(case.declared, headers, *case.shape, "missing", raw, *where)


@pytest.mark.parametrize("name", ALL)
def test_every_shape_and_dtype_is_checked(name: str) -> None:
    case = ALL[name]
    for raw in set(case.completed().used.values()):
        part = case.headers()[raw]
        for wrong in (
            replace(part, shape=(*part.shape, 7)),
            replace(part, shape=(*part.shape[:-1], 977)),
            replace(part, dtype="F64"),
        ):
            with pytest.raises(InputError, match=rf"where: e\.{raw}"):
                resolve_format(case.declared, {**case.headers(), raw: wrong}, *case.shape)


@pytest.mark.parametrize("name", ALL)
def test_foreign_parts_are_refused(name: str) -> None:
    case = ALL[name]
    headers = {**case.headers(), "weight_surprise": TensorSpec("e.weight_surprise", "F32", (1,))}
    refused(case.declared, headers, *case.shape, "no such tensor", "where: e.weight_surprise")


@pytest.mark.parametrize("name", ALL)
def test_a_config_that_forgets_the_quantization(name: str) -> None:
    case = ALL[name]
    refused(PLAIN, case.headers(), *case.shape, "declares no quantization", "where: e.")


@pytest.mark.parametrize("name", ALL)
def test_a_config_that_invents_the_quantization(name: str) -> None:
    case = ALL[name]
    headers = headers_of(weight=("BF16", case.shape))
    refused(case.declared, headers, *case.shape, "declares a quantized module", "where: m.weight")


def test_two_names_for_one_part() -> None:
    headers = headers_of(
        weight=("F8_E4M3", (8, 8)), weight_scale=("F32", ()), weight_scale_inv=("F32", ())
    )
    refused(FP8, headers, 8, 8, "same part", "m.weight_scale")


def test_blocks_without_a_size() -> None:
    headers = headers_of(weight=("F8_E4M3", (256, 256)), weight_scale_inv=("F32", (2, 2)))
    refused(FP8, headers, 256, 256, "no block size", "m.weight_scale_inv", "weight_block_size")


def test_declared_codes_and_stored_codes() -> None:
    headers = headers_of(weight=("F8_E5M2", (8, 8)), weight_scale=("F32", ()))
    refused(replace(FP8, b_dtype="float8e4m3"), headers, 8, 8, "wrong dtype", "m.weight", "F8_E5M2")


@pytest.mark.parametrize(
    ("declared", "n", "k", "text"),
    [
        (ALL["mxfp4-deepseek-v4"].declared, 16, 48, "multiple of 32"),
        (ALL["modelopt-nvfp4"].declared, 16, 24, "multiple of 16"),
        (ALL["ct-int3-padded"].declared, 16, 40, "multiple of 32"),
        (ALL["gptq-int4-zp"].declared, 12, 64, "multiple of 8"),
        (ALL["awq"].declared, 12, 64, "multiple of 8"),
        (ALL["bitnet"].declared, 16, 20, "multiple of 16"),
    ],
)
def test_sizes_that_cannot_be_packed(declared: SourceFormat, n: int, k: int, text: str) -> None:
    raw = "weight" if declared.encoding in ("mxfp4", "nvfp4", "bitnet") else "qweight"
    refused(declared, {raw: TensorSpec("m." + raw, "U8", (n, k))}, n, k, text)


def test_the_cases_are_of_every_decoder() -> None:
    decoders = {case.declared.encoding for case in ALL.values()}
    known = {
        "fp8",
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "packed_int",
        "int8",
        "gptq",
        "awq",
        "bitnet",
        "int4_pairs",
        "mxfp6",
        "quark",
        "humming",
    }
    assert decoders == known
    assert isinstance(ALL["awq"], Case)
