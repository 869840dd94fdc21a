"""The page and the pictures: self-contained, complete, and shown by a real browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mfsdp_func as mf
from mfsdp_func.preflight.page import save_page
from mfsdp_func.preflight.pictures import PICTURES
from tests.preflight_cases import units_of

pytest.importorskip("matplotlib")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Reader(HTMLParser):
    """What a page would load, and its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.figures: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:")):
                self.loaded.append(f"{tag} {name}={value}")
            if tag == "figure" and name == "id":
                self.figures.append(value or "")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = mf.preflight(units_of("Llama-3 8B"), (2, 4), node=4)
    return result.save_html(tmp_path_factory.mktemp("page") / "page.html")


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.loaded == []
    assert "script" not in reader.tags
    assert reader.figures == list(PICTURES)
    assert reader.tags.count("svg") == len(PICTURES)
    assert not re.search(r"@import|url\(['\"]?http", text)
    for word in ("It fits", "Pre-flight", "python -m mfsdp_func preflight", "OWNERS", "Each matrix"):
        assert word in text


def test_several_settings_on_one_page(tmp_path: Path) -> None:
    results = [mf.preflight(units_of("GPT-2"), mesh, optimizer="adamw") for mesh in (4, 8)]
    text = save_page(results, tmp_path / "both.html").read_text()
    assert "Side by side" in text
    assert 'class="best"' in text
    assert text.count('id="heat"') == 2  # without owners, that of the collectives
    assert 'id="load"' not in text


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_pictures_as_a_file(tmp_path: Path, suffix: str) -> None:
    result = mf.preflight(units_of("GPT-2"), 8)
    file = result.plot(tmp_path / f"pictures.{suffix}")
    assert file.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])
    with pytest.raises(ValueError, match=r"go into a \.png, \.svg, \.pdf file"):
        result.plot(tmp_path / "pictures.txt")


@pytest.mark.slow
def test_a_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    """Headless Chromium lays it out: every picture has its size, and nothing is asked of the network."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} (Debian: apt-get install chromium)")
    shown = tmp_path / "shown.html"
    script = (
        "<script>window.onload = () => { const found = [...document.querySelectorAll('figure')].map(f => f.id + '=' +"
        " Math.round(f.querySelector('svg').getBoundingClientRect().width)); document.title = 'shown ' + found.join(' ')"
        " + ' loads=' + performance.getEntriesByType('resource').length; }</script>"
    )
    shown.write_text(page.read_text().replace("</body>", script + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--window-size=1200,3000", "--virtual-time-budget=5000", "--dump-dom", shown.as_uri()]
    out = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False).stdout
    title = re.search(r"<title>shown (.*?)</title>", out)
    assert title, out[:2000]
    *figures, loads = title[1].split()
    assert [figure.partition("=")[0] for figure in figures] == list(PICTURES)
    assert all(300 < int(figure.partition("=")[2]) <= 1200 for figure in figures)
    assert loads == "loads=0"
