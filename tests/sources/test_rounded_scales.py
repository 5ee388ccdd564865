"""Scales that the parameter dtype cannot hold are rounded, and the codes kept: every format that has such scales.

What is expected is read from the source with safetensors and rounded with torch's `.to(dtype)`, by code of its own.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv import dequantize
from hqconv.errors import InputError
from hqconv.schemas.grid import Grid
from tests.make import configs, conversions
from tests.make import packing as pack
from tests.make.damage import Damaged
from tests.make.formats import FORMATS, write
from tests.make.qwen import read_tree
from tests.make.spec import FormatSpec

F32 = torch.float32
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROUNDED = "direct, scales rounded"
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def compressed(
    encode: pack.Encoder, storage: str, bits: int, strategy: str, **weights: object
) -> FormatSpec:
    kind = "float" if storage == "float-quantized" else "int"
    return FormatSpec(encode, configs.compressed(storage, bits, kind, strategy, **weights), "")


# Beside the formats of `FORMATS`: compressed-tensors with float32 scales.
MORE = {
    "ct-fp8-channel": compressed(pack.fp8("weight_scale"), "float-quantized", 8, "channel"),
    "ct-w8-channel": compressed(pack.int8(dtype=F32), "int-quantized", 8, "channel"),
    "ct-w8-channel-zp": compressed(
        pack.int8(asymmetric=True, dtype=F32), "int-quantized", 8, "channel", symmetric=False
    ),
    "ct-int8-channel": compressed(
        pack.pack_quantized(8, 0, dtype=F32), "pack-quantized", 8, "channel"
    ),
    "ct-int4-g128": compressed(
        pack.pack_quantized(4, 128, dtype=F32), "pack-quantized", 4, "group", group_size=128
    ),
}
# The schema that has the source's codes; what `--schema source --round-scales` chooses, where that is another.
CASES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("fp8-channel-f32", "fbgemm-fp8", "fused-fbgemm-fp8"), ("fp8", "fp8")),
    **dict.fromkeys(("quark-fp8-channel", "ct-fp8-channel"), ("fp8", "fp8")),
    **dict.fromkeys(("fused-fp8-expert", "fused-fp8-projection"), ("fp8", "fp8-block")),
    **dict.fromkeys(("fp8-tensor", "fp8-tensor-apart"), ("fp8", "fp8-block")),
    **dict.fromkeys(("modelopt-fp8", "quark-fp8-tensor"), ("fp8", "fp8-block")),
    **dict.fromkeys(("modelopt-int8", "quark-int8", "ascend-w8a8"), ("int8", "int8")),
    **dict.fromkeys(("ascend-w8a8-file", "ct-naive-int8"), ("int8", "int8")),
    **dict.fromkeys(("ct-w8-channel", "ct-int8-channel"), ("int8", "int8")),
    "ct-w8-channel-zp": ("int8-c-zp", "int8-c-zp"),
    "ct-int4-g128": ("int4", "int4"),
}
Get = Callable[[str], Path]


def stretch(folder: Path) -> Path:
    """Multiply float32 scales by a power of two, so that float16 holds them too."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dtype == F32 and "scale" in name and "input" not in name:
            tensors[name] = tensor * 64.0
    save_file(tensors, path, {"format": "pt"})
    return folder


def set_scale(folder: Path, ending: str, row: int, value: float) -> str:
    """Change one scale of the tensor whose name ends so; return its name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(f"{ending}.weight_scale"))
    tensors[name].view(-1)[row] = value
    save_file(tensors, path, {"format": "pt"})
    return name


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The checkpoint of a case, written once."""

    @functools.cache
    def folder(name: str) -> Path:
        spec = MORE.get(name) or FORMATS[name]
        return stretch(write(tmp_path_factory.mktemp("rounded") / name, spec).folder)

    return folder


# --- the oracle --------------------------------------------------------------------------------------------


def integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Little-endian codes of int32 words."""
    data = packed.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack([data & 15, data >> 4], -1).flatten(-2)


def decoded_matrix(parts: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """float32 [N, K] with the scale rounded, the same as it was, and the scale as it is stored."""
    if "weight_packed" in parts:
        num_groups = parts["weight_scale"].size(1)
        bits = 32 * parts["weight_packed"].size(1) // int(parts["weight_shape"][1])
        codes = integers(parts["weight_packed"], bits).float() - 2 ** (bits - 1)
    else:
        num_groups, codes = 1, parts["weight"].float()
        if "weight_zero_point" in parts:
            codes = codes - parts["weight_zero_point"].float()
    scale = parts["weight_scale"]
    grid = scale.reshape(-1, num_groups) if scale.numel() > 1 else scale.reshape(1, 1)
    grid = grid.repeat_interleave(codes.size(1) // num_groups, 1) if num_groups > 1 else grid
    return codes * grid.to(dtype).float(), codes * grid, scale


def fused(
    tensors: dict[str, torch.Tensor], layer: str, dtype: torch.dtype
) -> dict[str, list[tuple[torch.Tensor, ...]]]:
    """Stacks [E, in, out] with float32 scales of rows, of projections or of experts."""
    each: dict[str, list[tuple[torch.Tensor, ...]]] = {role: [] for role in WORDS}
    for stack, roles in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        weight = tensors[f"{layer}.{stack}"]
        names = [f"{layer}.{stack}{suffix}" for suffix in ("_scale", "_weight_scale")]
        scales = next(tensors[name] for name in names if name in tensors).reshape(len(weight), -1)
        for one, scale in zip(weight, scales, strict=True):
            matrices = one.t().chunk(len(roles))
            own = scale.chunk(len(roles)) if len(scale) > 1 else [scale] * len(roles)
            for role, matrix, of_role in zip(roles, matrices, own, strict=True):
                each[role].append(
                    decoded_matrix({"weight": matrix, "weight_scale": of_role}, dtype)
                )
    return each


def oracle(
    folder: Path, dtype: torch.dtype
) -> dict[str, dict[str, list[tuple[torch.Tensor, ...]]]]:
    """Layer → role → each expert's `decoded_matrix`."""
    found: dict[str, dict[str, list[tuple[torch.Tensor, ...]]]] = {}
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        layer, _, rest = name.partition(".experts.")
        if rest == "gate_up_proj":
            found[f"{layer}.experts"] = fused(tensors, f"{layer}.experts", dtype)
        elif rest and rest[0].isdigit():
            found[f"{layer}.experts"] = {}
    for layer, roles in found.items():
        num_experts = len(
            {n[len(layer) + 1 :].split(".")[0] for n in tensors if n.startswith(f"{layer}.")}
        )
        for role, word in WORDS.items() if not roles else ():
            roles[role] = []
            for e in range(num_experts):
                prefix = f"{layer}.{e}.{word}."
                parts = {
                    n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)
                }
                roles[role].append(decoded_matrix(parts, dtype))
    return found


def scale_change(scale: torch.Tensor, dtype: torch.dtype) -> float:
    exact = scale.double()
    return float(((scale.to(dtype).double() - exact).abs() / exact.abs()).max())


def assert_as_the_oracle_says(out: Path, folder: Path, dtype: str) -> None:
    """Weights bit for bit, and the figures that the manifest records."""
    layers = conversions.manifest(out)["blocks"]
    expected = oracle(folder, DTYPES[dtype])
    assert layers.keys() == expected.keys()
    for name, roles in expected.items():
        found = dequantize(out, layer=name)
        for role, each in roles.items():
            rounded, exact, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
            assert torch.equal(found[role], rounded), (name, role)
            error = layers[name]["quantization_error"][role]
            assert error["largest_scale_change"] == scale_change(scales, DTYPES[dtype])
            assert 0 < error["largest_scale_change"] <= HALF_ULP[dtype]
            relative = (rounded.double() - exact.double()).norm() / exact.double().norm()
            assert error["relative_error"] == pytest.approx(float(relative), rel=1e-9)
            assert error["num_experts_requantized"] == 0


