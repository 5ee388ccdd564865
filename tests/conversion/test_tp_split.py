"""`--tp-split groups`: ranks hold whole scale groups, the last ranks fewer, and zeros fill what is not whole.

The oracle is a checkpoint whose experts have the zeros already: hqconv converts it without any split.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import hqconv
from hqconv import dequantize
from hqconv.errors import RequestError
from hqconv.schemas.artifact_names import CHECKPOINT
from hqconv.schemas.grid import (
    GROUPS,
    Grid,
    slice_unit,
    stored_size,
    tp_share,
    tp_slices,
    working_tp_sizes,
)
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, WeightSchema
from tests.make import conversions
from tests.make.conversions import manifest, run, schema_of
from tests.make.filled import write_filled
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
ROTATED = WeightSchema(
    name="rotated",
    b_dtype="uint4",
    weight_scale_type="group",
    weight_scale_group_size=32,
    hadamard_block_size=64,
)


def named(name: str) -> WeightSchema:
    return ROTATED if name == "rotated" else schema_of(name)


def source(folder: Path, inner: int) -> Path:
    sizes = {"num_layers": 1, "num_experts": 2, "hidden_size": 256}
    return write_qwen3_moe(folder, **sizes, intermediate_size=inner)


def rank_tensors(out: Path, tp: int) -> list[dict[str, bytes]]:
    """Bytes of every rank's tensors."""
    files = [load_file(out / f"experts/tp{rank}-ep0/{LAYER}.safetensors") for rank in range(tp)]
    return [
        {name: one.view(torch.uint8).numpy().tobytes() for name, one in file.items()}
        for file in files
    ]


def equal_up_to(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], inner: int) -> bool:
    cut = {
        role: one[:, :, :inner] if role == "w2" else one[:, :inner] for role, one in whole.items()
    }
    return found.keys() == cut.keys() and all(
        torch.equal(found[role], one) for role, one in cut.items()
    )


