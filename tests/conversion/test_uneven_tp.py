"""GPT-OSS cut unevenly: the last TP rank holds less and is padded, and nothing is lost or added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hqconv import dequantize
from hqconv.errors import RequestError
from hqconv.schemas.grid import Grid
from tests.make import conversions

LAYER = "model.layers.0.mlp.experts"
HIDDEN, INNER, EXPERTS = 64, 160, 3  # 5 groups of 32: 96 + 64 on two ranks, 64 + 64 + 32 on three


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 gpt_oss checkpoint of one layer: fused, transposed, interleaved, with biases."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {
        f"{LAYER}.gate_up_proj": tensor(EXPERTS, HIDDEN, 2 * INNER),
        f"{LAYER}.gate_up_proj_bias": tensor(EXPERTS, 2 * INNER),
        f"{LAYER}.down_proj": tensor(EXPERTS, INNER, HIDDEN),
        f"{LAYER}.down_proj_bias": tensor(EXPERTS, HIDDEN),
        "model.layers.0.mlp.router.weight": tensor(EXPERTS, HIDDEN),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def convert(
    source: Path, out: Path, schema: str, tp: int, dtype: str | None = None
) -> dict[str, torch.Tensor]:
    conversions.run(source, out, schema, Grid(tp), dtype=dtype)
    conversions.assert_verified(out, source)
    return dequantize(out, layer=LAYER)


def test_every_rank_has_one_shape_and_the_last_ends_in_zeros(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "int8", 2)
    shapes = []
    for tp_rank in range(2):
        with safe_open(tmp_path / f"out/experts/tp{tp_rank}-ep0/{LAYER}.safetensors", "pt") as file:
            shapes.append({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
            bias = file.get_tensor(f"{LAYER}.w13_bias")
    assert shapes[0] == shapes[1]
    # 96 rows of gate, then 96 of up, and the kernel's own padding: 64 of each are the last rank's.
    parts = bias[:, :192].reshape(EXPERTS, 2, 96)
    assert parts[:, :, :64].abs().sum() > 0
    assert not parts[:, :, 64:].any()


def test_a_rank_without_any_rows_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        conversions.run(source, tmp_path / "out", "mxfp4", Grid(4))
    assert "TP sizes that work: 1, 2, 3, 5" in str(error.value)


def test_gpt_oss_of_2880_columns_on_4_and_8_ranks() -> None:
    """90 groups: 23 + 23 + 23 + 21, and 7 x 12 + 6, as vLLM deals them."""
    from hqconv.schemas.grid import tp_slices, working_tp_sizes

    schema = conversions.schema_of("mxfp4")
    sizes = working_tp_sizes(2880, schema, pads_last_rank=True)
    assert {1, 2, 3, 4, 5, 6, 8} <= set(sizes)
    ranges = [part.end - part.begin for tp in (4, 8) for part in tp_slices(2880, Grid(tp), schema)]
    assert ranges == [736, 736, 736, 672, *[384] * 7, 192]
    assert 4 not in working_tp_sizes(2880, schema)
