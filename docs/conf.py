"""Sphinx: the Python API from docstrings, the C and C++ API from the headers through Doxygen and Breathe."""

import os

import blocksparse

project = "blocksparse"
author = "The blocksparse authors"
release = blocksparse.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "breathe"]
html_theme = "furo"
html_title = "blocksparse"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
breathe_projects = {"blocksparse": os.environ["BLOCKSPARSE_DOXYGEN_XML"]}
breathe_default_project = "blocksparse"
breathe_default_members = ("members", "undoc-members")
# Each header opens the namespace again, and C structs are declared with their typedef.
suppress_warnings = ["duplicate_declaration.cpp", "duplicate_declaration.c"]
