"""How a conversion is cut: every expert and every byte once, in parts of about the same size."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from hqconv.conversion.encode_batch import Batch, Piece, Run, split_runs, split_unit
from hqconv.planning.output_units import MoeLayerPlan
from tests.make.conversions import open_plan
from tests.make.qwen import write_qwen3_moe


def test_batches_are_about_as_large_as_each_other(tmp_path: Path) -> None:
    source, plan = open_plan(
        write_qwen3_moe(tmp_path / "model", num_layers=1, num_experts=13), "mxfp4"
    )
    source.close()
    layer = plan.layers[0]
    for at_most, sizes in ((13, [13]), (12, [6, 7]), (5, [4, 4, 5]), (1, [1] * 13), (100, [13])):
        batches = list(split_unit(layer, at_most, 1 << 20))
        assert [len(batch.experts) for batch in batches if isinstance(batch, Batch)] == sizes
        assert [
            expert for batch in batches if isinstance(batch, Batch) for expert in batch.experts
        ] == list(range(13))


def test_every_byte_of_a_copied_tensor_is_in_one_piece(tmp_path: Path) -> None:
    source, plan = open_plan(write_qwen3_moe(tmp_path / "model", num_layers=2), "mxfp4")
    source.close()
    copies = [group for group in plan.units if not isinstance(group, MoeLayerPlan)]
    assert copies
    for group in copies:
        for piece_bytes in (1000, 4096, 1 << 20):
            pieces = [
                piece for piece in split_unit(group, 1, piece_bytes) if isinstance(piece, Piece)
            ]
            assert all(piece.num_bytes == piece_bytes for piece in pieces[:-1])
            assert 0 < pieces[-1].num_bytes <= piece_bytes
            ends: dict[str, int] = {}
            for ref, start, size in (span for piece in pieces for span in piece.spans):
                assert ends.setdefault(ref.name, 0) == start
                ends[ref.name] = start + size
            assert ends == {ref.name: ref.num_bytes for ref in group.refs if ref.num_bytes}


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 40))
def test_shares_are_the_runs(sizes: list[int], num_bytes: int) -> None:
    files = [bytearray(size) for size in sizes]
    runs = [
        Run(number, 0, size, torch.arange(size, dtype=torch.uint8) + number)
        for number, size in enumerate(sizes)
    ]
    dealt = split_runs(runs, num_bytes)
    for run in (run for share in dealt for run in share):
        files[run.file][run.offset_bytes : run.offset_bytes + run.num_bytes] = (
            run.data.numpy().tobytes()
        )
    assert [bytes(file) for file in files] == [run.data.numpy().tobytes() for run in runs]
    assert all(sum(run.num_bytes for run in share) < 2 * num_bytes for share in dealt)
    assert all(sum(run.num_bytes for run in share) >= num_bytes for share in dealt[:-1])
