"""What hqconv makes of published models, by their real names: writes docs/models.md.

    python scripts/models_table.py [NAMEPART ...]

From tests/data/models: every file is expanded into a checkpoint whose headers are real and whose data are holes, and
planned; then a twin with few layers and experts and small sizes is converted and verified. With parts of names only
those rows are made again. A test makes every row once more and holds the page to it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.make.published import load, paths
from tests.make.published_outcome import outcome_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
HEAD = "| model | model_type | family | layers × experts of [I, H] | source format | activation | twin |\n"
RULE = "| --- | --- | --- | --- | --- | --- | --- |\n"
TITLES = {"real": "Published models", "families": "Families and config values, at small sizes"}


def main() -> None:
    """Write the page's tables, and leave what stands before them."""
    before, *rest = PAGE.read_text(encoding="utf-8").split("## Published models\n")
    known = {
        line.split(" | ")[0][2:]: line
        for line in "".join(rest).splitlines()
        if line.startswith("| ")
    }
    text = before
    for folder, title in TITLES.items():
        text += f"## {title}\n\n{HEAD}{RULE}"
        for path in paths():
            if path.parent.name != folder:
                continue
            if path.stem not in known or any(part in path.stem for part in sys.argv[1:] or [""]):
                model = load(path)
                with tempfile.TemporaryDirectory() as scratch:
                    known[path.stem] = outcome_of(path, model, Path(scratch)).row(model, folder)
                print(known[path.stem], flush=True)
            text += known[path.stem] + "\n"
        text += "\n"
    PAGE.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
