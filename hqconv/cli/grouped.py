"""A command whose help has its options under headings."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """Options without a heading come first; plain text, so that it is quick and loses nothing in 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and, under their headings, the options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
