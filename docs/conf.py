"""Sphinx: guides in Markdown, the Python API from docstrings, the C and C++ API from the headers (Doxygen, Breathe)."""

import os
import re
import struct
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import blocksparse

os.environ["KERAS_BACKEND"] = "torch"  # with which the layers for Keras are imported

project = "blocksparse"
author = "The blocksparse authors"
release = blocksparse.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "breathe"]
exclude_patterns = ["pictures"]
default_role = "py:obj"  # `Layout` in a docstring: a link where there is such a name, else code

html_theme = "furo"
html_title = f"blocksparse {release}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"npt.ArrayLike": "ArrayLike"}  # else a union of all that NumPy takes
breathe_projects = {"blocksparse": os.environ["BLOCKSPARSE_DOXYGEN_XML"]}
breathe_default_project = "blocksparse"
breathe_default_members = ("members", "undoc-members")
breathe_show_include = False  # each header has a section
suppress_warnings = [
    "duplicate_declaration.cpp",  # each header opens the namespace again
    "duplicate_declaration.c",  # structs are declared with their typedef
    "ref.python",  # a name in several modules, such as ModelConfig: the link goes to the first
]

CODE = re.compile(r"(``.*?``|`[^`]*`)")


def plain_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` in it: |w|, W_ and 2 * x are no markup. Literal blocks stay as they are."""
    literal = -1  # columns of what opened a literal block
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal >= 0 and line.strip() and indent <= literal:
            literal = -1
        if literal < 0:
            parts = CODE.split(line)
            parts[::2] = [re.sub(r"([|*]|(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
            lines[i] = "".join(parts)
            if line.rstrip().endswith("::"):
                literal = indent


def without_anonymous(app: Any, doctree: nodes.document) -> None:
    """The index leaves out what has no name: Doxygen calls the enums of C constants @0, @1, ..."""
    for node in doctree.findall(addnodes.index):
        node["entries"] = [entry for entry in node["entries"] if "@" not in entry[1]]


def without_hidden_constructors(app: Any, doctree: nodes.document) -> None:
    """Classes that are documented as `Name()`, made by other functions, show no parameters of their constructor."""
    for node in doctree.findall(addnodes.desc):
        signature, content = node[0], node[-1]
        if node["objtype"] == "class" and not list(signature.findall(addnodes.desc_parameter)):
            for field in list(content.findall(nodes.field)):
                if field.parent.parent is content and field[0].astext() == "Parameters":
                    field.parent.remove(field)


def links_to_files(app: Any, doctree: nodes.document) -> None:
    """Links from Markdown to files of the repository that are no pages: MyST takes .md for pages, so it finds none."""
    page = Path(app.env.doc2path(app.env.docname)).parent
    for node in list(doctree.findall(addnodes.pending_xref)):
        target = Path(f"{node['reftarget']}.md")
        if node.get("reftype") == "myst" and target.is_absolute() and target.is_file():
            file = addnodes.download_reference("", "", *node.children, reftarget=os.path.relpath(target, page))
            file["refdoc"], file["refexplicit"] = app.env.docname, True
            node.replace_self(file)


def wide_pictures(app: Any, doctree: nodes.document) -> None:
    """Several panels side by side get the class `wide`: scaled to a phone nothing of them could be read."""
    for node in doctree.findall(nodes.image):
        file = Path(app.srcdir, app.env.doc2path(app.env.docname, base=False)).parent / node["uri"]
        if file.suffix == ".png" and file.is_file():
            width, height = struct.unpack(">II", file.read_bytes()[16:24])
            if (width > 1100 and width > 2 * height) or file.parent.name == "performance":
                node["classes"].append("wide")


def setup(app: Any) -> None:
    """What the settings above cannot say."""
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon
    app.connect("doctree-read", without_anonymous)
    app.connect("doctree-read", without_hidden_constructors)
    app.connect("doctree-read", wide_pictures, priority=100)  # before Sphinx changes the addresses of pictures
    app.connect("doctree-read", links_to_files, priority=100)  # before Sphinx collects what is to be downloaded
