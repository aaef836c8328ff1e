"""Sphinx configuration of the documentation site; `make docs` builds it into build/site.

The source folder is the repository root, so the relative links between pages work on the site and
in the repository. Pages stay plain Markdown. Two things are added while Sphinx reads them: the
navigation, from the links of index pages, and the docstrings, in the pages of `reference/api`.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from inspect import isclass, ismodule, isroutine
from pathlib import Path

from sphinx.application import Sphinx

import deepseek_zero

project = "deepseek_zero"
author = "The deepseek_zero maintainers"
copyright = "The deepseek_zero maintainers"
version = release = deepseek_zero.__version__

root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "benchmarks/results/*.md"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "data",
    "src",
    "tests",
    "**/.*",
    "**/__pycache__",
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "literal"  # Docstrings put code between single backticks
myst_heading_anchors = 4

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # Fields of dataclasses are members too
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"

# The headings of API pages are enough: furo copies all entries into the navigation of each page
toc_object_entries = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"deepseek_zero {release}"
html_copy_source = False
html_show_sphinx = False

INDEX_PAGES = ("docs/index", "docs/design/README", "docs/reference/api/README")
API_PAGES = "docs/reference/api/"
# Classes that inherit most of their public methods from other classes of the library
WITH_INHERITED = {"deepseek_zero.DeepSpeedEngine", "deepseek_zero.DeepSeekZeRO3"}
NOT_FROM = "Module, Optimizer, object"

_LINK_TO_PAGE = re.compile(r"\[([^]]+)\]\(([^)#:]+)\.md(#[^)]*)?\)")
_API_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<summary>.*) \|$")


def setup(app: Sphinx) -> None:
    """Register the additions to pages, and the redirect from the root of the site."""
    app.connect("source-read", _add_to_page)
    app.connect("build-finished", _redirect_root)


def _add_to_page(app: Sphinx, page: str, source: list[str]) -> None:
    if page in INDEX_PAGES:
        source[0] += _navigation(page, source[0])
    elif page.startswith(API_PAGES):
        source[0] = _with_docstrings(page.removeprefix(API_PAGES), source[0])
    elif page.startswith("benchmarks/results/"):
        source[0] = "---\norphan: true\n---\n" + source[0]  # Pages link them; too many to navigate


def _navigation(page: str, text: str) -> str:
    """Return one hidden toctree for each section of an index page, of the pages it links."""
    folder = posixpath.dirname(page)
    seen = {page}
    trees = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        caption = section.splitlines()[0]
        entries = []
        for title, link, anchor in _LINK_TO_PAGE.findall(section):
            target = posixpath.normpath(posixpath.join(folder, link))
            if target not in seen and (page == root_doc or target.startswith(folder)):
                seen.add(target)
                entries.append(f"{title} </{target}>" if anchor else f"/{target}")
        if entries:
            options = f":hidden:\n:caption: {caption}"
            trees.append("\n".join(["```{toctree}", options, "", *entries, "```"]))
    return "\n" + "\n\n".join(trees) + "\n"


def _with_docstrings(module: str, text: str) -> str:
    """Replace each row of a module's table by the docstring of the name."""
    lines = []
    for line in text.splitlines():
        row = _API_ROW.match(line)
        if row:
            lines.append(_entry(module, row["name"], row["summary"]))
        elif not line.startswith("|"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _entry(module: str, name: str, summary: str) -> str:
    value = getattr(import_module(module), name)
    path = f"{module}.{name}"
    if isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        directive = f".. {kind}:: {path}\n   :members:\n   :show-inheritance:"
        if path in WITH_INHERITED:
            directive += f"\n   :inherited-members: {NOT_FROM}"
        if module != "deepseek_zero" and value is getattr(deepseek_zero, name, None):
            directive += "\n   :no-index:"  # The page of deepseek_zero has the target of links
    elif isroutine(value):
        directive = f".. autofunction:: {path}"
    else:
        kind = "module" if ismodule(value) else "data"
        directive = f".. py:{kind}:: {path}\n\n   {summary}"
    return f"## `{name}`\n\n```{{eval-rst}}\n{directive}\n```\n"


def _redirect_root(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")
