"""The public command line, frozen: every command with its options and their defaults.

Scripts of users depend on this table. An option may be added. A name or a default that is there already stays.
"""

from __future__ import annotations

from typing import Any

import typer

from hqconv.cli.app import app

REQUIRED = "required"
SHARED = {"--json": False, "--quiet -q": False, "--verbose -v": False, "--log-file": None}
FETCHED = {"--cache-limit": None, "--keep-source": False}
WORK = {"--device": "auto", "--max-memory": "4GiB", "--threads": None}

CONVERT: dict[str, Any] = {
    "SRC": REQUIRED,
    "--out -o": None,
    "--config": None,
    "--schema": None,
    "--input-schema": "a16",
    "--quantizer": "rtn",
    "--calibrate": None,
    "--calibrate-tokens": 65536,
    "--calibrate-context": 2048,
    "--round-scales": False,
    "--allow-unserved": False,
    "--layout": "kernel",
    "--target": None,
    "--cuda": None,
    "--dtype": None,
    "--tp": 1,
    "--tp-split": "even",
    "--ep": 1,
    "--expert-placement": "linear",
    "--redundant-experts": 0,
    "--revision": None,
    **FETCHED,
    "--max-gpu-memory": None,
    "--part": None,
    "--resume": False,
    "--overwrite": False,
    "--update": False,
    "--source-digests": False,
    "--max-error": None,
    "--evaluate": None,
    "--max-kl": None,
    "--dry-run": False,
    "--profile": None,
    **WORK,
    **SHARED,
}
ONLY_CONVERT = ("--part", "--resume", "--overwrite", "--update", "--dry-run", "--profile")
COMMANDS: dict[str, dict[str, Any]] = {
    "convert": CONVERT,
    "allocate": {
        "SRC": REQUIRED,
        "--out -o": None,
        "--size": None,
        "--bits": None,
        "--candidates": None,
        "--input-schema": "a16",
        "--calibrate": None,
        "--calibrate-tokens": 65536,
        "--calibrate-context": 2048,
        "--round-scales": False,
        "--target": None,
        "--cuda": None,
        "--dtype": None,
        "--tp": 1,
        "--tp-split": "even",
        "--ep": 1,
        "--expert-placement": "linear",
        "--redundant-experts": 0,
        "--revision": None,
        "--max-gpu-memory": None,
        **WORK,
        **SHARED,
    },
    "verify": {
        "OUT": REQUIRED,
        "--source": None,
        "--revision": None,
        "--checks": None,
        "--layers": None,
        "--tokens": "1,17,256",
        "--max-error": None,
        "--report": None,
        **FETCHED,
        **WORK,
        **SHARED,
    },
    "report": {"OUT": REQUIRED, "--out -o": None, **SHARED},
    "warm": {
        "OUT": REQUIRED,
        "--gpu": None,
        "--tp": 1,
        "--ep": 1,
        "--quantization": None,
        "--moe-backend": None,
        "--kernels": None,
        "--jobs": None,
        **SHARED,
    },
    "push": {"OUT": REQUIRED, "ORG/NAME": REQUIRED, "--private": False, "--branch": None, **SHARED},
    "publish": {
        "SRC": REQUIRED,
        "ORG/NAME": REQUIRED,
        **{
            name: default for name, default in CONVERT.items() if name not in ("SRC", *ONLY_CONVERT)
        },
        "--checks": None,
        "--private": False,
        "--branch": None,
        **SHARED,
    },
    "evaluate": {
        "OUT": REQUIRED,
        "--source": REQUIRED,
        "--text": REQUIRED,
        "--tokens": 16384,
        "--context": 512,
        "--compute-dtype": "float32",
        "--device": "auto",
        "--max-memory": "4GiB",
        "--threads": None,
        "--revision": None,
        **SHARED,
    },
    "check": {
        "CKPT": REQUIRED,
        "--against": None,
        "--layers": None,
        "--sample": None,
        "--max-memory": "4GiB",
        "--threads": None,
        "--revision": None,
        **FETCHED,
        **SHARED,
    },
    "inspect": {"SRC|OUT": REQUIRED, "--revision": None, **SHARED},
    "schemas": {"--recipes": False, "--for": None, **SHARED},
}


def options_of(command: Any) -> dict[str, Any]:
    """Flags (or the metavar of an argument) → default value."""
    return {
        " ".join(param.opts) if param.param_type_name == "option" else param.metavar: REQUIRED
        if param.required
        else param.default
        for param in command.params
    }


def test_commands_options_and_defaults() -> None:
    group: Any = typer.main.get_command(app)
    assert {name: options_of(command) for name, command in group.commands.items()} == COMMANDS
    assert not [
        param.name
        for command in group.commands.values()
        for param in command.params
        if not param.help
    ]
