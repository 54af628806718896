"""Builds the site from the pages and notebooks here and the package's docstrings: ``make site``."""

import importlib.util
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

project = "autopipe"
copyright = "the autopipe authors"  # noqa: A001 - sphinx's name for it
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**.ipynb_checkpoints"]
html_theme = "furo"
html_title = "autopipe"
html_static_path, html_css_files = ["site.css"], ["site.css"]
nb_execution_mode = "off"
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type", "ref.python"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# what the site can be built without
autodoc_mock_imports = [name for name in ("lightning", "torchmetrics") if importlib.util.find_spec(name) is None]
napoleon_use_param = False
napoleon_use_ivar = True
