"""Codes that the encoder lays out at once: the same bytes as of packed codes, cut, joined and laid out after it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.cpu_loops.helper_threads import Helpers
from hqconv.kernel_layout.rank_slices import gemm_tensors
from hqconv.kernel_layout.transform import KernelForm, kernel_form, to_kernel
from hqconv.kernel_layout.weight_tiles import WeightTiles, weight_tiles
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack
from hqconv.schemas.grid import Grid, TpSlice, tp_slices
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import assert_same

SCHEMAS = (
    "mxfp4",
    "int4",
    "nvfp4",
    "fp8",
    "fp8-block",
    "fp8-tensor",
    "mxfp8",
    "int8",
    "int4-g64-zp",
    "int4-c-fpzp",
)
ROLES = ("w1", "w3", "w2")


@pytest.fixture(scope="module")
def helpers() -> Iterator[Helpers]:
    threads = Helpers(3)
    yield threads
    threads.stop()


def forms_of(
    schema: str, param_dtype: str, share: int, hidden: int, target: int = 90
) -> dict[str, KernelForm]:
    spec = kernel_spec_of(resolve_schema(schema), param_dtype, target)
    return {"w13": kernel_form(2 * share, hidden, spec), "w2": kernel_form(hidden, share, spec)}


def shapes_of(intermediate: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {
        role: (hidden, intermediate) if role == "w2" else (intermediate, hidden) for role in ROLES
    }


def quantized(
    stacks: dict[str, torch.Tensor], schema: str, param_dtype: str, tiles: WeightTiles | None
) -> dict[str, QuantizedStack]:
    done: dict[str, QuantizedStack] = {}
    for roles in (("w1", "w3"), ("w2",)):
        places = None if tiles is None else [tiles.stacks[role] for role in roles]
        found = quantize_stacks(
            [stacks[role] for role in roles], resolve_schema(schema), param_dtype, sinks=places
        )
        done |= dict(zip(roles, found, strict=True))
    return done


@settings(max_examples=25, deadline=None)
@given(
    schema=st.sampled_from(SCHEMAS),
    param_dtype=st.sampled_from(("bfloat16", "float16")),
    source=st.sampled_from((torch.bfloat16, torch.float32)),
    num_experts=st.integers(1, 3),
    shares=st.integers(1, 2),
    tp=st.integers(1, 3),
    hidden=st.sampled_from((256, 512, 768)),
    has_helpers=st.booleans(),
)
def test_tiles_are_the_kernel_layout_of_the_packed_codes(
    helpers: Helpers,
    schema: str,
    param_dtype: str,
    source: torch.dtype,
    num_experts: int,
    shares: int,
    tp: int,
    hidden: int,
    has_helpers: bool,
) -> None:
    share = 128 * shares
    shapes, weight_schema = shapes_of(tp * share, hidden), resolve_schema(schema)
    slices = tp_slices(tp * share, Grid(tp=tp), weight_schema)
    forms = forms_of(schema, param_dtype, share, hidden)
    stacks = {role: torch.randn(num_experts, *shape).to(source) for role, shape in shapes.items()}
    packed = quantized(stacks, schema, param_dtype, None)
    tiles = weight_tiles(forms, slices, shapes, num_experts)
    assert tiles is not None
    for weights in tiles.weights.values():
        weights.fill_(-1)  # a tile that nobody writes is found
    laid_out: dict[str, QuantizedStack] = {}

    def encode() -> None:
        if has_helpers:
            helpers.use(3)
        laid_out.update(quantized(stacks, schema, param_dtype, tiles))

    thread = threading.Thread(target=encode)  # which loses its helpers with its end
    thread.start()
    thread.join()
    names = {role: one.tensors for role, one in packed.items()}
    for role, one in packed.items():
        assert repr(one.error_sums()) == repr(laid_out[role].error_sums())
    for part in slices:
        theirs = gemm_tensors(names, weight_schema, part)
        others = gemm_tensors(
            {role: one.tensors for role, one in laid_out.items()}, weight_schema, part
        )
        for gemm, form in forms.items():
            expected, found = to_kernel(form, theirs[gemm]), to_kernel(form, others[gemm])
            assert found["weight"].is_meta
            for name, tensor in (found | {"weight": tiles.weights[gemm, part.rank]}).items():
                assert_same(tensor, expected[name], (gemm, part, name))


WHOLE = (TpSlice(0, 0, 128, 128),)


@pytest.mark.parametrize(
    ("schema", "share", "hidden", "slices", "why"),
    [
        ("int3-g64", 128, 256, WHOLE, "codes of 3 bits"),
        ("int8-g128-zp", 128, 256, WHOLE, "zero points change 8-bit codes"),
        ("mxfp4", 128, 320, WHOLE, "rows and columns are padded"),
        (
            "mxfp4",
            128,
            256,
            (TpSlice(0, 0, 128, 128), TpSlice(1, 128, 192, 128)),
            "the last rank holds less",
        ),
    ],
)
def test_other_layouts_go_the_long_way(
    schema: str, share: int, hidden: int, slices: tuple[TpSlice, ...], why: str
) -> None:
    forms = forms_of(schema, "bfloat16", share, hidden)
    assert weight_tiles(forms, slices, shapes_of(slices[-1].end, hidden), 2) is None, why


@pytest.mark.parametrize(
    ("schema", "inputs", "target"),
    [("mxfp4", "fp8", 90), ("mxfp4", "int8", 80), ("int4", "fp8", 89)],
)
def test_layouts_for_narrow_activations_go_the_long_way(
    schema: str, inputs: str, target: int
) -> None:
    spec = kernel_spec_of(resolve_schema(schema), "bfloat16", target, inputs)
    forms = {"w13": kernel_form(256, 256, spec), "w2": kernel_form(256, 128, spec)}
    assert weight_tiles(forms, WHOLE, shapes_of(128, 256), 2) is None


def test_a_conversion_does_not_load_torchs_compiler(tmp_path: Path) -> None:
    """Operations on `meta` tensors may, and that takes longer than a small conversion."""
    model = write_qwen3_moe(tmp_path / "model", num_layers=1, num_experts=2, hidden_size=256)
    code = "import hqconv, sys; hqconv.convert(*sys.argv[1:], schema='mxfp4', target='sm90', device='cpu'); "
    code += "assert 'torch._dynamo' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code, str(model), str(tmp_path / "out")], cwd=REPO, check=True
    )
