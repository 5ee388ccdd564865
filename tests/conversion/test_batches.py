"""How a conversion is cut: every expert and every byte once, in parts of about the same size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hqconv.conversion.encode_batch import Batch, Piece, Run, split_runs, split_unit
from hqconv.errors import InputError
from hqconv.models.moe_layer import RawLayout
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.safetensors import SafetensorsSource
from tests.make import conversions
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


def test_the_parts_of_a_piece_are_its_bytes_in_order(tmp_path: Path) -> None:
    source, plan = open_plan(write_qwen3_moe(tmp_path / "model", num_layers=2), "mxfp4")
    source.close()
    for group in (group for group in plan.units if not isinstance(group, MoeLayerPlan)):
        for piece in (piece for piece in split_unit(group, 1, 50_000) if isinstance(piece, Piece)):
            for num_bytes in (999, 4096, piece.num_bytes - 1, piece.num_bytes, 1 << 30):
                parts, end = piece.parts(num_bytes), 0
                for begin, part in parts:
                    assert begin == end
                    end += part.num_bytes
                assert end == piece.num_bytes
                assert len(parts) == -(-piece.num_bytes // num_bytes)
                joined: list[tuple[TensorRef, int, int]] = []
                for ref, start, size in (span for _, part in parts for span in part.spans):
                    if joined and joined[-1][0] is ref:
                        assert joined[-1][1] + joined[-1][2] == start
                        joined[-1] = (ref, joined[-1][1], joined[-1][2] + size)
                    else:
                        joined.append((ref, start, size))
                assert tuple(joined) == piece.spans


def test_a_tensor_that_cannot_be_read_is_named_though_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=2)
    _, plan = open_plan(model, "mxfp4")
    refs = [
        ref for group in plan.units if not isinstance(group, MoeLayerPlan) for ref in group.refs
    ]
    victim, real = (
        sorted(refs, key=lambda ref: ref.offset_bytes)[len(refs) // 2],
        SafetensorsSource.read_into,
    )

    def read(self: SafetensorsSource, ref: TensorRef, buffer: memoryview, start: int = 0) -> None:
        first = ref.offset_bytes + start
        if (
            first < victim.offset_bytes + victim.num_bytes
            and first + len(buffer) > victim.offset_bytes
        ):
            raise InputError("A tensor cannot be read.", where=f"tensor {ref.name}")
        real(self, ref, buffer, start)

    real_all = SafetensorsSource.read_all_into

    def read_all(self: SafetensorsSource, pieces: Iterable[tuple[TensorRef, memoryview]]) -> None:
        for ref, buffer in (given := list(pieces)):
            read(self, ref, buffer)
        real_all(self, given)

    monkeypatch.setattr(SafetensorsSource, "read_into", read)
    monkeypatch.setattr(SafetensorsSource, "read_all_into", read_all)
    with pytest.raises(InputError) as caught:
        conversions.run(model, tmp_path / "out", "mxfp4")
    assert caught.value.where == f"tensor {victim.name}"


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


def test_ranges_are_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    source, plan = open_plan(
        write_qwen3_moe(tmp_path / "model", num_layers=1, num_experts=6), "mxfp4"
    )
    source.close()
    layout = RawLayout(plan.layers[0].layer, range(1, 5))
    pieces = layout.pieces(1 << 16)
    assert len(pieces) > 1
    ranges = [one for piece in pieces for one in piece]
    assert sorted(ranges, key=lambda one: one[1]) == sorted(layout.ranges, key=lambda one: one[1])
    places = [(ref.file, ref.offset_bytes) for ref, _ in ranges]
    assert places == sorted(places)
