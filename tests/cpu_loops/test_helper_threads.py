"""Loops whose parts are run side by side: all of the range, the same bits, and errors that arrive."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from hqconv.cpu_loops import helper_threads
from hqconv.cpu_loops.helper_threads import Helpers, in_parts
from hqconv.humming_ops import cpu_ops
from hqconv.kernel_layout.transform import kernel_form, to_kernel
from hqconv.quantization import content_sums
from hqconv.quantization.content_sums import compiled_row_sums
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.sum_factors import factors
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.matrices import SCHEMAS, hard_matrix
from tests.make.tensors import assert_same, same_bits


def with_helpers(task: object, count: int = 4) -> None:
    """Run a task in a thread that has helpers."""
    errors = []
    pool = Helpers(count)

    def work() -> None:
        pool.use(count)
        try:
            task()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    pool.stop()
    if errors:
        raise errors[0]


def test_without_helpers_there_is_one_part() -> None:
    parts: list[slice] = []
    in_parts(parts.append, 10)
    assert parts == [slice(0, 10)]


@pytest.mark.parametrize(("length", "least", "count"), [(100, 1, 8), (100, 30, 3), (5, 1, 5), (5, 6, 1)])
def test_parts_cover_the_range(length: int, least: int, count: int) -> None:
    parts: list[slice] = []
    with_helpers(lambda: in_parts(parts.append, length, least))
    assert len(parts) == count
    assert sorted(i for part in parts for i in range(length)[part]) == list(range(length))


def test_the_first_error_is_raised_when_all_are_done() -> None:
    done = []

    def task(part: slice) -> None:
        if part.start == 0:
            raise ValueError("of a part")
        done.append(part)

    with pytest.raises(ValueError, match="of a part"):
        with_helpers(lambda: in_parts(task, 80))
    assert len(done) == 7


@pytest.mark.parametrize("name", SCHEMAS)
def test_helpers_change_no_bit(name: str) -> None:
    schema = resolve_schema(name)
    stacks = [torch.stack([hard_matrix(256, 384, torch.bfloat16, 7 * i + e) for e in range(3)]) for i in range(2)]
    form = kernel_form(256, 384, kernel_spec_of(schema, "bfloat16", 90))

    def convert() -> list[object]:
        made = quantize_stacks(stacks, schema, "bfloat16", count_exact=True)
        return [(one, to_kernel(form, one.tensors)) for one in made]

    before = getattr(helper_threads._own, "helpers", None)  # an earlier test may have left some
    alone, helped = convert(), []
    with_helpers(lambda: helped.extend(convert()))
    assert getattr(helper_threads._own, "helpers", None) is before  # of this thread
    for (ours, kernel), (theirs, their_kernel) in zip(helped, alone, strict=True):  # type: ignore[misc]
        for field in ("error", "power", "num_exact"):
            assert same_bits(getattr(ours, field), getattr(theirs, field))
        for key, tensor in theirs.tensors.items():
            assert_same(ours.tensors[key], tensor, key)
        for key, tensor in their_kernel.items():
            assert_same(kernel[key], tensor, key)


@pytest.mark.parametrize("are_split", [False, True])
def test_helpers_take_parts_of_large_arrays_only(monkeypatch: pytest.MonkeyPatch, are_split: bool) -> None:
    """A part that takes less than its way to a helper stays with its thread; parts change no bit."""
    scales = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 128, 12), np.uint8))
    expected = scales[:, torch.arange(64).view(8, 8).t().flatten()].transpose(1, 2)  # of the first 64 rows
    sums = (scales.long() * torch.from_numpy(factors("column", 12).astype("int64"))).sum(2)
    if are_split:
        monkeypatch.setattr(cpu_ops, "_LEAST_SCALE_BYTES", 1)
        monkeypatch.setattr(content_sums, "_LEAST_WORDS", 1)
    num_parts: list[int] = []
    run = Helpers.run
    monkeypatch.setattr(
        Helpers, "run", lambda self, task, parts: (num_parts.append(len(parts)), run(self, task, parts))
    )
    found: list[torch.Tensor] = []
    with_helpers(lambda: found.extend((cpu_ops.transpose_scales(scales, False), compiled_row_sums(scales))))
    assert same_bits(found[0][..., :64], expected.contiguous())
    assert same_bits(found[1], sums)
    assert num_parts == ([5, 8] if are_split else [])
