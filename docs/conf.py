"""The site: Sphinx over the pages of this repository where they lie, and the API reference. `docs/build` builds it."""

import builtins
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import reference  # noqa: E402

from popxl.base.version import VERSION  # noqa: E402

project = "PopXL for JAX"
copyright = "the PopXL for JAX authors"
release = VERSION

root_doc = "README"
include_patterns = [
    "README.md", "CHANGELOG.md", "docs/**.md", "tutorials/*/README.md", "popxl/README.md", "runtime/README.md",
    "popxl_addons/README.md", "poptorch/*.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "dist", "tests", "*.egg-info"]

extensions = ["myst_parser"]
myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = project
html_copy_source = False

CONTENTS = """

```{toctree}
:hidden:
:caption: Begin here

docs/jax
docs/pytorch
docs/popxl-programs
docs/models
docs/extending
docs/running
docs/checking
docs/memory
docs/scaling
docs/works
docs/performance
docs/targets
docs/costs
docs/time
```

```{toctree}
:hidden:
:caption: Tutorials

TUTORIALS
```

```{toctree}
:hidden:
:caption: Reference

docs/api/index
poptorch/OPERATORS
poptorch/OPTIONS
CHANGELOG
```

```{toctree}
:hidden:
:caption: Inside

docs/contributing
docs/terms
popxl/README
runtime/README
popxl_addons/README
poptorch/README
```
"""


def with_contents(app, docname, source) -> None:
    """The contents of the site hang on README.md, which is not to show them where it is read as a file."""
    if docname == root_doc:
        folders = sorted(ROOT.glob("tutorials/*/README.md"), key=lambda path: int(path.parent.name.partition("_")[0]))
        names = [str(path.relative_to(ROOT).with_suffix("")) for path in folders]
        source[0] += CONTENTS.replace("TUTORIALS", "\n".join(names))


def unlink_builtins(app, doctree) -> None:
    """Python's own types have no page here: Sphinx would link `bytes` to an attribute of that name, if there is one."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["refdomain"] == "py" and hasattr(builtins, link["reftarget"]):
            link.replace_self(nodes.Text(link["reftarget"]))


def write_first_page(app, problem) -> None:
    """Browsers and servers look for `index.html`."""
    if problem is None and app.builder.name == "html":
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app) -> None:
    app.connect("config-inited", lambda app, config: reference.write(ROOT / "docs" / "api") and None)
    app.connect("source-read", with_contents)
    app.connect("doctree-read", unlink_builtins)
    app.connect("build-finished", write_first_page)
