#!/usr/bin/env python3
"""Write the API reference from the docstrings, as pages that need no server and no network: `.ci/docs.py [FOLDER]`.

Each class and function is documented once, on the first of the pages that has it; later ones refer to it. What cannot
be shown as it is written is a warning of pdoc's, and an error here.
"""

import importlib.util
import inspect
import pkgutil
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jinja2  # noqa: E402
import pdoc  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

PAGES = """
    popxl.ops.collectives popxl.ops.var_updates popxl.ops popxl.transforms popxl.errors popxl.utils popxl.fp8_utils
    popxl popxl.context popxl.op popxl.options popxl.random_seed popxl.tensor popxl.testing
    popxl.base.log popxl.base.pages popxl.looking.estimate popxl.looking.flops popxl.looking.memory

    popxl_addons.layers popxl_addons.ops popxl_addons.optimizers popxl_addons.transforms popxl_addons

    runtime runtime.report runtime.timeline runtime.costs.cost runtime.targets.chip

    popart popdist
""".split()
if importlib.util.find_spec("torch") is not None:  # without torch there is no poptorch to be shown
    PAGES += ["poptorch", "poptorch.optim", "poptorch.profiling", "poptorch.testing", "poptorch.lowering.registry"]
WHOLE = "popxl_addons"  # the package all of whose modules are public, but for those with an underscore

INDEX = """
{% extends "default/index.html.jinja2" %}
{% block title %}PopXL for JAX{% endblock %}
{% block logo %}{% endblock %}
{% block content %}
    {{ super().replace('<main class="pdoc"></main>', "") }}
    <main class="pdoc"><h1>PopXL for JAX</h1>
    <p>In the examples <code>ir</code> is a small program, <code>main</code> its main graph, <code>graph</code> a graph
    that multiplies <code>x</code> by <code>w</code>, and other tensors and streams have the names of what they hold.
    All names are in <code>tests/popxl/test_examples.py</code>, which runs the examples.</p><ul>
    {% for name, page in all_modules.items() %}
        <li><a href="{{ name.replace(".", "/") }}.html"><code>{{ name }}</code></a>
        {{ page.docstring.partition("\n\n")[0] | to_html | striptags }}</li>
    {% endfor %}
    </ul></main>
{% endblock %}
"""


def pages() -> dict[str, pdoc.doc.Module]:
    """The pages by name."""
    inside = pkgutil.walk_packages(importlib.import_module(WHOLE).__path__, f"{WHOLE}.")
    names = dict.fromkeys([*PAGES, *sorted(module.name for module in inside if "._" not in module.name)])
    homes: dict[int, pdoc.doc.Doc] = {}  # by identity of what is documented
    found = {}
    for name in names:
        page = pdoc.doc.Module.from_name(name)
        if name == "popxl.ops":  # some of its functions are not in `__all__`
            for key, value in inspect.getmembers(page.obj, inspect.isfunction):
                page.members.setdefault(key, pdoc.doc.Function(name, key, value, (name, key)))
        elsewhere, new = [], []
        for key, member in list(page.members.items()):
            if not isinstance(member, pdoc.doc.Class | pdoc.doc.Function):
                continue
            home = homes.setdefault(id(member.obj), member)
            if home.modulename == name:
                new.append(key)
            else:
                del page.members[key]
                elsewhere.append(f"`{home.fullname}`")
        if any(not key.startswith("_") for key in new):
            found[name] = page
            if elsewhere:
                page.docstring += f"\n\nAlso here: {', '.join(elsewhere)}."
    for name, page in found.items():
        page.submodules = [below for below in found.values() if below.modulename.rpartition(".")[0] == name]
        for member in page.classes:
            for key in [key for key, each in member.members.items() if each.taken_from[0].split(".")[0] == "torch"]:
                del member.members[key]  # it has pages of its own
            for attribute in member.instance_variables:
                if attribute.default_value is PydanticUndefined:
                    attribute.default_value = pdoc.doc.empty
    tops = list(dict.fromkeys(name.split(".")[0] for name in PAGES))
    return dict(sorted(found.items(), key=lambda item: (tops.index(item[0].split(".")[0]), item[0])))


def write(folder: Path) -> dict[str, str]:
    """Write the pages, an index of them and an index of words; return the texts of the pages by name."""
    pdoc.render.configure(docformat="google", show_source=False)
    loader = jinja2.DictLoader({"index.html.jinja2": INDEX})
    pdoc.render.env.loader = jinja2.ChoiceLoader([loader, pdoc.render.env.loader])
    found = pages()
    with warnings.catch_warnings():  # an annotation may name what is optional: without it, it stands as it is written
        for missing in ("Failed to run TYPE_CHECKING .* named 'torch'", "Error parsing .* name 'torch' is not defined"):
            warnings.filterwarnings("ignore", missing, UserWarning)
        texts = {name: pdoc.render.html_module(page, found) for name, page in found.items()}
    for name, text in {**texts, "index": pdoc.render.html_index(found)}.items():
        path = folder / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(found), encoding="utf-8")
    return texts


if __name__ == "__main__":
    warnings.simplefilter("error")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    print(f"{len(write(folder))} pages: {folder / 'index.html'}")
