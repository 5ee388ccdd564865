"""docs/examples/models.md: its commands plan the published models by their recorded headers, as its table says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.make.command import call
from tests.make.places import REPO
from tests.make.published import DATA, load, write_sparse

TEXT = (REPO / "docs/examples/models.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^    hqconv (convert .+)$", TEXT, re.MULTILINE)
]
(RATES,) = re.findall(r"^Seconds per GB: (.+)\.$", TEXT, re.MULTILINE)
ROWS = {
    cells[1]: cells[2:-1]
    for cells in (re.split(r" ?\| ?", row) for row in re.findall(r"^\| \S+/.+$", TEXT, re.M))
}
GPU_BYTES = {"h100": 80e9, "h200": 141e9}


def test_five_models_have_a_command_and_a_row() -> None:
    assert len(COMMANDS) == 5
    assert [words[1] for words in COMMANDS] == list(ROWS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[1])
def test_the_commands_plan_what_the_table_says(command: list[str], tmp_path: Path) -> None:
    model = command[1]
    source = write_sparse(
        load(DATA / "real" / f"{model.replace('/', '--')}.json"), tmp_path / model
    )
    assert row_of(command, source) == ROWS[model]


def row_of(words: list[str], source: Path) -> list[str]:
    """What the table should say; the model has to fit its GPUs."""
    done = call(words[0], source, *words[2:], "--dry-run", "--device", "cpu", "--json")
    plan: dict[str, Any] = json.loads(done.stdout)
    assert plan["kind"] == "plan", done.output  # with an exit code where the disk here is too small
    (experts,), blocks = (
        {b["num_experts"] for b in plan["blocks"]},
        sum(b["num_blocks"] for b in plan["blocks"]),
    )
    gpu, ranks = words[words.index("--target") + 1], set(plan["rank_bytes"].values())
    written = sum(
        file["size_bytes"] for file in plan["files"] if file["path"].startswith("experts/")
    )
    read = plan["tensors"]["converted"]["num_bytes"]
    seconds = float(dict(re.findall(r"(\S+) ([\d.]+)", RATES))[words[1].split("/")[1]])
    assert max(ranks) < 0.9 * GPU_BYTES[gpu]
    return [
        f"{blocks} × {experts}",
        f"{plan['tp']} × {gpu.upper()}",
        f"`{plan['schema']['name']}`"
        + (", codes kept" if plan["conversion"] == {"direct": blocks} else ""),
        f"{read / 1e9:.0f} GB",
        f"{written / 1e9:.0f} GB",
        f"{max(ranks) / 1e9:.0f} GB",
        f"{read / 1e9 * seconds / 60:.0f}",
    ]
