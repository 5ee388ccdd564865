"""Quantized and fused sources that contradict themselves: one message that names the tensor or key, no artifact."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as serialize

from hqconv.conversion.resources import cpu_need
from hqconv.errors import HqconvError, RequestError
from hqconv.formats.encoding import part_names
from hqconv.models.expert_map import map_experts
from hqconv.planning.checks import check_request
from hqconv.planning.layer_encoding import direct_schemas
from hqconv.planning.output_units import kernel_unit
from hqconv.planning.spec import ConversionOptions, make_spec
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.command import call
from tests.make.effort import num_examples
from tests.make.small import GOOD, HIDDEN, INNER, LAYER, E, Source, Tensors, save

Change = Callable[[Tensors, dict[str, Any]], object]
LAST = E - 1  # an expert that is not the first, which the others are compared with
UP, DOWN = f"{LAYER}.{LAST}.up_proj", f"{LAYER}.{LAST}.down_proj"


def refused(tmp_path: Path, source: Source, schema: str) -> str:
    """The one message of a conversion that must fail for its input, and leaves nothing that looks whole."""
    folder, out = save(tmp_path / "src", source), tmp_path / "out"
    command = ("convert", folder, "-o", out, "--schema", schema, "--target", "sm90")
    result = call(*command, "--threads", 2)
    assert result.exit_code in (2, 3), (result.exit_code, result.output)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    message: str = result.stderr
    assert message.count("error: ") == 1
    assert "Traceback" not in message
    assert not (out / "hqconv.json").exists()
    if out.exists():
        assert "unfinished conversion" in call("inspect", out).stdout
        assert call("verify", out).exit_code != 0
    inspected = call("inspect", folder)
    assert inspected.exit_code in (0, 2, 3)
    assert inspected.exception is None or isinstance(inspected.exception, SystemExit)
    return message


# --- changes -----------------------------------------------------------------------------------------------


def quantization(**words: object) -> Change:
    return lambda tensors, config: config["quantization_config"].update(words)


def weights(**words: object) -> Change:
    """Words on a compressed-tensors scheme."""
    return lambda tensors, config: config["quantization_config"]["config_groups"]["group_0"][
        "weights"
    ].update(words)


def config(**words: object) -> Change:
    return lambda tensors, config: config.update(words)


def drop(*names: str) -> Change:
    return lambda tensors, config: [tensors.pop(name) for name in names]


def put(name: str, of: Callable[[torch.Tensor], torch.Tensor] | torch.Tensor) -> Change:
    """A new tensor, or what becomes of an old one."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = of if isinstance(of, torch.Tensor) else of(tensors[name])

    return change


