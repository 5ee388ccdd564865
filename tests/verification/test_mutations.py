"""Damage done to good artifacts: every one must be found, by the right check, at the right place.

Raw damage shows in the digests (`files`). An attacker who also edits the manifest's sizes and digests is found by
what the bytes mean: headers and accounting (`files`), or the values themselves against the source (`weights`).
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.artifact.reader import Artifact
from hqconv.errors import InputError, RequestError
from hqconv.schemas.grid import LINEAR, ROUND_ROBIN, Grid
from tests.make.conversions import run
from tests.make.damage import LAYER, Damaged, found, raw_and_resealed
from tests.make.effort import num_examples
from tests.make.matrices import SCHEMAS as ALL_SCHEMAS
from tests.make.matrices import hard_matrix
from tests.make.qwen import write_qwen3_moe

SCHEMAS = ("mxfp4", "int4-g64-zp", "nvfp4", "fp8")
MTP = "mtp.layers.0.mlp.experts"
HIDDEN, INNER, NUM_EXPERTS = (
    128,
    128,
    4,
)  # per TP rank: w13 128 of 256 rows, w2 64 of 128 columns, so both padded


def write_source(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """A qwen3_moe checkpoint whose last layer is a multi-token-prediction layer's."""
    write_qwen3_moe(folder, num_layers=2, seed=seed, **sizes)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.layers.1.", "mtp.layers.0."): tensor for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Damaged]:
    """A fresh copy of a good artifact of a schema; conversions are made once."""

    @functools.cache
    def source(seed: int) -> Path:
        return write_source(tmp_path_factory.mktemp("source") / "src", seed)

    @functools.cache
    def good(schema: str, seed: int, layout: str) -> Path:
        out = tmp_path_factory.mktemp("good") / "out"
        grid = Grid(2, 2) if layout == "kernel" else Grid()
        run(source(seed), out, schema, grid, layout=layout)
        return out

    def copy(schema: str, seed: int = 0, layout: str = "kernel") -> Damaged:
        root = tmp_path_factory.mktemp("copy") / "out"
        shutil.copytree(good(schema, seed, layout), root)
        return Damaged(root, source(seed), schema)

    return copy


@pytest.fixture(params=SCHEMAS)
def copy(request: pytest.FixtureRequest, make: Callable[..., Damaged]) -> Damaged:
    return make(request.param)


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gemm", ["w13", "w2"])
@pytest.mark.parametrize("tensor", ["weight", "weight_scale", "zero_point", "weight_scale_2"])
def test_one_flipped_bit(copy: Damaged, gemm: str, tensor: str) -> None:
    name = f"{LAYER}.{gemm}_{tensor}"
    if name not in copy.tensor_names(copy.path):
        pytest.skip("the schema has no such tensor")
    copy.flip(copy.path, name, local=1)
    weights = raw_and_resealed(copy, [copy.path])
    if tensor == "weight_scale_2" or (
        copy.schema == "fp8" and (gemm, tensor) == ("w2", "weight_scale")
    ):
        found(
            weights,
            f"{copy.path}, tensor {name}, expert 3 (local 1)",
            "TP ranks disagree",
            "as on tp rank 0",
        )
    else:
        found(weights, copy.path, name, "of expert 3 (local 1)", "1 of ")
    assert all("expert 3" in f.where or "quantization_error" in f.where for f in weights.findings)


def test_a_shared_scale_wrong_on_all_ranks(make: Callable[..., Damaged]) -> None:
    copy = make("nvfp4")
    paths = [copy.rank_file(LAYER, t, 1) for t in range(2)]
    for path in paths:
        copy.flip(path, f"{LAYER}.w13_weight_scale_2", byte=2)
    weights = raw_and_resealed(copy, paths)
    found(weights, paths[0], "w13_weight_scale_2", "w1 of expert 2", "scale 2 of the source")


@pytest.mark.parametrize("gemms", [("w13",), ("w2",), ("w13", "w2")])
def test_two_experts_swapped(copy: Damaged, gemms: tuple[str, ...]) -> None:
    """The two of EP rank 1, on both TP ranks: both are named."""
    paths = [copy.rank_file(LAYER, t, 1) for t in range(2)]
    for path in paths:
        copy.swap_experts(path, gemms)
    weights = raw_and_resealed(copy, paths)
    for role in [r for g in gemms for r in (("w1", "w3") if g == "w13" else ("w2",))]:
        for expert, partner in ((2, 3), (3, 2)):
            where = f"layer {LAYER}, {role} of expert {expert}"
            found(weights, where, "experts are swapped", f"{role} of expert {partner}")


