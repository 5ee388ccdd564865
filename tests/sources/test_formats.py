"""Every source format, converted and verified, against what the writers of `tests.make.formats` meant.

A direct conversion must decode to exactly these numbers. A requantized one must equal, byte for byte, that of a
float32 checkpoint that holds them. And verify must notice every part of a source that was changed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv import dequantize
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.schemas.grid import Grid
from hqconv.verification.result import CheckResult
from tests.make import conversions
from tests.make.formats import FORMATS, KINDS, FormatSpec, Written, write
from tests.make.layouts import GPT_OSS_QUARK, Block, plain
from tests.make.qwen import read_tree

ROLES = {"w1": 0, "w3": 1, "w2": 2}
DIRECT = [name for name, spec in FORMATS.items() if spec.direct]
REFUSED = [name for name, spec in FORMATS.items() if not spec.direct]
Get = Callable[[str], Written]


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The checkpoint of a format, written once."""

    @functools.cache
    def written(name: str) -> Written:
        package = FORMATS[name].needs
        if package and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        return write(tmp_path_factory.mktemp("sources") / name, name)

    return written


def check_weights(out: Path, source: Path) -> CheckResult:
    (result,) = conversions.check(out, source, "weights").results
    return result


def assert_decodes_to(out: Path, truth: dict[str, Block]) -> None:
    left = conversions.manifest(out).get("left_blocks", [])
    for name in truth.keys() - set(left):
        found = dequantize(out, layer=name)
        assert found.keys() == truth[name].keys()
        for part, values in truth[name].items():
            assert torch.equal(found[part], values), (name, part)


def plain_twin(folder: Path, written: Written) -> Path:
    """A checkpoint of the same experts in float32, with tensors of their own."""
    folder.mkdir()
    tensors = {"model.norm.weight": torch.ones(8)}
    for layer, parts in written.truth.items():
        for role, word in zip(ROLES, written.spec.layout.words, strict=True):
            for e, values in enumerate(parts[role]):
                tensors[f"{layer}.{e}.{word}.weight"] = values.clone()
                if f"b{role[1]}" in parts:
                    tensors[f"{layer}.{e}.{word}.bias"] = parts[f"b{role[1]}"][e].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = json.loads((written.folder / "config.json").read_text())
    for key in ("quantization_config", "quantize"):
        words.pop(key, None)
    (folder / "config.json").write_text(json.dumps(words))
    return folder


def layers(out: Path) -> list[dict[str, Any]]:
    return list(conversions.manifest(out)["blocks"].values())


# --- kept as they are --------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DIRECT)
def test_source_keeps_codes_and_scales(name: str, get: Get, tmp_path: Path) -> None:
    written = get(name)
    spec = written.spec
    out = tmp_path / "out"
    conversions.run(written.folder, out, "source", Grid(tp=spec.tp))
    manifest = conversions.manifest(out)
    assert (manifest["schema_name"], manifest["dtype"]) == (spec.direct, spec.dtype)
    for layer in layers(out):
        assert layer["conversion"] == "direct"
        for error in layer["quantization_error"].values():
            assert (error["relative_error"], error["num_experts_requantized"]) == (0, 0)
    assert_decodes_to(out, written.truth)
    conversions.assert_verified(out, written.folder)


@pytest.mark.parametrize("name", REFUSED)
def test_source_is_refused(name: str, get: Get, tmp_path: Path) -> None:
    written = get(name)
    with pytest.raises(HqconvError) as caught:
        conversions.run(written.folder, tmp_path / "out", "source")
    assert isinstance(caught.value, RequestError | InputError)
    assert written.spec.refused
    assert written.spec.refused in str(caught.value)
    assert "schema" in caught.value.remedy
    assert not (tmp_path / "out" / "hqconv.json").exists()


def test_float16_scales_are_refused_for_bfloat16(get: Get, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match="bfloat16 scales cannot hold its float16 scales"
    ) as caught:
        conversions.run(get("gptq-int4").folder, tmp_path / "out", "source", dtype="bfloat16")
    assert "--dtype float16" in caught.value.remedy
    conversions.run(get("gptq-int4").folder, tmp_path / "out", "int4", dtype="bfloat16")
    assert [layer["conversion"] for layer in layers(tmp_path / "out")] == ["requantized"]


