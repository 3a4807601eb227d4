"""The documentation site: Sphinx reads the Markdown of this folder and the docstrings of the packages. See `make docs`."""

from __future__ import annotations

import reverb_writer

project = "reverb-writer"
copyright = "The reverb-writer authors"  # noqa: A001  # Sphinx's name
version = release = reverb_writer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist", "linkify"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"reverb-writer {version}"
html_static_path = ["_static"]
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