def test_gate_and_up_swapped(copy: Damaged) -> None:
    matrices = copy.sources(2)
    for rank in range(2):
        copy.rebuild(
            "w13", {"w1": matrices["w3"], "w3": matrices["w1"], "w2": matrices["w2"]}, rank
        )
    weights = raw_and_resealed(copy, [copy.rank_file(LAYER, t, 1) for t in range(2)])
    for role in ("w1", "w3"):
        found(weights, "w13_weight", f"{role} of expert 2 (local 0)", "codes of the source")


@pytest.mark.parametrize("gemm", ["w13", "w2"])
def test_a_tp_slice_shifted_by_one_row_or_group(copy: Damaged, gemm: str) -> None:
    matrices = copy.sources(2)
    with Artifact(copy.root) as artifact:
        group = artifact.manifest.layer_spec.schema.weight_scale_group_size or 32
    if gemm == "w13":
        matrices["w1"] = matrices["w1"].roll(-1, 0)
    else:
        matrices["w2"] = matrices["w2"].roll(-group if group < 64 else -1, 1 if group < 64 else 0)
    copy.rebuild(gemm, matrices, tp_rank=1)
    weights = raw_and_resealed(copy, [copy.path])
    found(weights, copy.path, f"{gemm}_weight,", "of expert 2", "codes of the source")


def test_tp_ranks_exchanged(copy: Damaged) -> None:
    paths = [copy.rank_file(LAYER, t, 0) for t in range(2)]
    copy.swap_files(*paths)
    weights = raw_and_resealed(copy, paths)
    for gemm in ("w13", "w2"):
        found(weights, paths[0], f"{gemm}_weight,", "codes of the source")


def test_rank_files_that_changed_places(copy: Damaged) -> None:
    """A file says whose it is: no weight needs to be decoded to see it."""
    paths = [copy.rank_file(LAYER, t, 0) for t in range(2)]
    copy.swap_files(*paths, as_their_own=False)
    copy.reseal()
    files, _ = copy.check(with_source=False)
    for path, own, other in zip(paths, ("tp0-ep0", "tp1-ep0"), ("tp1-ep0", "tp0-ep0"), strict=True):
        found(files, f"{path}", "another rank", own, other)
    assert len(files.findings) == 2


def test_padding_that_is_not_zero(copy: Damaged) -> None:
    entries, _ = copy.header(copy.path)
    name = f"{LAYER}.w13_weight"
    row_bytes = entries[name]["shape"][2] * 4  # of 16 columns: rows 128 to 255 are padding
    copy.flip(copy.path, name, byte=row_bytes - 1, mask=0x40)
    weights = raw_and_resealed(copy, [copy.path])
    found(
        weights,
        copy.path,
        f"{name}, expert 2 (local 0)",
        "A value that no conversion writes",
        "padding",
    )
    assert copy.check(with_source=False)[1].status == "fail"


# --- headers -----------------------------------------------------------------------------------------------


def test_scales_labelled_with_another_dtype(copy: Damaged) -> None:
    name = f"{LAYER}.w13_weight_scale"
    dtype = copy.header(copy.path)[0][name]["dtype"]
    label = {"BF16": "F16", "F8_E8M0": "U8", "F8_E4M3": "F8_E5M2"}[dtype]
    copy.edit_header(copy.path, lambda entries: entries[name].update(dtype=label))
    found(copy.check()[0], copy.path, "bytes are not those")
    copy.reseal()
    for with_source in (True, False):
        files, weights = copy.check(with_source)
        found(files, f"{copy.path}, tensor: {name}: dtype", "another dtype", dtype, label)
        found(weights, f"{copy.path}, tensor {name}", "another dtype", dtype, label)


# --- layers, copied tensors, the manifest ------------------------------------------------------------------


def remove_layer(copy: Damaged, words: dict[str, Any], dropped: bool) -> None:
    del words["blocks"][MTP]
    for path in [path for path in words["files"] if MTP in path]:
        del words["files"][path]
    for name in [name for name, layer in words["tensors"]["converted"].items() if layer == MTP]:
        del words["tensors"]["converted"][name]
        if dropped:
            words["tensors"]["dropped"][name] = "not needed"


