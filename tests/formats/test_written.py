"""Decoders against tensors that publishers' own code wrote: recorded in tests/data/written, or written here and now."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hqconv.errors import InputError
from hqconv.formats.encoding import decode_matrix, resolve_format
from hqconv.formats.quant_config import declared_formats
from hqconv.schemas.tensors import TensorSpec
from tests.make import configs
from tests.make.configs import Json

DATA = Path(__file__).resolve().parents[1] / "data" / "written" / "words.json"
EXPERT = "model.layers.0.mlp.experts.0.up_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


@functools.cache
def recorded(writer: str) -> dict[str, torch.Tensor]:
    """The tensors that a package wrote, and what it wrote them from: w."""
    tensors = json.loads(DATA.read_text())[writer]["tensors"]
    return {
        name: torch.frombuffer(
            bytearray.fromhex(entry["hex"]), dtype=getattr(torch, entry["dtype"])
        ).reshape(entry["shape"])
        for name, entry in tensors.items()
    }


def decoded(config: Json, tensors: dict[str, torch.Tensor], n: int, k: int) -> torch.Tensor:
    """What hqconv makes of a matrix under a config, from its headers on."""
    fmt = declared_formats(config["quantization_config"], {}).of(EXPERT)
    headers = {
        name: TensorSpec(f"{EXPERT}.{name}", NAMES[t.dtype], tuple(t.shape))
        for name, t in tensors.items()
    }
    found = resolve_format(fmt, headers, n, k)
    return decode_matrix(
        found.format, {part: tensors[name] for part, name in found.used.items()}, (n, k), {}
    ).values()


def assert_nearest(
    values: torch.Tensor, w: torch.Tensor, step: torch.Tensor, grid: torch.Tensor
) -> None:
    """Every value is as near to w as a point of the grid times its step can be."""
    points = torch.cat([grid, -grid]) * step.double().unsqueeze(-1)
    best = (points - w.double().unsqueeze(-1)).abs().amin(-1)
    assert ((values.double() - w.double()).abs() <= best + 1e-6 * w.double().abs() + 1e-9).all()
    assert (values != 0).double().mean() > 0.5


def powers(scale: torch.Tensor) -> torch.Tensor:
    return (2.0 ** (scale.double() - 127)).repeat_interleave(32, 1)


def part(writer: str, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): t
        for name, t in recorded(writer).items()
        if name.startswith(prefix)
    }


def test_modelopt_mxfp4_is_what_its_own_decoder_says() -> None:
    tensors = recorded("modelopt")
    stored = {name: tensors[name] for name in ("weight", "weight_scale")}
    found = decoded(configs.modelopt("W4A8_MXFP4_FP8", group_size=32), stored, 8, 64)
    assert torch.equal(found, tensors["expected"])
    assert_nearest(found, tensors["w"], powers(tensors["weight_scale"]), E2M1)


@pytest.mark.parametrize(("bits", "grid"), [(4, E2M1), (8, E4M3)])
def test_auto_round_writes_mx_fp(bits: int, grid: torch.Tensor) -> None:
    tensors = part("autoround", f"{bits}.")
    config = configs.auto_round("auto_round:mx_fp", data_type="mx_fp", bits=bits, group_size=32)
    found = decoded(config, tensors, 8, 64)
    assert_nearest(found, recorded("autoround")["w"], powers(tensors["weight_scale"]), grid)


def test_auto_round_writes_nv_fp() -> None:
    tensors = part("autoround", "nv.")
    found = decoded(
        configs.auto_round("auto_round:nv_fp", data_type="nv_fp", group_size=16), tensors, 8, 64
    )
    step = (
        tensors["weight_scale"].double().repeat_interleave(16, 1)
        / tensors["weight_global_scale"].double()
    )
    w = recorded("autoround")["w"]
    assert_nearest(found, w.clamp(-6 * step, 6 * step).float(), step, E2M1)


@pytest.mark.parametrize(
    ("method", "changes", "blocks"),
    [
        ("row", {}, (1, 64)),
        ("tensor", {"weight_scale_method": "tensor"}, (8, 64)),
        ("block", {"weight_scale_method": "block", "weight_block_size": [4, 32]}, (4, 32)),
    ],
)
def test_gptqmodels_fp8_scale_divides(
    method: str, changes: dict[str, Any], blocks: tuple[int, int]
) -> None:
    """A decoder that multiplied would be off by the square of the scale."""
    tensors = part("gptqmodel", f"{method}.")
    found = decoded(configs.gptqmodel_fp8(**changes), tensors, 8, 64)
    inverse = tensors["weight_scale_inv"].double().reshape(8 // blocks[0], 64 // blocks[1])
    step = (1 / inverse).repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
    assert_nearest(found, recorded("gptqmodel")["w"], step, E4M3)


def test_a_scale_that_divides_must_be_positive() -> None:
    tensors = part("gptqmodel", "row.")
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"].clone()
    tensors["weight_scale_inv"][3] = 0
    with pytest.raises(InputError, match="scale is not usable"):
        decoded(configs.gptqmodel_fp8(), tensors, 8, 64)


def test_compressed_tensors_mxfp6() -> None:
    """Packed and unpacked by compressed-tensors itself."""
    helpers = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers")
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor(
        [m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)]
    )
    picked = magnitudes[torch.randint(0, 32, (8, 64), generator=generator)]
    values = picked * (1 - 2 * torch.randint(0, 2, (8, 64), generator=generator))
    exponents = torch.randint(120, 130, (8, 2), generator=generator, dtype=torch.uint8)
    packed = helpers.pack_fp6_to_uint8(values)
    assert torch.equal(helpers.unpack_fp6_from_uint8(packed, 8, 64, torch.float32), values)
    config = configs.compressed("mxfp6-pack-quantized", 6, "float", "group", group_size=32)
    found = decoded(config, {"weight_packed": packed, "weight_scale": exponents}, 8, 64)
    assert torch.equal(found.double(), values.double() * powers(exponents))


def test_w4afp8_pairs() -> None:
    """vLLM's own case: -8 … 7 in pairs, the first in the low bits, are Humming's codes 0 … 15."""
    signed = torch.arange(-8, 8, dtype=torch.int8).repeat(8)
    encoded = signed.to(torch.uint8) & 15
    packed = (encoded[::2] | encoded[1::2] << 4).view(torch.int8).reshape(1, 64)
    scale = torch.full((1, 1), 0.25)
    found = decoded(configs.w4afp8(), {"weight": packed, "weight_scale_inv": scale}, 1, 128)
    assert torch.equal(found, signed.float().reshape(1, 128) * 0.25)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (
            configs.modelopt("W4A8_MXFP4_FP8"),
            {"weight": (8, 64), "weight_scale": (8, 2)},
        ),  # fp8's shape
        (
            configs.modelopt("W4A8_NVFP4_FP8", group_size=32),
            {"weight": (8, 32), "weight_scale": (8, 4)},
        ),  # of 16
        (configs.w4afp8(), {"weight": (8, 128), "weight_scale_inv": (8, 1)}),  # fp8's shape
        (
            configs.compressed("mxfp6-pack-quantized", 6, "float", "group", group_size=32),
            {"weight_packed": (8, 32), "weight_scale": (8, 2)},  # mxfp4's shape
        ),
    ],
)
def test_a_shape_that_contradicts_the_config_is_refused(
    config: Json, tensors: dict[str, tuple[int, int]]
) -> None:
    k = 128 if "w4afp8" in str(config) else 64
    fmt = declared_formats(config["quantization_config"], {}).of(EXPERT)
    headers = {
        name: TensorSpec(name, "F32" if "inv" in name else "U8", shape)
        for name, shape in tensors.items()
    }
    with pytest.raises(InputError, match="wrong shape"):
        resolve_format(fmt, headers, 8, k)
