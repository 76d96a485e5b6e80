"""How Sphinx makes the book's site: `make book`.

The sources lie in the root of the repository, so a link such as ../notebooks/ch03_paging.ipynb means the same
on the site and in the repository. Nothing that a page needs comes from elsewhere: no web font, no CDN.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "ext"))

project = "minivllm"
author = "The minivllm authors"
copyright = "The minivllm authors, Apache-2.0"
language = "en"

extensions = ["myst_nb", "sphinx.ext.mathjax", "book_contents", "book_index", "book_offline"]
root_doc = "book/index"
include_patterns = ["book/*.md", "notebooks/*.ipynb", "exercises/*.ipynb", "solutions/*.ipynb"]
# Other folders are not even looked into: .venv alone has tens of thousands of files.
SOURCES = {"book", "notebooks", "exercises", "solutions"}
exclude_patterns = [path.name for path in sorted(ROOT.iterdir()) if path.name not in SOURCES]
exclude_patterns += ["book/_build", "**/.ipynb_checkpoints"]

# Plain Markdown with $...$ as the one addition, by the rules under which "$5 and $6" are two prices.
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False
myst_dmath_allow_digits = False
myst_heading_anchors = 6

# Notebooks are shown with the outputs that they store. Widgets need a running notebook.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, Any] = {}

html_theme = "sphinx_book_theme"
html_title = "minivllm: LLM serving, a textbook that you run"
html_short_title = "minivllm"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["book.css"]
templates_path = ["_templates"]
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "minivllm", "alt_text": ""},
    "navbar_persistent": [],  # the side bar has the search field
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "footer_content_items": ["copyright.html"],
}