# --- the ranks' parts


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*sorted(PRESETS), "int4-g64-zp", "rotated"]),
    st.integers(1, 4000),
    st.integers(1, 40),
)
@example("int4-g64-zp", 96, 2)
def test_parts_are_whole_groups_as_equal_as_can_be(name: str, inner: int, tp: int) -> None:
    schema = named(name)
    unit, runs = slice_unit(schema), -(-inner // slice_unit(schema))
    sizes = working_tp_sizes(inner, schema, split=GROUPS)
    assert sizes == list(range(1, runs + 1))
    assert set(working_tp_sizes(inner, schema)) <= set(sizes)
    assume(tp in sizes)
    parts = tp_slices(inner, Grid(tp, split=GROUPS), schema)
    lengths = [part.end - part.begin for part in parts]
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == stored_size(inner, schema) == runs * unit
    assert 0 <= runs * unit - inner < unit
    assert lengths == sorted(lengths, reverse=True)
    assert {*lengths} <= {lengths[0], lengths[0] - unit}
    assert {part.share for part in parts} == {lengths[0]} == {tp_share(inner, tp, schema)}
    assert lengths[-1] > 0
    if inner % (unit * tp) == 0:
        assert parts == tp_slices(inner, Grid(tp), schema)


def test_padding_is_no_zero_under_one_scale_of_integers() -> None:
    schema = WeightSchema(
        name="int8-tensor", b_dtype="uint8", weight_scale_type="tensor", bs_dtype="float32"
    )
    assert working_tp_sizes(96, schema, split=GROUPS) == working_tp_sizes(96, schema) == [1, 3]


# --- bytes

CASES = [
    ("int4-g64", 96, (1, 2)),
    ("int4-g64", 192, (2, 3)),
    ("int4-g64-zp", 96, (1, 2)),
    ("int4-g64-fpzp", 160, (2, 3)),
    ("mxfp4", 80, (2, 3)),
    ("nvfp4", 80, (1, 2)),
    ("fp8", 80, (1, 2)),
    ("int8", 72, (1, 3)),
    ("fp8-block", 320, (2, 3)),
    ("fp8-tensor", 96, (2,)),
    ("rotated", 96, (1, 2)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "inner", "sizes", "dtype"),
    [(*case, PARAM_DTYPES[n % 2]) for n, case in enumerate(CASES)],
    ids=str,
)
def test_the_ranks_together_are_the_whole(
    tmp_path: Path, name: str, inner: int, sizes: tuple[int, ...], dtype: str
) -> None:
    schema, src = named(name), source(tmp_path / "src", inner)
    filled = write_filled(src, tmp_path / "filled", stored_size(inner, schema))
    run(filled, tmp_path / "whole", schema, dtype=dtype)
    whole = dequantize(tmp_path / "whole", layer=LAYER)
    for tp in sizes:
        out = tmp_path / f"tp{tp}"
        run(src, out, schema, Grid(tp, split=GROUPS), dtype=dtype)
        conversions.assert_verified(out, src)
        assert equal_up_to(dequantize(out, layer=LAYER), whole, inner), tp
        if tp in working_tp_sizes(stored_size(inner, schema), schema):
            # The ranks hold what even ranks of the filled checkpoint hold.
            run(filled, tmp_path / f"even{tp}", schema, Grid(tp), dtype=dtype)
            assert rank_tensors(out, tp) == rank_tensors(tmp_path / f"even{tp}", tp)


# --- the artifact says it, and everything follows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with 96 columns, and its artifact in groups of 64 on two ranks."""
    folder = tmp_path_factory.mktemp("split")
    src = source(folder / "src", 96)
    run(src, folder / "out", "int4-g64-zp", Grid(2, split=GROUPS))
    return src, folder / "out"


@pytest.mark.parametrize("tp", [1, 2])
def test_an_artifact_is_cut_again(tmp_path: Path, made: tuple[Path, Path], tp: int) -> None:
    """With the codes kept, on any ranks: the bytes of a conversion of the source."""
    src, out = made
    for target in ("source", "int4-g64-zp"):
        run(out, tmp_path / target, target, Grid(tp, split=GROUPS))
        conversions.assert_verified(tmp_path / target, out)
        run(src, tmp_path / f"{target}-anew", "int4-g64-zp", Grid(tp, split=GROUPS))
        assert rank_tensors(tmp_path / target, tp) == rank_tensors(tmp_path / f"{target}-anew", tp)


@pytest.mark.parametrize("schema", ["int4-g32-zp", "int8", "mxfp4"])
def test_an_artifact_is_converted_to_other_groups(
    tmp_path: Path, made: tuple[Path, Path], schema: str
) -> None:
    """Groups that are whole need no split; kept codes lose the zeros beside them."""
    out = made[1]
    run(out, tmp_path / "other", schema, Grid(3))
    conversions.assert_verified(tmp_path / "other", out)
    assert "tp_split" not in manifest(tmp_path / "other")
    if schema == "int4-g32-zp":
        found, expected = (dequantize(path, layer=LAYER) for path in (tmp_path / "other", out))
        assert all(torch.equal(found[role], expected[role]) for role in expected)


def test_the_manifest_says_a_split_that_matters(tmp_path: Path, made: tuple[Path, Path]) -> None:
    src, out = made
    assert manifest(out)["tp_split"] == "groups"
    assert hqconv.inspect(out)["tp_split"] == "groups"
    run(src, tmp_path / "same", "int4-g32", Grid(3, split=GROUPS))
    run(src, tmp_path / "even", "int4-g32", Grid(3))
    assert manifest(tmp_path / "same") == manifest(tmp_path / "even")


def test_refusals_name_the_split(tmp_path: Path) -> None:
    src = source(tmp_path / "src", 96)
    with pytest.raises(RequestError) as error:
        run(src, tmp_path / "out", "int4-g64", Grid(2))
    assert error.value.remedy.endswith("--tp 2 works with --tp-split groups.")
    with pytest.raises(RequestError) as error:
        run(src, tmp_path / "out", "int4-g64", layout=CHECKPOINT)
    assert "--tp-split" not in str(error.value)
    with pytest.raises(RequestError) as error:
        run(src, tmp_path / "out", "fp8-block", Grid(5))  # vLLM would not start it
    assert "--tp-split" not in str(error.value)
    with pytest.raises(RequestError, match="--tp 3 would cut"):
        run(src, tmp_path / "out", "int4-g64", Grid(3, split=GROUPS))
    with pytest.raises(RequestError, match="--tp-split"):
        run(src, tmp_path / "out", "int4-g64", Grid(2, split="odd"))
