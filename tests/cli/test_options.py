"""The public command line, frozen: every command with its options and their defaults.

Scripts of users depend on this table. An option may be added. A name or a default that is there already stays.
"""

from __future__ import annotations

import re
from typing import Any

import typer

from hqconv.cli.app import app

SHARED = "--json --quiet/-q --verbose/-v --log-file"
WORK = "--device=auto --max-memory=4GiB --threads"
HUB = "--cache-limit --keep-source"
GRID = "--tp=1 --tp-split=even --ep=1 --expert-placement=linear --redundant-experts"
CALIBRATION = "--help-all --calibrate --calibrate-tokens=65536 --calibrate-context=2048"
ALLOCATED = f"--input-schema=a16 --round-scales --target --cuda --dtype --max-gpu-memory {GRID} {CALIBRATION}"
CONVERTED = (
    "--schema --dense=none --quantizer=rtn --allow-unserved --layout=kernel --config "
    f"--source-digests {ALLOCATED}"
)
LIMITS = "--max-error --evaluate --max-kl"
COMMANDS = {
    "convert": f"SRC --out/-o --revision {CONVERTED} {LIMITS} --part --resume --overwrite --update --dry-run --profile "
    f"{WORK} {HUB}",
    "allocate": f"SRC --out/-o --size --bits --candidates --revision {ALLOCATED} {WORK}",
    "verify": "OUT --source --revision --checks --layers --tokens=1,17,256 --max-error --server --model --report "
    f"{WORK} {HUB}",
    "report": "OUT --out/-o",
    "warm": "OUT --gpu --tp=1 --ep=1 --quantization --moe-backend --kernels --jobs",
    "push": "OUT ORG/NAME --private --branch=main",
    "publish": f"SRC ORG/NAME --out/-o --revision {CONVERTED} {LIMITS} --checks --private --branch=main {WORK} {HUB}",
    "evaluate": "OUT --source --write-reference --text --tokens=16384 --context=512 --compute-dtype=float32 --revision "
    f"{WORK}",
    "check": f"CKPT --against --layers --sample=all --revision {HUB} --max-memory=4GiB --threads",
    "inspect": "SRC|OUT --revision",
    "schemas": "--recipes --for --all",
}


def shown(param: Any) -> str:
    """Flags (or the metavar of an argument), and a default that is no text."""
    if param.param_type_name != "option":
        return str(param.metavar)
    default = re.search(r"\[default: ([\w,]+)\]$", param.help or "")
    value = param.default or (default and default[1])
    return "/".join(param.opts) + (f"={value}" if value else "")


def test_commands_options_and_defaults() -> None:
    group: Any = typer.main.get_command(app)
    assert group.commands.keys() == COMMANDS.keys()
    for name, command in group.commands.items():
        params = command.params
        assert {shown(param) for param in params} == {*COMMANDS[name].split(), *SHARED.split()}, (
            name
        )
        assert all(param.help for param in params)
    required = [param.name for param in group.commands["evaluate"].params if param.required]
    assert required == ["out", "text"]
