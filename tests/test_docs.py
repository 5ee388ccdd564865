"""The documents: what they show runs, what they name exists, and the README stays short."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest

import hqconv
from hqconv.models.families import FAMILIES
from hqconv.schemas.weight_schema import PRESETS
from tests.make.formats import FORMATS
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

DOCUMENTS = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])
# Names of files that are made, not kept, or that stand for any.
NOT_KEPT = re.compile(
    r"[<>*…{}]|^(I/N|\./builtin|/|\.venv/|org/name|qwen3-moe-tiny|experts|model\.safetensors|hqconv\.json|config\.json|evaluation\.json|(hf_quant_config|quant_model_description)\.json)"
)


def test_the_examples_of_the_api_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_qwen3_moe(tmp_path / "qwen3-moe-tiny", num_layers=2)
    monkeypatch.chdir(tmp_path)
    text = (REPO / "docs/api.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    try:
        for example in examples:
            exec(compile(example, "docs/api.md", "exec"), names)
    finally:
        logging.getLogger("hqconv").setLevel(logging.NOTSET)  # an example sets it
    called = set(re.findall(r"hqconv\.(\w+)\(", "".join(examples)))
    assert called == {name for name in hqconv.__all__ if name.islower() and name != "__version__"}


def test_the_readme_is_short_and_names_every_preset() -> None:
    lines = (REPO / "README.md").read_text().splitlines()
    assert len(lines) < 125
    assert max(len(line) for line in lines if not line.startswith("|")) <= 125  # tables wrap
    assert all(f"`{name}`" in "\n".join(lines) for name in PRESETS)


def test_nothing_says_to_install_hqconv_from_an_index() -> None:
    """The name is not ours there: `pip install hqconv` would run code of somebody else."""
    told = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    files = [*told, *(REPO / "hqconv").rglob("*.py"), *(REPO / "docs/examples").iterdir()]
    wrong = [
        path.name
        for path in files
        if re.search(r"pip install[^\n`]*['\" ]hqconv", path.read_text())
    ]
    assert wrong == []


def test_messages_name_the_versions_of_the_extras() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = {"gguf": "gguf/header.py", "bitsandbytes": "formats/bitsandbytes.py"}
    files["calibrate"] = "calibration/transformers_model.py"
    for name, module in files.items():
        assert f"Run: pip install '{extras[name][0]}'." in (REPO / "hqconv" / module).read_text()


def test_every_source_format_has_its_row() -> None:
    """As the tests' list of formats has it; what `--schema source` gives is what the tests hold it to."""
    lines = (REPO / "docs/sources.md").read_text().splitlines()
    for name, spec in FORMATS.items():
        kept = spec.direct or (
            f"{spec.rounded} with `--round-scales`;" if spec.rounded else "refused: "
        )
        assert any(line.startswith(f"| {name} | {spec.recognised} | {kept}") for line in lines), (
            name
        )
    missing = [
        t for family in FAMILIES for t in family.model_types if not any(t in line for line in lines)
    ]
    assert missing == []


def test_every_model_type_is_served_or_not() -> None:
    """Each once in docs/serving.md, with as many as the page says."""
    text = (REPO / "docs/serving.md").read_text()
    models = text[text.index("## Models") : text.index("| served, but")]
    served = re.findall(
        r"^\* \*\*(?:loaded|read|looked up)\*\*: (.*?)\.$", models, re.MULTILINE | re.DOTALL
    )
    groups = [re.split(r",\s+", group) for group in served]
    names = [name for group in groups for name in group]
    rows = re.findall(r"^\| (.*) \| .* \|$", models, re.MULTILINE)[2:]
    others = [name for row in rows for name in row.split(", ")]
    types = [name for family in FAMILIES for name in family.model_types]
    assert sorted([*names, *others]) == sorted(types)
    counts = [len(types), len(names), *map(len, groups)]
    assert [
        int(number)
        for number in re.findall(r"(?<![\d.])\d{2,3}(?![\d.])", models.partition("* **")[0])
    ] == counts


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    named = {
        word.rstrip("/")
        for quoted in re.findall(r"`([^`\n]+)`", text)
        for word in quoted.split()
        if re.fullmatch(r"[\w./-]+(/[\w.-]*|\.(py|md|toml|json|txt))", word)
        and not NOT_KEPT.search(word)
    }
    roots = (REPO, REPO / "hqconv", REPO / "tests", REPO / "docs", REPO / "configs")
    assert sorted(name for name in named if not any(_is_there(root / name) for root in roots)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_headings_that_a_document_links_to_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    assert [
        f"{name}#{slug}"
        for name, slug in links
        if slug not in _slugs(document.parent / name if name else document)
    ] == []


def _slugs(document: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_there(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.py").exists()