@pytest.mark.parametrize("hidden", ["no", "removed", "dropped"])
def test_a_missing_layer(make: Callable[..., Damaged], hidden: str) -> None:
    copy = make("mxfp4")
    for path in copy.root.glob(f"experts/*/{MTP}.safetensors"):
        path.unlink()
    if hidden == "no":
        files, weights = copy.check(with_source=False)
        assert [f.where for f in files.findings] == [
            copy.rank_file(MTP, t, p) for t in range(2) for p in range(2)
        ]
        assert {f.what for f in files.findings} == {"A file of the manifest is missing."}
        found(weights, MTP)
        return
    copy.edit_manifest(functools.partial(remove_layer, copy, dropped=hidden == "dropped"))
    files, weights = copy.check()
    found(files, f"hqconv.json: blocks: {MTP}", "absent")
    found(weights, f"layer {MTP}", "An MoE layer of the source is missing")
    found(files, "tensors: converted", f"{MTP}.0.gate_proj.weight", "absent")


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_an_altered_copied_tensor(layout: str, make: Callable[..., Damaged]) -> None:
    name, copy = "model.layers.0.mlp.gate.weight", make("mxfp4", layout=layout)
    path = copy.weight_map[name]
    copy.flip(path, name, local=3, byte=10)
    found(copy.check()[0], path, "bytes are not those")
    copy.reseal()
    files, weights = copy.check()
    found(
        files,
        f"{path}, tensor {name}",
        "not the source's",
        f"the first at byte {3 * HIDDEN * 2 + 10}",
    )
    assert len(files.findings) == 1
    assert weights.findings == []


# --- the checkpoint layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
def test_damage_in_the_checkpoint_layout(make: Callable[..., Damaged], schema: str) -> None:
    copy = make(schema, layout="checkpoint")
    for with_source in (True, False):
        assert [r.findings for r in copy.check(with_source)] == [[], []]
    path = copy.weight_map[f"{MTP}.3.down_proj.weight"]
    names = [n for n in copy.tensor_names(path) if n.startswith(f"{MTP}.3.down_proj.")]
    assert len(names) >= 2
    for name in names:
        copy.flip(path, name)
    found(copy.check(with_source=False)[0], path, "bytes are not those")
    copy.reseal()
    files, weights = copy.check()
    assert files.findings == []
    for name in names:
        found(weights, f"{path}, tensor {name}", "of the source, quantized", "[0")


# --- and no false alarms -----------------------------------------------------------------------------------

# HQCONV_NUM_CONVERSIONS=200: as many random conversions, other ones each time.
MANY = int(os.environ.get("HQCONV_NUM_CONVERSIONS", "0"))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = st.sampled_from([32, 64, 96, 128, 192, 256, 320])


@hypothesis.settings(
    max_examples=MANY or num_examples(25),
    deadline=None,
    derandomize=not MANY,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
    schema=st.sampled_from(ALL_SCHEMAS),
    hidden=SIZES,
    inner=SIZES,
    num_experts=st.integers(1, 5),
    grid=st.builds(
        Grid,
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([LINEAR, ROUND_ROBIN]),
        st.integers(0, 3),
    ),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    source_dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from(["kernel", "kernel", "kernel", "checkpoint"]),
    hard=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_conversions_pass_both_checks(
    tmp_path_factory: pytest.TempPathFactory,
    schema: str,
    hidden: int,
    inner: int,
    num_experts: int,
    grid: Grid,
    dtype: str,
    source_dtype: str,
    layout: str,
    hard: bool,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("wolf")
    src = write_source(
        folder / "src", seed, hidden_size=hidden, intermediate_size=inner, num_experts=num_experts
    )
    tensors = load_file(src / "model.safetensors")
    for i, (name, tensor) in enumerate(tensors.items()):
        if hard and ".experts." in name:
            tensors[name] = hard_matrix(*tensor.shape, torch.bfloat16, seed + i).clamp(-1e4, 1e4)
        tensors[name] = tensors[name].to(DTYPES[source_dtype])
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    try:
        run(
            src,
            folder / "out",
            schema,
            grid if layout == "kernel" else Grid(),
            layout=layout,
            dtype=dtype,
        )
    except (RequestError, InputError):
        hypothesis.reject()
    for with_source in (True, False):
        files, weights = Damaged(folder / "out", src, schema).check(with_source)
        assert (files.findings, weights.findings) == ([], [])
    shutil.rmtree(folder)
