"""Sources whose layers have different formats: `--schema source` keeps each layer's own, and others are read right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hqconv import dequantize, inspect, load
from hqconv.errors import InputError, RequestError
from hqconv.schemas.grid import Grid
from hqconv.schemas.options import load_recipe
from tests.make import configs, conversions, layouts, packing
from tests.make.formats import FORMATS, Written, write
from tests.make.layouts import Block, plain
from tests.make.qwen import set_config
from tests.make.spec import FormatSpec

V4, MTP = "layers.{}.ffn.experts", "mtp.0.ffn.experts"
QWEN = "model.layers.{}.mlp.experts"
B_DTYPES = {"nvfp4": "float4e2m1", "mxfp4": "float4e2m1", "int4": "uint4"}
# As nvidia/DeepSeek-V4-Flash-NVFP4 has it: DeepSeek's words, ModelOpt's beside them.
V4_CONFIG = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
        "quantized_layers": {
            V4.format(layer): {"quant_algo": "NVFP4", "group_size": 16} for layer in (0, 1)
        },
    }
}
MX_IN_BYTES = packing.as_dtypes(
    packing.mxfp4(scale="scale"), weight=torch.int8, scale=torch.float8_e8m0fnu
)
V4_NVFP4 = FormatSpec(
    packing.nvfp4(),
    V4_CONFIG,
    "",
    layout=layouts.DEEPSEEK_V4,
    layers=(packing.nvfp4(), MX_IN_BYTES),
    dense=packing.fp8("scale", (128, 128), torch.float8_e8m0fnu),
)


@dataclass(frozen=True)
class Mixed:
    """A source, what its packed layers mean, and each layer's schema; "" where it is left."""

    folder: Path
    truth: dict[str, Block]
    schemas: dict[str, str]


def _with_mtp(folder: Path) -> Mixed:
    """DeepSeek-V4 in nvfp4 with its MTP layer in mxfp4: the third layer, renamed."""
    written = write(folder, V4_NVFP4)
    truth = {name.replace("layers.2.", "mtp.0."): layer for name, layer in written.truth.items()}
    rewrite(
        folder,
        lambda tensors: {name.replace("layers.2.", "mtp.0."): t for name, t in tensors.items()},
    )
    set_config(folder, num_hidden_layers=2)
    return Mixed(folder, truth, {V4.format(0): "nvfp4", V4.format(1): "nvfp4", MTP: "mxfp4"})


def _with_plain(folder: Path) -> Mixed:
    """compressed-tensors that ignores the first and the last of three layers, attention too."""
    spec = FORMATS["mixed-ct-ignore"]
    ignored = r"re:.*layers\.[02]\.(mlp\.experts|self_attn).*"
    words = configs.compressed(
        "pack-quantized", 4, "int", "group", group_size=128, ignore=[ignored]
    )
    written = write(
        folder,
        replace(spec, config=words, encode=plain, layers=(spec.encode, plain)),
        inner=256,
        hidden=256,
    )
    schemas = {QWEN.format(0): "", QWEN.format(1): "int4", QWEN.format(2): ""}
    return Mixed(folder, {QWEN.format(1): written.truth[QWEN.format(1)]}, schemas)


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


@pytest.fixture(scope="module", params=[_with_mtp, _with_plain], ids=["mtp", "plain"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    make: Callable[[Path], Mixed] = request.param
    return make(tmp_path_factory.mktemp("mixed") / "src")


def assert_kept(out: Path, mixed: Mixed) -> None:
    """Every layer has its own schema, in the manifest and in what is read back; plain ones were copied."""
    words = conversions.manifest(out)
    packed = {name: schema for name, schema in mixed.schemas.items() if schema}
    left = sorted(set(mixed.schemas) - set(packed))
    assert (words["format_version"], sorted(words.get("left_blocks", []))) == (2, left)
    found = {
        name: layer.get("schema_name", words["schema_name"])
        for name, layer in words["blocks"].items()
    }
    assert found == packed
    assert {layer["conversion"] for layer in words["blocks"].values()} == {"direct"}
    for name, expected in mixed.truth.items():
        values = dequantize(out, layer=name)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[role], expected[role]) for role in expected), name
        gemms = load(out, layer=name)
        assert [gemms[gemm].config["b_dtype"] for gemm in ("w13", "w2")] == [
            B_DTYPES[packed[name]]
        ] * 2
    source, index = {}, json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for path in mixed.folder.glob("*.safetensors"):
        source |= load_file(path)
    names = [name for name in source if any(name.startswith(f"{layer}.") for layer in left)]
    assert bool(names) == bool(left)
    for name in names:
        with safe_open(out / index[name], "pt") as file:
            assert torch.equal(file.get_tensor(name), source[name])


@pytest.mark.parametrize("grid", [Grid(), Grid(2, 3)], ids=str)
def test_every_layer_keeps_its_own(mixed: Mixed, grid: Grid, tmp_path: Path) -> None:
    """The files of each layer have the bytes of a conversion to that schema alone."""
    out = tmp_path / "out"
    conversions.run(mixed.folder, out, "source", grid)
    assert_kept(out, mixed)
    conversions.assert_verified(out, mixed.folder)
    for name, schema in mixed.schemas.items():
        alone = tmp_path / f"alone-{schema}"
        if not schema:
            continue
        if not alone.exists():
            conversions.run(mixed.folder, alone, schema, grid)
        for path in sorted(alone.rglob(f"{name}.safetensors")):
            assert (out / path.relative_to(alone)).read_bytes() == path.read_bytes()


