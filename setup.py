"""Long description of the package: README.md with links that work outside of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def absolute(link: re.Match[str]) -> str:
    """Point a link into the repository, or name its file where the repository has no public address."""
    text, path = link.groups()
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"].get("Repository")
    file = path.partition("#")[0]
    if repository is None:
        return text if text == file else f"{text} (`{file}`)"
    return f"[{text}]({repository}/blob/main/{path})"


readme = (HERE / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, readme),
    long_description_content_type="text/markdown",
)