def test_a_block_scale_that_tp_cuts_is_repeated(get: Get, tmp_path: Path) -> None:
    written = get("fp8-block")
    conversions.run(
        written.folder, tmp_path / "out", "source", Grid(tp=4)
    )  # 128 x 128 blocks, 64 columns a rank
    schema = conversions.manifest(tmp_path / "out")["weight_schema"]
    assert (schema["weight_scale_group_size_n"], schema["weight_scale_group_size"]) == (64, 64)
    assert_decodes_to(tmp_path / "out", written.truth)
    conversions.assert_verified(tmp_path / "out", written.folder)


def test_layers_that_have_the_schema_already_are_kept(get: Get, tmp_path: Path) -> None:
    for name, other in (("mixed-ct-ignore", "quantized"), ("mixed-gptq-dynamic", "requantized")):
        written, out = get(name), tmp_path / name
        conversions.run(written.folder, out, "int4")
        assert [layer["conversion"] for layer in layers(out)] == ["direct", other]
        first = next(iter(written.truth))
        assert_decodes_to(out, {first: written.truth[first]})
        conversions.assert_verified(out, written.folder)


# --- quantized anew ----------------------------------------------------------------------------------------


def target_of(written: Written) -> str:
    """A schema that no layer of the source has."""
    is_held = written.spec.direct in ("int4", "int4-c") or written.spec.layers
    is_held = is_held or "g_idx" in written.spec.refused  # of w2, sorted
    return "mxfp4" if is_held else written.spec.target


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMATS)
def test_requantized_as_the_same_numbers_in_float32(name: str, get: Get, tmp_path: Path) -> None:
    written = get(name)
    schema, out, twin = target_of(written), tmp_path / "out", tmp_path / "twin"
    conversions.run(written.folder, out, schema)
    conversions.run(plain_twin(tmp_path / "plain", written), twin, schema)
    assert read_tree(out / "experts") == read_tree(twin / "experts")
    decoded = {layer: dequantize(out, layer=layer) for layer in written.truth}
    for layer, words in conversions.manifest(out)["blocks"].items():
        is_plain = words["source_format"]["decoder"] == "float"
        assert words["conversion"] == ("quantized" if is_plain else "requantized")
        for role in ROLES:
            values, error = written.truth[layer][role].double(), words["quantization_error"][role]
            found = (decoded[layer][role].double() - values).norm() / values.norm()
            assert error["relative_error"] == pytest.approx(float(found), rel=1e-6)
            assert 0 < error["relative_error"] < 0.25
    conversions.assert_verified(out, written.folder)  # golden artifacts have the ranks


def test_floats_of_gate_and_up_in_one_tensor_of_an_expert(tmp_path: Path) -> None:
    """Without biases, when several experts' floats are taken as one stack where they lie as one."""
    written = write(tmp_path / "src", FormatSpec(plain, {}, "", layout=GPT_OSS_QUARK))
    out, twin = tmp_path / "out", tmp_path / "twin"
    conversions.run(written.folder, out, "mxfp4", Grid(tp=2))
    conversions.run(plain_twin(tmp_path / "plain", written), twin, "mxfp4", Grid(tp=2))
    assert read_tree(out / "experts") == read_tree(twin / "experts")
    conversions.assert_verified(out, written.folder)


# --- how much was exact ------------------------------------------------------------------------------------


def exact_groups(out: Path, truth: dict[str, Block], size: int) -> dict[str, tuple[int, int]]:
    """Per role, over all blocks: groups of columns that decode to the source's numbers, and all groups."""
    counts = {}
    for role in ROLES:
        same = [
            (dequantize(out, layer=layer)[role] == parts[role]).unflatten(-1, (-1, size)).all(-1)
            for layer, parts in truth.items()
        ]
        counts[role] = (sum(int(one.sum()) for one in same), sum(one.numel() for one in same))
    return counts


def recorded_groups(out: Path) -> dict[str, tuple[int, int]]:
    errors = [layer["quantization_error"] for layer in layers(out)]
    return {
        role: (
            sum(e[role]["num_exact_groups"] for e in errors),
            sum(e[role]["num_groups"] for e in errors),
        )
        for role in ROLES
    }


