"""How `make docs` builds the site: Sphinx over the Markdown of this folder and of the repository's top, so that links
from one to the other are checked as well. A warning is an error, and nothing comes from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref

project = "shmsync"
html_title = "shmsync"
copyright = "the shmsync authors"

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index"
# Paths are the repository's: it is what the Makefile gives as the folder of the sources.
TOP = (
    "README",
    "SECURITY",
    "ARCHITECTURE",
    "CONTRIBUTING",
    "CHANGELOG",
    "bench/results/latest",
    "bench/results/steps/latest",
    "bench/results/epyc/latest",
)
include_patterns = ["docs/**.md", *(f"{name}.md" for name in TOP)]
exclude_patterns = [".*", "build", "csrc", "demo-out", "dist", "examples", "shmsync", "site", "tests"]
# Links to headings, by the names that git hosts give them too.
myst_heading_anchors = 3
nitpicky = True

html_theme = "pydata_sphinx_theme"
html_extra_path = ["root"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def name_folders(app: Any, doctree: Any) -> None:
    """A folder of the repository has no page: its name stands there without a link. One that is not there is broken."""
    for link in list(doctree.findall(pending_xref)):
        if (Path(app.srcdir, link["refdoc"]).parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", name_folders)
