"""The documentation site, built and opened in a real browser at the widths of a phone and of a desktop."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

import pytest
from docstrings import methods, sections

pytest.importorskip("sphinx")
pytest.importorskip("furo")
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
WIDTHS = (390, 1280)
SCREENSHOTS = os.environ.get("REVERB_WRITER_SCREENSHOTS")  # a folder that gets a picture of some pages
RATE_LIMITERS = "explanation/rate-limiters.html"
SHOWN = (
    "index.html",
    "explanation/windows.html",
    RATE_LIMITERS,
    "reference/observers.html",
    "tutorials/first-agent.html",
)
# What a reader sees of a page: how far it reaches to the right, and what reaches beyond the window.
OVERFLOW = """() => {
    const width = document.documentElement.clientWidth;
    return document.documentElement.scrollWidth <= width && document.body.scrollWidth <= width ? "" :
        [...document.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().right > width)
            .slice(0, 3).map(e => e.outerHTML.slice(0, 100)).join("\\n") || "something outside the article";
}"""
LINKS = """() => ({
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    anchors: [...document.querySelectorAll("[id]")].map(e => e.id),
    broken: [...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src),
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; `make docs` names one that it has just built."""
    given = os.environ.get("REVERB_WRITER_SITE")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", ROOT / "docs", folder]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def pages_of(site: Path) -> list[str]:
    generated = {"genindex.html", "search.html", "py-modindex.html"}
    pages = (str(path.relative_to(site)) for path in site.rglob("*.html"))
    return sorted(page for page in pages if page not in generated and not page.startswith(("_modules/", "_static/")))


def test_every_page_opens_fits_and_links_to_pages_that_are_there(site: Path, address: str, browser: Any) -> None:
    complaints: list[str] = []
    links: dict[str, set[str]] = {}  # of each page: addresses on this site
    anchors: dict[str, set[str]] = {}
    for width in WIDTHS:
        context = browser.new_context(viewport={"width": width, "height": 800})
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda said: complaints.append(f"{said.text} {said.location}") if said.type == "error" else None
        )
        for name in pages_of(site):
            page.goto(address + name)
            overflow = page.evaluate(OVERFLOW)
            if overflow:
                complaints.append(f"{name} at {width}: {overflow}")
            found = page.evaluate(LINKS)
            complaints.extend(f"{name}: no picture at {source}" for source in found["broken"])
            own = ("http://127.0.0.1:", "http://localhost:")
            plain = [
                link for link in found["links"] if link.startswith(("http://", "file:")) and not link.startswith(own)
            ]
            complaints.extend(f"{name}: no encrypted link: {link}" for link in plain)
            links[name] = {link for link in found["links"] if link.startswith(address)}
            anchors[address + name] = set(found["anchors"])
        context.close()
    for name, targets in links.items():
        for target in targets:
            of, anchor = urldefrag(urljoin(address, target))
            of = of + "index.html" if of.endswith("/") else of
            if not (site / of.removeprefix(address)).exists():
                complaints.append(f"{name}: dead link to {target}")
            elif anchor and of in anchors and anchor not in anchors[of]:
                complaints.append(f"{name}: no such place as {target}")
    assert len(anchors) > len(SHOWN)
    assert not complaints, "\n".join(complaints)


def test_pages_have_each_method_and_the_arguments_of_constructors(site: Path) -> None:
    missing = []
    for source in (ROOT / "docs/reference").glob("*.md"):
        page = (site / "reference" / f"{source.stem}.html").read_text("utf-8")
        text = source.read_text("utf-8")
        found = re.findall(r"^.. autoclass:: (reverb_writer[\w.]*)\.(\w+)", text, re.MULTILINE)
        for module in re.findall(r"^.. automodule:: (\S+)", text, re.MULTILINE):
            found += [(module, name) for name in pkgutil.resolve_name(module).__all__]
        for package, name in found:
            value = None if package == "reverb_writer_server" else getattr(pkgutil.resolve_name(package), name)
            if inspect.isclass(value):
                arguments = sections(value.__init__.__doc__ or "")
                missing += [f"{name}({one})" for one in arguments if not re.search(rf">[*]*{one}</strong>", page)]
                missing += [one for one in methods(value) if f'id="{package}.{name}.{one}"' not in page]
    assert not missing


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_theme_shows_its_own_pictures(site: Path, address: str, browser: Any, theme: str) -> None:
    assert (site / RATE_LIMITERS).exists()
    context = browser.new_context(color_scheme=theme)
    page = context.new_page()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for name in SHOWN:
            page.goto(address + name)
            if SCREENSHOTS:
                page.screenshot(path=Path(SCREENSHOTS) / f"{Path(name).stem}-{theme}-{width}.png")
        page.goto(address + RATE_LIMITERS)
        shown = {img.get_attribute("src") for img in page.locator("article img").all() if img.is_visible()}
        assert shown == {f"../_static/rate-limiter-{theme}.svg#gh-{theme}-mode-only"}
    context.close()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_pictures_are_drawn_for_both_themes(tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "docs/pictures.py", tmp_path]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name for path in (ROOT / "docs/_static").glob("*-*.svg")}
    themes = {name.rpartition("-")[2] for name in drawn}
    assert themes == {"light.svg", "dark.svg"}
    assert all("<svg" in (tmp_path / name).read_text("utf-8") for name in drawn)
