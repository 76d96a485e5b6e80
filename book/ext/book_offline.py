"""What makes the site whole in itself: MathJax as one local file, and a start page where one looks for it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.fileutil import copy_asset

# The package's own extension copies 24 MB, most of it fonts and other builds of MathJax. This build draws
# glyphs as SVG paths, so it needs no font, and has all TeX packages in it, so it loads nothing later.
MATHJAX = "tex-svg-full.js"

REDIRECT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="0; url={page}">
<link rel="canonical" href="{page}">
<link rel="icon" href="data:,">
<title>{title}</title>
</head>
<body><p><a href="{page}">{title}</a></p></body>
</html>
"""


def configure_mathjax(app: Sphinx, config: Config) -> None:
    """Use the local file. The menu is left out: half of its entries load parts that are not there. So are the
    two packages that hide mistakes in formulas: what TeX does not understand must be seen."""
    config.mathjax_path = f"mathjax/{MATHJAX}"  # type: ignore[attr-defined, unused-ignore]
    config.mathjax3_config = {  # type: ignore[attr-defined, unused-ignore]
        "options": {"enableMenu": False},
        "tex": {"packages": {"[-]": ["noerrors", "noundefined"]}},
    }


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Put MathJax, which the package sphinx-mathjax-offline has, among the site's static files."""
    found = find_spec("sphinx-mathjax-offline")
    if error is None and app.builder.name == "html" and found is not None and found.origin is not None:
        source = Path(found.origin).parent / "static" / "mathjax" / MATHJAX
        copy_asset(source, Path(app.outdir) / "_static" / "mathjax")


def write_start_page(app: Sphinx, error: Exception | None) -> None:
    """The site's root leads to the book's first page, which lies in a folder of its own."""
    if error is None and app.builder.name == "html":
        page = REDIRECT.format(page=f"{app.config.root_doc}.html", title=app.config.html_title)
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("config-inited", configure_mathjax)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", write_start_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
