"""Sphinx's settings for the site of these documents and the API reference.

The source folder is the repository's root, so that a link between two documents is the same
relative path on a code host and in the site, wherever they lie:

    python -m sphinx -W --keep-going -d build/doctrees -c docs . build/docs
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import megakit  # noqa: E402
from megakit.runtime import use_accelerator  # noqa: E402

# Autodoc imports the real modules: with this, they need no GPU, and three seconds.
use_accelerator("cpu")

project = "MNIST on NeMo 2 and Megatron-Core"
author = "the project's contributors"
project_copyright = author
version = release = megakit.__version__

root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/*.md", "docs/course/*.md", "docs/api/*.md"),
    *("benchmarks/RESULTS.md", "examples/**/README.md"),
]
exclude_patterns = [".*", "build", "data", "runs"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = project
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]

# The anchors that code hosts give headings, down to `####`.
myst_heading_anchors = 4
myst_heading_slug_func = "github"

default_role = "py:obj"  # `name` is a link where there is such a name, and code elsewhere
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Lightning's refer to pages of its own
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
# Fields of a class stand with their class, so that two classes may have one of the same name.
napoleon_use_ivar = True


def start_at_the_top(app: "Sphinx", exception: Exception | None) -> None:
    """Whoever opens build/docs gets the first page, which lies one folder below."""
    if exception is None and app.builder.format == "html":
        page = '<meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (app.outdir / "index.html").write_text(page + "\n")


def setup(app: "Sphinx") -> None:
    """Called by Sphinx."""
    app.connect("build-finished", start_at_the_top)