@pytest.mark.parametrize(
    ("name", "schema", "size", "is_lossless"),
    [
        ("mxfp4-deepseek-v4", "nvfp4", 16, True),
        ("mxfp4-gpt-oss", "nvfp4", 16, True),
        ("quark-mxfp4", "nvfp4", 16, True),
        ("mxfp4-deepseek-v4", "mxfp8", 32, True),
        ("ct-mxfp4", "mxfp8", 32, True),
        (
            "fp8-block-ue8m0",
            "mxfp8",
            32,
            True,
        ),  # a group's own power of two is never the larger one
        ("fp8-block", "mxfp8", 32, False),
        ("fp8-channel", "nvfp4", 16, False),
    ],
)
def test_counts_of_exact_groups_are_true(
    name: str, schema: str, size: int, is_lossless: bool, get: Get, tmp_path: Path
) -> None:
    written, out = get(name), tmp_path / "out"
    conversions.run(written.folder, out, schema)
    counts, errors = recorded_groups(out), layers(out)[0]["quantization_error"]
    assert counts == exact_groups(out, written.truth, size)
    if is_lossless:
        assert_decodes_to(out, written.truth)
    assert all(exact == of for exact, of in counts.values()) == is_lossless
    assert all(error["relative_error"] == 0 for error in errors.values()) == is_lossless
    conversions.assert_verified(out, written.folder)


# --- our own layouts as sources ----------------------------------------------------------------------------


def test_the_checkpoint_layout_refuses_other_quantized_layers(get: Get, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="its other layers are quantized") as caught:
        conversions.run(get("fp8-block").folder, tmp_path / "out", "source", layout="checkpoint")
    assert "self_attn.o_proj" in caught.value.where


# --- a source that was changed -----------------------------------------------------------------------------

# The last two are bitsandbytes' tables: of the 4-bit type, which it has itself, and of scales that may not occur.
UNUSED = (
    "input_scale",
    "input_global_scale",
    "weight_shape",
    "weight.quant_map",
    "weight.nested_quant_map",
)
# The bit that doubles or halves a number, or any bit of a code: byte of the element, and bit.
_BIT = {"F32": (2, 7), "BF16": (0, 7), "F16": (1, 2)}


def flip(path: Path, tensor: str) -> None:
    """Change one bit in the middle of a tensor."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])[tensor]
    begin, end = entry["data_offsets"]
    width = {"F32": 4, "BF16": 2, "F16": 2}.get(entry["dtype"], 1)
    byte, bit = _BIT.get(entry["dtype"], (0, 0))
    data[8 + size + begin + (end - begin) // width // 2 * width + byte] ^= 1 << bit
    path.write_bytes(data)


def tensors_of_an_expert(written: Written) -> list[str]:
    """The tensors of the second expert's up and down projection, or all of a layer's stacks; those of use."""
    layer = next(iter(written.truth))
    names = [
        name
        for name in load_file(written.folder / "model.safetensors")
        if name.startswith(f"{layer}.")
    ]
    if written.spec.layout.fused is None:
        words = written.spec.layout.words[1:]
        words = (written.spec.layout.pair, words[1]) if written.spec.layout.pair else words
        names = [n for n in names if n.startswith(tuple(f"{layer}.1.{word}." for word in words))]
    return [name for name in names if not name.endswith(UNUSED)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_verify_notices_a_changed_bit_of_every_part(name: str, tmp_path: Path) -> None:
    pytest.importorskip(FORMATS[name].needs or "torch")
    written = write(tmp_path / "source", name, experts=2)
    conversions.run(
        written.folder, tmp_path / "out", "source" if written.spec.direct else target_of(written)
    )
    path = written.folder / "model.safetensors"
    good = path.read_bytes()
    for tensor in tensors_of_an_expert(written):
        flip(path, tensor)
        result = check_weights(tmp_path / "out", written.folder)
        assert result.findings, tensor
        path.write_bytes(good)
    result = check_weights(tmp_path / "out", written.folder)
    assert not result.findings


# --- where the tensors are ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["fp8-block", "mxfp4-gpt-oss", "fused-fp8-projection", "ct-int4-g32", "bitnet"]
)
def test_a_single_expert(name: str, tmp_path: Path) -> None:
    src, out = (
        write(tmp_path / "src", name, hidden=256, inner=256, experts=1).folder,
        tmp_path / "out",
    )
    conversions.run(src, out, "source")
    conversions.assert_verified(out, src)
