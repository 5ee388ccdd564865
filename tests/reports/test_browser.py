"""The page as a browser shows it: offline, without a word in its console, at any width, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hqconv
from hqconv.reports.page import page
from hqconv.reports.page_document import page_document
from tests.make.browser import Browser, browser, needs_browser
from tests.make.conversions import manifest, run, write_manifest
from tests.make.qwen import write_qwen3_moe

pytestmark = [pytest.mark.browser, needs_browser]
WIDTHS = (400, 1400)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything: long hostile names, the source, findings."""
    folder = tmp_path_factory.mktemp("page")
    write_qwen3_moe(folder / "model", num_layers=3)
    run(folder / "model", folder / "out", "int4-g64-zp")
    verified = hqconv.verify(folder / "out", folder / "model", checks=["files", "weights"], device="cpu")
    of_experts = {name: roles for result in verified.results for name, roles in result.of_experts.items()}
    words = manifest(folder / "out")
    words["source"]["name"] = "<script>console.error('ran')</script>" + "very-long-name" * 20
    words["blocks"]["model.layers.2.mlp.experts"]["layer"] = -1  # shown by its name, which is long
    write_manifest(folder / "out", words)
    place = folder / "page.html"
    place.write_text(page(page_document(folder / "out", verified.to_dict(), of_experts)), encoding="utf-8")
    return place


def luminance(colour: str) -> float:
    """Of `rgb(r, g, b)`, as WCAG has it."""
    parts = [int(one) / 255 for one in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_fits_and_is_quiet(width: int, scheme: str, tab: Browser, shown: Path) -> None:
    found = tab.show(shown, width, scheme, shot=True)
    assert found.said == []
    assert found.fetched == [shown.resolve().as_uri()]
    assert found.sizes["inner"] == width
    assert found.sizes["scroll"] <= width
    assert found.sizes["left"] >= 0
    assert found.sizes["small"] == 0
    ink, paper = luminance(found.sizes["ink"]), luminance(found.sizes["page"])
    assert (paper > ink) == (scheme == "light")
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7
    assert found.png[:4] == b"\x89PNG"


def test_the_plot_is_drawn(tab: Browser, shown: Path) -> None:
    tab.show(shown, 400, "light")
    sizes = tab.text("[...document.querySelectorAll('svg')].map(s => [s.clientWidth, s.clientHeight])")
    assert len(sizes) == 1
    assert all(width > 250 and height > 50 for width, height in sizes)
    colour = "getComputedStyle(document.querySelector('path.line.w1')).stroke"
    assert tab.text(colour) == "rgb(11, 98, 168)"
    tab.show(shown, 400, "dark")
    assert tab.text(colour) == "rgb(99, 179, 237)"


def test_the_browser_would_tell(tab: Browser, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    bad = tmp_path / "bad.html"
    script = "<script>console.error('said')</script><img src='http://127.0.0.1:9/x.png'>"
    bad.write_text(f"<!DOCTYPE html><body style='margin:0 -9px;width:900px;font-size:8px'>{script}<p>words</p></body>")
    found = tab.show(bad, 400, "dark")
    assert any("said" in one for one in found.said)
    assert "http://127.0.0.1:9/x.png" in found.fetched
    assert found.sizes["scroll"] > 400
    assert found.sizes["left"] < 0
    assert found.sizes["small"] > 0
