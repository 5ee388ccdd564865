"""GPUs by name, and architectures in the spellings that people have for them."""

from __future__ import annotations

import re

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.gpu_target import GPUS, TARGETS, GpuTarget, gpu_named, known_gpus, parse_target, target_of_record
from tests.make.places import REPO


@pytest.mark.parametrize(
    ("typed", "sm_version"),
    [
        *(("t4", 75), ("a100", 80), ("A100-SXM4-80GB", 80), ("a10", 86), ("l4", 89), ("L40S", 89)),
        *(("h100", 90), ("H200", 90), ("h20", 90), ("NVIDIA H100 80GB HBM3", 90), ("h100 sxm5", 90)),
        *(("b200", 100), ("gb200", 100), ("b300", 103), ("RTX PRO 6000", 120), ("rtx_pro_6000", 120)),
        *(("GeForce RTX 4090", 89), ("rtx5090", 120), ("dgx-spark", 121), ("GB10", 121)),
        *(("sm90", 90), ("SM90", 90), ("sm_90", 90), ("sm_90a", 90), ("sm90a", 90), ("90", 90), ("9.0", 90)),
        *(("10.0", 100), ("sm_100f", 100), ("compute_80", 80), ("12.1", 121), (" 7.5 ", 75)),
    ],
)
def test_spellings(typed: str, sm_version: int) -> None:
    assert parse_target(typed) == GpuTarget(sm_version)
    assert parse_target(typed, "13.2") == GpuTarget(sm_version, (13, 2))


@pytest.mark.parametrize("typed", ["sm70", "sm87", "sm110", "sm9", "9", "9.0.1", "sm-", "sm90b", "gpu", "", "v100"])
def test_others_are_refused_with_all_names(typed: str) -> None:
    with pytest.raises(RequestError, match="--target") as error:
        parse_target(typed)
    assert all(name in error.value.expected for name in GPUS)
    assert "9.0 is sm90" in error.value.remedy
    assert "Did you mean" not in error.value.remedy


def test_almost_a_name() -> None:
    for typed, meant in (("h10", "h100"), ("L40X", "l40"), ("rtx-4900", "rtx-4090")):
        with pytest.raises(RequestError, match=f"Did you mean {meant}"):
            parse_target(typed)


def test_names_lead_to_known_architectures_and_every_architecture_has_a_name() -> None:
    assert {gpu.sm_version for gpu in GPUS.values()} == set(TARGETS)
    for name, gpu in GPUS.items():
        assert gpu_named(name) == gpu_named(gpu.driver_name) == gpu_named(name.upper().replace("-", " ")) == name
        assert gpu.memory_gb > 0
    assert known_gpus([75, 100]) == "t4 (sm75); b200, gb200 (sm100)"


def test_a_record_has_one_spelling() -> None:
    assert target_of_record("sm90") == GpuTarget(90)
    for name in ("h100", "SM90", "9.0", "sm_90", ""):
        with pytest.raises(RequestError):
            target_of_record(name)


def test_the_documents_list_every_name() -> None:
    table = (REPO / "docs" / "targets.md").read_text().partition("## GPUs by name")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| sm(\d+) \| (.+) \|$", table, re.MULTILINE)
    listed = {name: int(sm) for sm, names in rows for name in names.split(", ")}
    assert listed == {name: gpu.sm_version for name, gpu in GPUS.items()}