def rename(name: str, to: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[to] = tensors.pop(name)

    return change


def every(ending: str, change: Callable[[str], Change]) -> Change:
    """A change of all tensors whose names end so."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            change(name)(tensors, config)

    return apply


def both(*changes: Change) -> Change:
    return lambda tensors, config: [change(tensors, config) for change in changes]


def value(name: str, number: float, *place: int) -> Change:
    """One number of a tensor; fp8 by its bits."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensor = tensors[name] = tensors[name].clone()
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        bits[place] = number

    return change


def floats(name: str) -> Change:
    return put(name, lambda tensor: tensor.float().bfloat16())


def cast(name: str, dtype: torch.dtype) -> Change:
    return put(name, lambda tensor: tensor.to(dtype))


def cut(name: str, dim: int = -1) -> Change:
    """The tensor without its last row or column."""
    return put(name, lambda tensor: tensor.narrow(dim, 0, tensor.size(dim) - 1))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
Case = tuple[str, Change, str]

DECLARED: dict[str, Case] = {
    # what the config says against what the tensors are
    "fp8 declared, floats stored": (
        "plain",
        config(quantization_config=FP8),
        r"0\.\w+\.weight\n(?s:.*)BF16",
    ),
    "mxfp4 stored, not declared": (
        "gpt_oss_mxfp4",
        lambda t, c: c.pop("quantization_config"),
        r"no quantization(?s:.*)experts\.gate_up_proj_blocks",
    ),
    "another fp8 type": (
        "fp8_blocks",
        quantization(fmt="e5m2"),
        r"0\.\w+\.weight\n(?s:.*)e5m2(?s:.*)F8_E4M3",
    ),
    "no block size": (
        "fp8_blocks",
        lambda t, c: c["quantization_config"].pop("weight_block_size"),
        r"block size(?s:.*)0\.\w+\.weight_scale_inv(?s:.*)\[2, 2\]",
    ),
    "group size": (
        "packed_int4",
        weights(group_size=64),
        r"0\.\w+\.weight_scale\n  expected: \[256, 4\]\n  found: \w+ \[256, 2\]",
    ),
    "gptq as awq": ("gptq", quantization(quant_method="awq"), r"0\.\w+\.qweight\n"),
    "awq as gptq, without an order": (
        "gptq",
        quantization(desc_act=False),
        rf"another order(?s:.*){LAYER}\.\d\.\w+\.g_idx",
    ),
    "zeros of another version": (
        "gptq",
        quantization(checkpoint_format="gptq_v2"),
        rf"zero points(?s:.*){LAYER}\.\d\.\w+\.qzeros",
    ),
    "sizes": (
        "fp8_blocks",
        config(moe_intermediate_size=512),
        r"0\.\w+\.weight\n(?s:.*)\[512, 256\](?s:.*)sizes of config",
    ),
    "sizes of a stack": (
        "gpt_oss_mxfp4",
        config(intermediate_size=512),
        r"experts\.gate_up_proj_blocks\n(?s:.*)share of \[4, 512, 8, 16\](?s:.*)sizes of config",
    ),
}

WORDS: dict[str, Case] = {
    # a quantization_config that is none
    "unknown method": ("fp8_blocks", quantization(quant_method="eetq"), r"'eetq' is not supported"),
    "list": (
        "plain",
        config(quantization_config=[FP8]),
        r"not an object\.\n  where: quantization_config",
    ),
    "nested list": (
        "plain",
        config(text_config={"quantization_config": []}),
        r"where: quantization_config",
    ),
    "names in a string": (
        "fp8_blocks",
        quantization(modules_to_not_convert="lm_head"),
        "modules_to_not_convert",
    ),
    "no regex": ("packed_int4", quantization(ignore=["re:("]), r"quantization_config\.ignore"),
}

PARTS: dict[str, Case] = {
    # tensors that are missing, too many, or of another kind
    "no scale of one expert": (
        "fp8_blocks",
        drop(f"{UP}.weight_scale_inv"),
        rf"{UP}\.weight_scale_inv",
    ),
    "no weight of one expert": ("fp8_blocks", drop(f"{UP}.weight"), rf"{UP}\.weight"),
    "no qzeros of one": ("gptq", drop(f"{UP}.qzeros"), rf"{UP}\.qzeros"),
    "wrong group count of one": (
        "packed_int4",
        cut(f"{UP}.weight_scale"),
        rf"{UP}\.weight_scale\n(?s:.*)\[256, 1\]",
    ),
    "groups of layers": (
        "gpt_oss_mxfp4",
        cut(f"{LAYER}.down_proj_scales"),
        r"down_proj_scales\n(?s:.*)share of \[4, 256, 7\]",
    ),
    "unknown part": ("fp8_blocks", put(f"{UP}.weight_foo", torch.ones(1)), rf"{UP}\.weight_foo"),
    "odd layers": (
        "gpt_oss_mxfp4",
        cut(f"{LAYER}.down_proj_blocks"),
        r"down_proj_blocks\n(?s:.*)\[4, 256, 8, 15\]",
    ),
    "one expert in floats": (
        "fp8_blocks",
        both(floats(f"{UP}.weight"), drop(f"{UP}.weight_scale_inv")),
        rf"{UP}\.weight",
    ),
    "w2 in floats": (
        "fp8_blocks",
        both(every("down_proj.weight", floats), every("down_proj.weight_scale_inv", drop)),
        r"is not quantized(?s:.*)0\.down_proj\.weight\n",
    ),
    "one expert of another fp8": (
        "fp8_blocks",
        put(f"{UP}.weight", lambda t: t.view(torch.uint8).view(torch.float8_e5m2)),
        rf"not like(?s:.*){UP}\.weight\n(?s:.*)F8_E5M2",
    ),
    "w2 of another fp8": (
        "fp8_tensors",
        every(
            "down_proj.weight",
            lambda n: put(n, lambda t: t.view(torch.uint8).view(torch.float8_e5m2)),
        ),
        r"mixes formats(?s:.*)0\.\w+\.weight\n",
    ),
    "scales of another dtype": (
        "fp8_blocks",
        cast(f"{UP}.weight_scale_inv", torch.bfloat16),
        rf"not like(?s:.*){UP}\.weight_scale_inv\n(?s:.*)BF16",
    ),
    "w2's scales of another dtype": (
        "fp8_blocks",
        every("down_proj.weight_scale_inv", lambda n: cast(n, torch.bfloat16)),
        r"mixes formats(?s:.*)bfloat16 scale",
    ),
    "bias of one expert": ("fp8_blocks", put(f"{UP}.bias", torch.ones(INNER)), rf"{UP}\.bias"),
    "bias of one projection": (
        "fp8_blocks",
        every(
            "up_proj.weight",
            lambda n: put(n.replace("weight", "bias"), torch.ones(INNER).bfloat16()),
        ),
        r"0\.up_proj",
    ),
}

STACKS: dict[str, Case] = {
    # fused tensors
    "too many experts": (
        "gpt_oss_mxfp4",
        put(f"{LAYER}.down_proj_scales", lambda t: torch.cat([t, t[:1]])),
        r"down_proj_scales\n(?s:.*)\[5, 256, 8\] does not hold 4 experts",
    ),
    "too few experts": (
        "gpt_oss_floats",
        cut(f"{LAYER}.gate_up_proj", 0),
        r"gate_up_proj\n(?s:.*)\[3, 256, 512\] does not hold 4 experts",
    ),
    "experts of the config": (
        "gpt_oss_floats",
        config(num_local_experts=8),
        r"experts\.\w+\n(?s:.*)8 experts",
    ),
    "no experts in the config": (
        "gpt_oss_floats",
        config(num_local_experts=0),
        r"not usable\.\n  where: num_local_experts",
    ),
    "stacks and single experts": (
        "gpt_oss_floats",
        put(f"{LAYER}.0.up_proj.weight", torch.ones(INNER, HIDDEN)),
        rf"twice(?s:.*){LAYER}\.",
    ),
    "no partner": (
        "gpt_oss_floats",
        drop(f"{LAYER}.down_proj", f"{LAYER}.down_proj_bias"),
        r"lacks(?s:.*)experts\.down_proj\n",
    ),
    "no weight but a bias": ("gpt_oss_floats", drop(f"{LAYER}.down_proj"), r"down_proj_bias\n"),
    "one bias missing": (
        "gpt_oss_mxfp4",
        drop(f"{LAYER}.down_proj_bias"),
        rf"mixes(?s:.*){LAYER}\.gate_up_proj",
    ),
    "bias of the wrong size": (
        "gpt_oss_mxfp4",
        cut(f"{LAYER}.down_proj_bias"),
        r"down_proj_bias\n(?s:.*)\[255\]",
    ),
    "odd bias": (
        "gpt_oss_mxfp4",
        cut(f"{LAYER}.gate_up_proj_bias"),
        r"gate_up_proj_bias\n(?s:.*)511",
    ),
    "unknown part": (
        "gpt_oss_mxfp4",
        put(f"{LAYER}.down_proj_foo", torch.ones(1)),
        r"not understood(?s:.*)down_proj_foo",
    ),
    "unknown stack": (
        "gpt_oss_mxfp4",
        put(f"{LAYER}.side_proj", torch.ones(E, 2, 2)),
        r"not understood(?s:.*)side_proj",
    ),
    "another orientation": (
        "gpt_oss_floats",
        put(f"{LAYER}.gate_up_proj", lambda t: t.transpose(1, 2)),
        r"gate_up_proj\n(?s:.*)\[4, 512, 256\]",
    ),
    "two orientations": (
        "qwen3_vl",
        both(
            config(moe_intermediate_size=192),
            put(f"{LAYER}.gate_up_proj", torch.ones(E, 384, HIDDEN).bfloat16()),
            put(f"{LAYER}.down_proj", torch.ones(E, 192, HIDDEN).bfloat16()),
        ),
        r"orientation(?s:.*)experts\.gate_up_proj\n(?s:.*)\[4, 384, 256\]",
    ),
    "no orientation": ("qwen3_vl", config(hidden_size=None), "orientation"),
    "flat": ("qwen3_vl", put(f"{LAYER}.down_proj", lambda t: t.flatten(0, 1)), r"experts\.\w+\n"),
    "without dimensions": (
        "qwen3_vl",
        put(f"{LAYER}.down_proj", torch.tensor(1.0).bfloat16()),
        r"experts\.\w+\n",
    ),
    "stacks of two dtypes": (
        "gpt_oss_floats",
        cast(f"{LAYER}.down_proj", torch.float16),
        r"mixes formats(?s:.*)gate_up_proj\n(?s:.*)BF16",
    ),
    "half quantized": (
        "gpt_oss_mxfp4",
        both(
            drop(f"{LAYER}.down_proj_blocks", f"{LAYER}.down_proj_scales"),
            put(f"{LAYER}.down_proj", torch.ones(E, INNER, HIDDEN).bfloat16()),
        ),
        r"is not quantized(?s:.*)experts\.down_proj\n",
    ),
}

E8M0_NAN, FP8_NAN, ONE = 255, 0x7F, 0x38
VALUES: dict[str, Case] = {
    # what only the tensors' numbers show
    "NaN code": ("fp8_blocks", value(f"{UP}.weight", FP8_NAN, 3, 4), rf"NaN(?s:.*){UP}\.weight\n"),
    "gate and up differ": (
        "nvfp4",
        put(f"{UP}.weight_scale_2", torch.tensor(0.75)),
        rf"different tensor-level scales(?s:.*){LAYER}\.3\.gate_proj\.weight and {UP}\.weight\n(?s:.*)--schema nvfp4",
    ),
    "g_idx too large": (
        "gptq",
        value(f"{UP}.g_idx", 4, 7),
        rf"group does not exist(?s:.*){UP}\.g_idx\n(?s:.*)found: 4",
    ),
    "NaN e8m0 scale": (
        "gpt_oss_mxfp4",
        value(f"{LAYER}.down_proj_scales", E8M0_NAN, 2, 0, 0),
        rf"NaN(?s:.*){LAYER}\.down_proj_scales, expert 2\n",
    ),
    "NaN bias": (
        "gpt_oss_mxfp4",
        value(f"{LAYER}.gate_up_proj_bias", math.nan, 2, 7),
        rf"bias is NaN(?s:.*){LAYER}\.gate_up_proj_bias, expert 2\n",
    ),
    "NaN in a stack": (
        "gpt_oss_floats",
        value(f"{LAYER}.down_proj", math.nan, 2, 7, 7),
        rf"NaN(?s:.*){LAYER}\.down_proj, expert 2\n",
    ),
}

CASES = [case for cases in (DECLARED, WORDS, PARTS, STACKS, VALUES) for case in cases.values()]


@pytest.mark.parametrize(("base", "change", "message"), CASES)
def test_refusals(base: str, change: Change, message: str, tmp_path: Path) -> None:
    make, schema = GOOD[base]
    source = make()
    change(*source)
    found = refused(tmp_path, source, schema)
    assert re.search(message, found), found


@pytest.mark.parametrize("name", [name for name in VALUES if name != "gate and up differ"])
def test_bad_numbers_are_seen_in_requantizing_too(name: str, tmp_path: Path) -> None:
    base, change, message = VALUES[name]
    source = GOOD[base][0]()
    change(*source)
    found = refused(tmp_path, source, "int8")
    assert re.search(message, found), found


# --- whatever else -----------------------------------------------------------------------------------------

BASES = sorted(GOOD)
DTYPES = [
    "BF16",
    "F16",
    "F32",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "U8",
    "I8",
    "I32",
    "I64",
    "F4",
    "BOOL",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=4,
)


def refs_of(tensors: Tensors) -> dict[str, TensorRef]:
    """What `map_experts` sees of tensors: the header of a file."""
    data = serialize({name: tensor.contiguous() for name, tensor in tensors.items()})
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {
        name: TensorRef(name, words["dtype"], tuple(words["shape"]), 0, begin, end - begin)
        for name, words in entries.items()
        for begin, end in [words["data_offsets"]]
    }


@functools.cache
def headers(base: str) -> tuple[dict[str, TensorRef], dict[str, Any]]:
    tensors, words = GOOD[base][0]()
    return refs_of(tensors), words


def damage(draw: Callable[..., Any], refs: dict[str, TensorRef]) -> None:
    """Remove, rename, relabel or reshape one tensor, or all of one kind."""
    name = draw(st.sampled_from(sorted(refs)))
    part = name.rpartition(".")[2]
    chosen = [n for n in refs if n.endswith(f".{part}")] if draw(st.booleans()) else [name]
    action = draw(st.sampled_from(["remove", "rename", "dtype", "shape"]))
    other = draw(st.sampled_from([*part_names(), "foo", "gate_up_proj_bias", "down_proj_scales"]))
    dtype, sizes = (
        draw(st.sampled_from(DTYPES)),
        draw(st.lists(st.sampled_from([0, 1, 2, 4, 128, 256]), max_size=4)),
    )
    for each in chosen:
        ref = refs.pop(each)
        if action == "rename":
            each = f"{each.rpartition('.')[0]}.{other}"
        if action != "remove":
            refs[each] = ref._replace(
                name=each,
                dtype=dtype if action == "dtype" else ref.dtype,
                shape=tuple(sizes) if action == "shape" else ref.shape,
            )


@settings(max_examples=num_examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), base=st.sampled_from(BASES), num_damages=st.integers(1, 3))
def test_any_headers_are_mapped_or_refused(
    data: st.DataObject, base: str, num_damages: int
) -> None:
    refs, words = copy.deepcopy(headers(base))
    for _ in range(num_damages):
        damage(data.draw, refs)
        if not refs:
            return
    quantization = words.get("quantization_config")
    if quantization is not None and data.draw(st.booleans()):
        key = data.draw(
            st.sampled_from([*quantization, "ignore", "dynamic", "expert_dtype", "group_size"])
        )
        quantization[key] = data.draw(JSON)
    if data.draw(st.booleans()):
        words[data.draw(st.sampled_from([*words, "text_config"]))] = data.draw(JSON)
    with contextlib.suppress(HqconvError):
        found = map_experts(refs, words, quantization)
        assert sorted([*found.converted, *found.copied, *found.dropped]) == sorted(refs)
        for schema in (None, resolve_schema("int8")):
            with contextlib.suppress(RequestError):
                request = make_spec(ConversionOptions(schema), found, words, GpuTarget(90))
                check_request(found, request)
                planned = [kernel_unit(layer, request) for layer in found.layers]
                assert min(cpu_need(unit).num_bytes(1) for unit in planned) > 0
        direct_schemas(found, "bfloat16")
