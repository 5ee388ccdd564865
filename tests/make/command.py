"""The command, in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from hqconv.cli.app import app


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
