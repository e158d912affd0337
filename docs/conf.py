"""Sphinx configuration of the documentation site; `make docs` builds it into docs/_build/html."""

import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import mivhead

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "mivhead"
author = "the mivhead maintainers"
copyright = author  # noqa: A001  # Sphinx's name
version = release = mivhead.__version__


def github() -> str | None:
    """Return OWNER/NAME of the repository that the package names, for the links to Colab."""
    try:
        urls = metadata(project).get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    places = [url.partition("github.com/")[2].removesuffix(".git") for url in urls]
    return next(("/".join(place.split("/")[:2]) for place in places if "/" in place), None)


extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "miv_commands",
]
exclude_patterns = ["_build"]
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in docstrings are words, not references
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with their output; a slow test runs them

autosummary_generate = True
toc_object_entries_show_parents = "hide"  # the sidebar is narrow
autodoc_typehints = "none"  # numpydoc's sections state the types
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = "mivhead"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_math_renderer = "mathml"
html_show_sourcelink = False
_ALONE = ("tutorial", "how-good", "faq", "coming-from", "ecosystem", "changelog")
html_sidebars = {page: [] for page in (*_ALONE, "results", "research-log")}  # nothing to list there
html_theme_options = {
    "logo": {"text": "mivhead"},
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["colab", "page-toc"],
}
html_context = {"default_mode": "auto", "github": github()}