# --- every format ------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, [*DTYPES][n % 2]) for n, name in enumerate(CASES)]
)
def test_codes_are_kept_and_scales_rounded(name: str, dtype: str, get: Get, tmp_path: Path) -> None:
    folder, (schema, own) = get(name), CASES[name]
    report = conversions.run(folder, tmp_path / "out", schema, Grid(2), dtype=dtype)
    assert set(report.to_dict()["conversion"]) == {ROUNDED}
    assert_as_the_oracle_says(tmp_path / "out", folder, dtype)
    conversions.assert_verified(tmp_path / "out", folder)
    source = conversions.run(
        folder, tmp_path / "source", "source", Grid(2), dtype=dtype, round_scales=True
    )
    assert source.plan.spec.schema.name == own
    if own == schema:
        assert read_tree(tmp_path / "source" / "experts") == read_tree(tmp_path / "out" / "experts")
        blocks = [conversions.manifest(tmp_path / name)["blocks"] for name in ("source", "out")]
        assert blocks[0] == blocks[1]
    else:  # float32 layers hold the scale as it is: nothing is rounded that need not be
        assert source.to_dict()["conversion"] == {"direct": 1}


def test_every_format_that_is_rounded_is_a_case() -> None:
    rounded = {name: spec.rounded for name, spec in FORMATS.items() if spec.rounded}
    assert rounded.items() <= {name: own for name, (_, own) in CASES.items()}.items()


# --- another 16-bit dtype: only where it is asked for ------------------------------------------------------


def test_float16_scales_are_rounded_to_bfloat16_where_asked(tmp_path: Path) -> None:
    written = write(tmp_path / "gptq", "gptq-int4-zp")
    conversions.run(written.folder, tmp_path / "anew", "int4-g128-zp", dtype="bfloat16")
    assert "round_scales" not in conversions.manifest(tmp_path / "anew")
    for schema in ("int4-g128-zp", "source"):
        out = tmp_path / schema
        report = conversions.run(written.folder, out, schema, dtype="bfloat16", round_scales=True)
        assert report.to_dict()["conversion"] == {ROUNDED: 1}
        assert report.warnings == ()
        assert conversions.manifest(out)["round_scales"] is True
        assert all(
            change <= 2.0**-8 for change in report.to_dict()["largest_scale_change"].values()
        )
        conversions.assert_verified(out, written.folder)
        for layer, truth in written.truth.items():
            found = dequantize(out, layer=layer)
            for role in WORDS:
                assert (found[role] - truth[role]).abs().le(truth[role].abs() * 2.0**-8).all()
                assert not torch.equal(found[role], truth[role])
    exact = conversions.run(
        written.folder, tmp_path / "f16", "source", round_scales=True
    )  # the source's own
    assert exact.to_dict()["conversion"] == {"direct": 1}
    assert "round_scales" not in conversions.manifest(tmp_path / "f16")


# --- out of range ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 1e-6), ("float16", 1e-9), ("float16", 7e4)]
)
def test_a_scale_out_of_range_is_refused(
    dtype: str, value: float, is_together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same words where checks are judged together, as on a GPU."""
    folder = stretch(write(tmp_path / "src", "quark-int8").folder)
    name = set_scale(folder, "experts.2.down_proj", 7, value)
    if is_together:
        monkeypatch.setattr("hqconv.conversion.encode._ASYNCHRONOUS", ("cpu",))
    with pytest.raises(InputError, match="A scale is out of range") as caught:
        conversions.run(folder, tmp_path / "out", "int8", dtype=dtype)
    assert caught.value.where == name
    assert "at [7, 0]" in caught.value.found
    assert "--dtype bfloat16" in caught.value.remedy
    assert not (tmp_path / "out" / "hqconv.json").exists()


# --- what verify finds -------------------------------------------------------------------------------------


@pytest.fixture
def damaged(get: Get, tmp_path: Path) -> Damaged:
    folder = get("fp8-channel-f32")
    conversions.run(folder, tmp_path / "out", "fp8", Grid(2))
    return Damaged(tmp_path / "out", folder, "fp8")


def test_another_source_of_the_same_codes_is_found(
    get: Get, damaged: Damaged, tmp_path: Path
) -> None:
    """Scales moved by less than rounding would show are found where they round to something else."""
    other = shutil.copytree(get("fp8-channel-f32"), tmp_path / "other")
    name = next(iter(oracle(other, torch.float32)))
    scale = load_file(other / "model.safetensors")[f"{name}.1.gate_proj.weight_scale"][3]
    set_scale(other, "experts.1.gate_proj", 3, float(scale) * (1 + 2.0**-6))
    findings = conversions.check(damaged.root, other, "weights").results[0].findings
    assert any(
        "The scale of the source" in f.what and "w1 of expert 1" in f.where for f in findings
    )
