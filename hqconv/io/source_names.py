"""What people name a source by: folders and repo ids, and what is close to them."""

from __future__ import annotations

import re
from pathlib import Path

from hqconv.errors import RequestError

_SCHEMES = re.compile(
    r"(?:hf://(?:models/)?|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<rest>.*)", re.IGNORECASE
)
_REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/[\w.-]+?)(?:@(?P<at>[^\s?#]+)|/(?:tree|blob|resolve)/(?P<tree>[^/\s?#]+)(?P<file>/[^?#]*)?)?/?",
    re.ASCII,
)
_IN_CACHE = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json")
ADAPTER = "adapter_config.json"


def named(src: str, revision: str | None = None) -> tuple[str, str | None]:
    """Source and revision of what was typed: `org/name@rev`, `hf://org/name` and the Hub's pages are repos.

    What is there as a folder or file is that. Raises RequestError for a page of one file, and for two revisions.
    """
    if not src or Path(src).exists():
        return src, revision
    link = _SCHEMES.fullmatch(src)
    found = _REPO.fullmatch(link["rest"] if link else src)
    if found is None or (link is None and found["tree"]):
        return src, revision
    if found["file"] and found["file"] != "/":
        what, remedy = "This is the address of one file.", f"Name the repo: {found['repo']}."
        raise RequestError(what, where=src, expected="a model folder or a Hub repo", remedy=remedy)
    given = found["at"] or found["tree"]
    if given and revision not in (None, given):
        what, remedy = "Two revisions are named.", "Name one of them."
        raise RequestError(what, where=src, expected=f"revision {revision}", found=given, remedy=remedy)
    return found["repo"], given or revision


def refuse_what_is_no_model(path: Path) -> None:
    """Raises RequestError for what is often given in the place of a model's folder, with what to give instead."""
    if path.is_file():
        is_known = path.name.lower().endswith(_FILES)
        remedy = f"Give the folder that it lies in: {path.parent}." if is_known else ""
        expected = "a model folder or a Hub repo id (org/name)"
        raise RequestError("This is a file.", where=str(path), expected=expected, remedy=remedy)
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        what = "This is an adapter (LoRA), not a model: it has no experts of its own."
        remedy = "Merge it into its base model first (peft: merge_and_unload, save_pretrained), and give that folder."
        raise RequestError(what, where=str(path), found=ADAPTER, remedy=remedy)
    cached = _IN_CACHE.fullmatch(path.name)
    if cached and (path / "snapshots").is_dir():
        remedy = (
            f"Name the repo, {cached['org']}/{cached['name']}, or one of the folders in {path / 'snapshots'}."
        )
        raise RequestError("This is a repo's place in the Hub's cache.", where=str(path), remedy=remedy)