# --- the checkpoint layout ---------------------------------------------------------------------------------


def test_the_checkpoint_layout_leaves_plain_layers_out(tmp_path: Path) -> None:
    """Its `ignore` names them; the same reader that knows Humming's config then finds them plain."""
    mixed, out = _with_plain(tmp_path / "src"), tmp_path / "out"
    rewrite(
        mixed.folder,
        lambda tensors: {n: t for n, t in tensors.items() if "layers.1.self_attn" not in n},
    )
    conversions.run(mixed.folder, out, "source", layout="checkpoint")
    conversions.assert_verified(out, mixed.folder)
    words = json.loads((out / "config.json").read_text())["quantization_config"]
    assert [r"layers\.0\." in words["ignore"][1], r"layers\.2\." in words["ignore"][2]] == [
        True,
        True,
    ]
    conversions.run(out, tmp_path / "kernel", "source")
    assert_kept(tmp_path / "kernel", replace(mixed, folder=out))


def test_the_checkpoint_layout_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="one schema for all layers"):
        conversions.run(
            _with_mtp(tmp_path / "a").folder, tmp_path / "out", "source", layout="checkpoint"
        )
    mixed = _with_plain(tmp_path / "b")
    dropped = ("self_attn", "layers.1.")
    rewrite(
        mixed.folder,
        lambda tensors: {
            name.replace("model.layers.2.", "mtp.layers.0."): t
            for name, t in tensors.items()
            if not all(part in name for part in dropped)
        },
    )
    set_config(mixed.folder, num_hidden_layers=2)
    with pytest.raises(RequestError, match="cannot say that these experts are left") as caught:
        conversions.run(mixed.folder, tmp_path / "out", "source", layout="checkpoint")
    assert "mtp.layers.0.mlp.experts" in str(caught.value)


# --- overrides beside `source` -----------------------------------------------------------------------------


def test_an_override_names_a_schema_beside_the_sources_own(mixed: Mixed, tmp_path: Path) -> None:
    """Also for a layer that would be left, and for all that have one: then none is left to the source's own."""
    last = next(reversed(mixed.schemas))
    (tmp_path / "r.toml").write_text(f'[[override]]\nblocks = "{last}"\nschema = "int8"\n')
    (tmp_path / "all.toml").write_text('[[override]]\nblocks = "*"\nschema = "int8"\n')
    out, overrides = tmp_path / "out", load_recipe(tmp_path / "r.toml").overrides
    conversions.run(mixed.folder, out, "source", overrides=overrides)
    words = conversions.manifest(out)["blocks"]
    kinds = {"": "quantized", "mxfp4": "requantized"}
    assert (words[last]["schema_name"], words[last]["conversion"]) == (
        "int8",
        kinds[mixed.schemas[last]],
    )
    conversions.assert_verified(out, mixed.folder)
    overrides = load_recipe(tmp_path / "all.toml").overrides
    with pytest.raises(RequestError, match="leave no layer"):
        conversions.run(mixed.folder, tmp_path / "no", "source", overrides=overrides)


def test_where_an_override_names_the_schema_nothing_must_be_kept(tmp_path: Path) -> None:
    """Gate and up with second scales of their own cannot keep their codes: an error, or counted where asked for."""
    written = write(tmp_path / "src", replace(V4_NVFP4, differs=True))
    with pytest.raises(InputError, match="different tensor-level scales"):
        conversions.run(written.folder, tmp_path / "no", "source")
    (tmp_path / "r.toml").write_text('[[override]]\nlayers = "0-1"\nschema = "nvfp4"\n')
    overrides, out = load_recipe(tmp_path / "r.toml").overrides, tmp_path / "out"
    conversions.run(written.folder, out, "source", overrides=overrides)
    errors = [
        layer["quantization_error"]["w1"] for layer in conversions.manifest(out)["blocks"].values()
    ]
    assert [error["num_experts_requantized"] for error in errors] == [3, 3, 0]
    conversions.assert_verified(out, written.folder)


# --- several formats inside a layer ------------------------------------------------------------------------


def _gptq(folder: Path, dynamic: dict[str, Any]) -> Written:
    """One layer of GPTQ in 4 bits, with a config that says more of some modules."""
    spec = FORMATS["gptq-int4"]
    return write(folder, replace(spec, config=configs.gptq(dynamic=dynamic)))


@pytest.mark.parametrize(
    ("dynamic", "where", "found"),
    [
        # Of the same shapes and dtypes: only the config tells that the numbers mean something else.
        (
            {r"+:.*experts\.1\..*": {"checkpoint_format": "gptq_v2", "sym": False}},
            r"experts\.1\.",
            "zero",
        ),
        ({r"+:.*experts\.0\.up_proj": {"sym": False}}, r"experts\.0\.up_proj", "zero"),
        ({r"-:.*experts\.2\.down_proj": {}}, r"experts\.2\.down_proj", "not quantized"),
    ],
)
def test_an_expert_of_another_format_is_refused(
    dynamic: dict[str, Any], where: str, found: str, tmp_path: Path
) -> None:
    written = _gptq(tmp_path / "src", dynamic)
    for schema in ("source", "int4", "fp8"):
        with pytest.raises(
            RequestError, match="declares another one for some of its experts"
        ) as caught:
            conversions.run(written.folder, tmp_path / "out", schema)
        assert caught.value.found.count(found), caught.value.found
        with pytest.raises(RequestError, match=where):
            raise caught.value
    words = inspect(written.folder)
    assert not words["convertible"]
    assert "mixes formats" in words["obstacle"]
