"""What is said before a conversion about families that a stock vLLM does not read, or reads wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.make.conversions import open_plan
from tests.make.families import save_family

# As vLLM's own model classes load tiny models of them: docs/serving.md.
SERVED = ("mixtral", "qwen3_vl_moe", "gemma4", "jamba", "nemotron_h", "minimax_m2", "deepseek_v3")
NOT_SERVED = (
    *(
        "gpt_oss",
        "openai_privacy_filter",
        "llama4_text",
        "granitemoe",
        "granitemoe_swa",
        "dbrx",
        "step3p7",
    ),
    *("aria", "deepseek_v4", "kimi_k25", "inkling_mm_model"),
)


def warnings_of(
    folder: Path, family: str, schema: str, layout: str = "checkpoint"
) -> tuple[str, ...]:
    save_family(folder, family, inner=64)
    checkpoint, plan = open_plan(folder, schema, layout=layout)
    checkpoint.close()
    return plan.warnings


@pytest.mark.parametrize("family", [*SERVED, *NOT_SERVED])
def test_families(family: str, tmp_path: Path) -> None:
    warnings = warnings_of(tmp_path / "m", family, "mxfp4")
    assert len(warnings) == (family in NOT_SERVED)
    assert all("from this layout: " in warning for warning in warnings)


def test_schema_and_family_are_said_both(tmp_path: Path) -> None:
    of_schema, of_family = warnings_of(tmp_path / "m", "dbrx", "nvfp4")
    assert "'nvfp4' with bfloat16" in of_schema
    assert "'dbrx'" in of_family


def test_only_e8m0_scales_are_in_the_way_of_deepseek_v4(tmp_path: Path) -> None:
    assert warnings_of(tmp_path / "m", "deepseek_v4", "fp8") == ()


def test_nothing_is_said_of_the_kernel_layout(tmp_path: Path) -> None:
    assert warnings_of(tmp_path / "m", "gpt_oss", "nvfp4", layout="kernel") == ()
