"""GPUs by name, and architectures in the spellings that people have for them."""

from __future__ import annotations

import re

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.gpu_target import (
    GPUS,
    TARGETS,
    GpuTarget,
    gpu_named,
    known_gpus,
    parse_target,
    target_of_record,
)
from tests.make.places import REPO

SPELLINGS: dict[int, tuple[str, ...]] = {
    75: ("t4", " 7.5 "),
    80: ("a100", "A100-SXM4-80GB", "compute_80"),
    86: ("a10",),
    89: ("l4", "L40S", "GeForce RTX 4090"),
    90: (
        "h100",
        "H200",
        "h20",
        "NVIDIA H100 80GB HBM3",
        "h100 sxm5",
        "sm90",
        "SM90",
        "sm_90",
        "sm_90a",
        "90",
        "9.0",
    ),
    100: ("b200", "gb200", "10.0", "sm_100f"),
    103: ("b300",),
    120: ("RTX PRO 6000", "rtx_pro_6000", "rtx5090"),
    121: ("dgx-spark", "GB10", "12.1"),
}


def test_spellings() -> None:
    for sm_version, spellings in SPELLINGS.items():
        for typed in spellings:
            assert parse_target(typed) == GpuTarget(sm_version)
            assert parse_target(typed, "13.2") == GpuTarget(sm_version, (13, 2))


def test_others_are_refused_with_all_names() -> None:
    others = ("sm70", "sm87", "sm110", "sm9", "9", "9.0.1", "sm-", "sm90b", "gpu", "", "v100")
    for typed, meant in {
        **dict.fromkeys(others, ""),
        "h10": "h100",
        "L40X": "l40",
        "rtx-4900": "rtx-4090",
    }.items():
        with pytest.raises(RequestError, match="--target") as error:
            parse_target(typed)
        assert all(name in error.value.expected for name in GPUS)
        assert (f"Did you mean {meant}?" if meant else "9.0 is sm90") in error.value.remedy
        assert ("Did you mean" in error.value.remedy) == bool(meant)
    assert target_of_record("sm90") == GpuTarget(90)
    for name in ("h100", "SM90", "9.0", "sm_90", ""):  # a record has one spelling
        with pytest.raises(RequestError):
            target_of_record(name)


def test_names_lead_to_known_architectures_and_every_architecture_has_a_name() -> None:
    assert {gpu.sm_version for gpu in GPUS.values()} == set(TARGETS)
    for name, gpu in GPUS.items():
        assert (
            gpu_named(name)
            == gpu_named(gpu.driver_name)
            == gpu_named(name.upper().replace("-", " "))
            == name
        )
    assert known_gpus().startswith("t4 (sm75); ")
    assert "; b200, gb200 (sm100); " in known_gpus()


def test_the_documents_list_every_name() -> None:
    table = (
        (REPO / "docs" / "targets.md")
        .read_text()
        .partition("## GPUs by name")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| sm(\d+) \| (.+) \|$", table, re.MULTILINE)
    listed = {name: int(sm) for sm, names in rows for name in names.split(", ")}
    assert listed == {name: gpu.sm_version for name, gpu in GPUS.items()}
