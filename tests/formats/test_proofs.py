"""Decoders against the packages that publish the formats: checkpoints that these wrote or read, on the whole way.

Conversion and weights check share the decoders, so a wrong one would pass both. A checkpoint of `tests.make.proofs` is
opened as any source: config to format, headers to parts, parts to weights.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hqconv.errors import InputError
from hqconv.sources.opening import open_source
from tests.make.formats import FORMATS
from tests.make.proofs import (
    BY_MATRIX,
    NOT_PROVEN,
    SAME_AS,
    Published,
    Tensors,
    recorded,
    recording,
    roles_of,
)
from tests.make.proofs_live import LIVE, said_of


@functools.cache
def live(name: str) -> Published:
    return LIVE[name]()


def decoded(folder: Path, proof: Published) -> Tensors:
    """The same weights by hqconv, float32, but for formats without codes in the source's dtype."""
    with open_source(proof.checkpoint(folder)) as source:
        (layer,) = source.map_experts().layers
        return {
            f"{expert}.{role}": source.read_expert(layer, expert, [role], torch.device("cpu"))[
                role
            ].values()
            for expert, role in roles_of(proof.values)
        }


def assert_equal(ours: Tensors, proof: Published) -> None:
    """Bit for bit in the package's dtype, but for the sign of zeros."""
    assert ours.keys() == proof.values.keys()
    for key, theirs in proof.values.items():
        found, expected = ours[key].to(theirs.dtype) + 0.0, theirs + 0.0
        assert found.shape == expected.shape
        limit = 0.0 if proof.roundings == 1 else 2.0**-23  # of a float32 number
        wrong = (
            (found.double() - expected.double()).abs() > limit * expected.double().abs()
        ).nonzero()
        where = tuple(wrong[0].tolist()) if len(wrong) else ()
        assert not len(wrong), (
            f"{key}: {len(wrong)} of {found.numel()}, first {found[where]}, not {expected[where]}"
        )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", LIVE)
def test_live(name: str, tmp_path: Path) -> None:
    proof = live(name)
    assert (proof.package.split()[0], proof.wrote) == said_of(name)
    assert_equal(decoded(tmp_path / "source", proof), proof)


@pytest.mark.parametrize("name", recorded())
def test_recorded(name: str, tmp_path: Path) -> None:
    proof = recording(name)
    assert_equal(decoded(tmp_path / "source", proof), proof)


# --- what the packages wrote and hqconv once refused -------------------------------------------------------


def test_zeros_of_symmetric_codes_must_be_the_midpoint(tmp_path: Path) -> None:
    """Quark stores zero points of symmetric integers too: all zero."""
    proof = recording("quark-int4")
    name = next(key for key in proof.tensors if key.endswith("weight_zero_point"))
    assert not proof.tensors[name].any()
    wrong = replace(proof, tensors={**proof.tensors, name: torch.ones_like(proof.tensors[name])})
    with pytest.raises(
        InputError, match="A symmetric matrix has zero points other than the midpoint"
    ):
        decoded(tmp_path / "wrong", wrong)
    without = {
        key: tensor
        for key, tensor in proof.tensors.items()
        if not key.endswith("weight_zero_point")
    }
    assert_equal(decoded(tmp_path / "without", replace(proof, tensors=without)), proof)


def test_block_scales_may_keep_the_dimensions_of_blocks(tmp_path: Path) -> None:
    """ModelOpt stores [N / 128, 1, K / 128, 1]; other shapes of four dimensions are refused."""
    proof = recording("modelopt-fp8-blocks")
    scales = {key: tensor for key, tensor in proof.tensors.items() if key.endswith("weight_scale")}
    assert any(scale.ndim == 4 for scale in scales.values())
    flat = {key: scale.reshape(scale.shape[0], -1) for key, scale in scales.items() if scale.ndim}
    assert_equal(
        decoded(tmp_path / "flat", replace(proof, tensors={**proof.tensors, **flat})), proof
    )
    turned = {key: scale.permute(1, 0, 3, 2) for key, scale in scales.items() if scale.ndim}
    with pytest.raises(InputError, match="A tensor has the wrong shape"):
        decoded(tmp_path / "turned", replace(proof, tensors={**proof.tensors, **turned}))


# --- the table of docs/sources.md --------------------------------------------------------------------------


def test_every_format_has_a_proof_or_says_that_it_has_none() -> None:
    proven = {*LIVE, *recorded()}
    assert set(SAME_AS.values()) <= proven
    others = [*SAME_AS, *BY_MATRIX, *NOT_PROVEN]
    assert len(others) == len(set(others))
    assert not proven & set(others)
    assert set(FORMATS) <= proven | set(others)


def test_no_recording_is_made_by_a_format_that_has_a_live_proof() -> None:
    assert not set(LIVE) & set(recorded())
