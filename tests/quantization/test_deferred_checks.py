"""Checks that are judged together: put down where asked, and what is wrong is said in the same words afterwards."""

from __future__ import annotations

import torch

from hqconv.quantization.coded_matrix import deferring_checks, is_any


def test_a_check_inside_finds_nothing_and_is_put_down() -> None:
    bad, good = torch.tensor([False, True]), torch.tensor([False])
    assert is_any(bad)
    with deferring_checks() as doubts:
        assert doubts.all() is None
        assert not is_any(good)
        assert not is_any(bad)
    assert is_any(bad)
    found = doubts.all()
    assert found is not None
    assert found.tolist() == [False, True]
