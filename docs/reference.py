"""The API reference as Markdown for the site: a page for each public module, made of its docstrings.

Each class and function is documented once, on the first of the pages that has it; later ones refer to it. pdoc finds
what is public. Sphinx makes the pages, so that names link to each other and the search finds them.
"""

import importlib.util
import inspect
import json
import pkgutil
import re
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc
from pydantic_core import PydanticUndefined

PAGES = """
    popxl.ops.collectives popxl.ops.var_updates popxl.ops popxl.transforms popxl.errors popxl.utils popxl.fp8_utils
    popxl popxl.context popxl.op popxl.extend.ops popxl.extend.kernels popxl.extend.graphs popxl.extend.collectives
    popxl.extend.arguments popxl.extend.source popxl.extend.files popxl.extend.processes popxl.extend.sessions
    popxl.extend.targets popxl.extend.memory popxl.extend.jax popxl.extend.pages popxl.options popxl.random_seed
    popxl.tensor popxl.testing popxl.base.log popxl.analysis.estimate popxl.analysis.flops popxl.analysis.memory

    popxl_addons.layers popxl_addons.ops popxl_addons.optimizers popxl_addons.transforms popxl_addons

    runtime runtime.report runtime.timeline runtime.costs.cost runtime.targets.chip

    popart popdist
""".split()
if importlib.util.find_spec("torch") is not None:  # without torch there is no poptorch to be shown
    PAGES += ["poptorch", "poptorch.optim", "poptorch.profiling", "poptorch.testing", "poptorch.lowering.registry"]
ALIASES = {  # what annotations have become, and the names that they had
    "popxl.Tensor | int | float | bool | numpy.ndarray | Iterable[int | float | bool]": "TensorLike",
    "int | float | bool | numpy.ndarray | Iterable[int | float | bool]": "HostScalarTensor",
    "numpy.ndarray[tuple[typing.Any, ...], numpy.dtype[typing.Any]]": "numpy.ndarray",
}
WHOLE = "popxl_addons"  # the package all of whose modules are public, but for those with an underscore

INDEX = """\
# API reference

In the examples `ir` is a small program and `main` its main graph. `graph` is a graph that multiplies `x` by `w`. Other
tensors and streams have the names of what they hold. The tests run these examples; all their names are in
`tests/popxl/test_examples.py`.

| module | |
|---|---|
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
    for page in found.values():
        for member in page.classes:
            if issubclass(member.obj, tuple) and hasattr(member.obj, "_fields"):
                # a named tuple makes its constructor in a namespace without the types that its module names
                member.obj.__new__.__annotations__.update(typing.get_type_hints(member.obj))
            for key in [key for key, each in member.members.items() if each.taken_from[0].split(".")[0] == "torch"]:
                del member.members[key]  # it has pages of its own
            for attribute in member.instance_variables:
                if attribute.default_value is PydanticUndefined:
                    attribute.default_value = pdoc.doc.empty
    tops = list(dict.fromkeys(name.split(".")[0] for name in PAGES))
    return dict(sorted(found.items(), key=lambda item: (tops.index(item[0].split(".")[0]), item[0])))


# Docstrings -----------------------------------------------------------------------------------------------------------

FIELDS = {"Args": "param", "Raises": "raises"}


def markdown(docstring: str) -> str:
    """A docstring with its sections as Sphinx knows them: lists of fields, and examples as code."""
    parts: list[str] = []
    for section, text in sections(inspect.cleandoc(docstring)):
        entries = [entry.partition(":") for entry in re.split(r"\n(?=\S)", text)]
        if section in FIELDS:
            parts.append(
                "\n".join(field(f"{FIELDS[section]} {name.replace(', ', ',')}", about) for name, _, about in entries)
            )
        elif section == "Attributes":
            parts.append(
                "\n".join(["**Attributes**\n", *(f"- `{name}`:{indented(about, 2)}" for name, _, about in entries)])
            )
        elif section == "Returns":
            parts.append(field("returns", text))
        elif section == "Example":
            parts.append(f"**Example**\n\n{with_fences(text)}")
        else:
            parts.append(with_fences(text))
    return "\n\n".join(parts)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Pieces of a docstring, each with the name of its section, or none."""
    name, lines = "", []
    for line in text.split("\n"):
        heading = re.fullmatch(r"(Args|Attributes|Raises|Returns|Example):", line)
        if heading or (name and line and not line.startswith(" ")):  # a section ends where the indentation does
            yield name, inspect.cleandoc("\n" + "\n".join(lines))
            name, lines = (heading[1], []) if heading else ("", [line])
        else:
            lines.append(line)
    yield name, inspect.cleandoc("\n" + "\n".join(lines))


def field(name: str, text: str) -> str:
    """`:param x: text`."""
    return f":{name}:{indented(text, 4)}"


def indented(text: str, spaces: int) -> str:
    """Text that follows on a colon, its other lines so far to the right."""
    return " " + with_fences(inspect.cleandoc(text)).replace("\n", "\n" + spaces * " ")


def with_fences(text: str) -> str:
    """Text in which what Python's prompt shows is a block of code, up to the next empty line."""
    return re.sub(
        r"^( *)>>> .*(?:\n *\S.*)*", lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text, flags=re.M
    )


# Members --------------------------------------------------------------------------------------------------------------


class Writer:
    """Writes members as directives. Types are named as they are documented."""

    def __init__(self, found: dict[str, pdoc.doc.Module]) -> None:
        self.homes = {
            f"{member.obj.__module__}.{member.obj.__qualname__}": member.fullname
            for page in found.values()
            for member in page.classes
        }

    def page(self, name: str, page: pdoc.doc.Module) -> str:
        members = "\n\n".join(self.member(member) for member in page.members.values() if is_public(page, member))
        return f"# `{name}`\n\n{directive('py:module', name)}\n\n{markdown(page.docstring)}\n\n{members}\n"

    def member(self, member: pdoc.doc.Doc, depth: int = 0) -> str:
        options = {"module": member.modulename}
        if isinstance(member, pdoc.doc.Class):
            inside = [each for each in member.own_members if is_public(member, each)]
            made = next((each for each in inside if each.name == "__init__"), None)
            inside = [each for each in inside if each is not made and not said(member, each)]
            signature = self.named(str(made.signature_without_self).partition(" -> ")[0]) if made else ""
            text = [member.docstring, made.docstring if made else ""]
            below = [self.member(each, depth + 1) for each in inside]
            content = "\n\n".join([*(markdown(each) for each in text if each), *below])
            return directive("py:class", f"{member.qualname}{signature}", options, content, 6)
        if isinstance(member, pdoc.doc.Function):
            kind = "py:method" if depth else "py:function"
            if member.is_classmethod or member.is_staticmethod:
                options["classmethod" if member.is_classmethod else "staticmethod"] = ""
            signature = self.named(str(member.signature_without_self if depth else member.signature))
            return directive(kind, f"{member.qualname}{signature}", options, markdown(member.docstring), 5 - depth)
        if member.annotation_str:
            options["type"] = self.named(member.annotation_str.removeprefix(": "))
        if member.default_value_str and not re.match(r"<|.{80}", member.default_value_str):
            options["value"] = member.default_value_str
        kind = "py:attribute" if depth else "py:data"
        return directive(kind, member.qualname, options, markdown(member.docstring), 5 - depth)

    def named(self, text: str) -> str:
        """With each class under the name that its page has."""
        text = re.sub(r"[a-zA-Z_]\w*(\.\w+)+", lambda found: self.homes.get(found[0], found[0]), " ".join(text.split()))
        for long, short in ALIASES.items():
            text = text.replace(long, short)
        return text


def is_public(inside: pdoc.doc.Namespace, member: pdoc.doc.Doc) -> bool:
    """Whether a page shows a member: what `__all__` names, constructors with arguments, what has no underscore."""
    if isinstance(member, pdoc.doc.Module) or member.name == "__doc__":
        return False
    if member.name == "__init__":
        return bool(member.docstring or member.signature_without_self.parameters)
    if member.name in getattr(inside.obj, "__all__", ()):
        return True
    is_bare = isinstance(member, pdoc.doc.Variable) and not (member.docstring or member.annotation_str)
    return not member.name.startswith("_") and (isinstance(inside, pdoc.doc.Class) or not is_bare)


def said(of: pdoc.doc.Class, member: pdoc.doc.Doc) -> bool:
    """Whether the docstring of a class describes a member that has none of its own."""
    return not member.docstring and f"\n    {member.name}:" in f"\n{of.docstring}"


def directive(
    kind: str, argument: str, options: dict[str, str] | None = None, content: str = "", ticks: int = 3
) -> str:
    """A directive of MyST."""
    fence = "`" * ticks
    lines = [
        f":{key}: {json.dumps(value, ensure_ascii=False) if value else ''}" for key, value in (options or {}).items()
    ]
    return "\n".join([f"{fence}{{{kind}}} {argument}", *lines, "", content, fence])


def write(folder: Path) -> dict[str, str]:
    """Write the pages and an index of them; return their texts by name."""
    pdoc.render.configure(docformat="google")
    found = pages()
    with warnings.catch_warnings():  # an annotation may name what is optional: without it, it stands as it is written
        for missing in ("Failed to run TYPE_CHECKING .* named 'torch'", "Error parsing .* name 'torch' is not defined"):
            warnings.filterwarnings("ignore", missing, UserWarning)
        writer = Writer(found)
        texts = {name: writer.page(name, page) for name, page in found.items()}
    rows = [f"| [`{name}`]({name}.md) | {first_sentence(page)} |" for name, page in found.items()]
    contents = "\n".join(["```{toctree}", ":hidden:", "", *found, "```"])
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("*.md"):  # those of modules that are no more
        page.unlink()
    for name, text in {**texts, "index": INDEX + "\n".join(rows) + f"\n\n{contents}\n"}.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return texts


def first_sentence(page: pdoc.doc.Module) -> str:
    """What a module is, for the index."""
    return re.split(r"(?<=\.)\s|\n\n", page.docstring)[0].replace("\n", " ").replace("|", "\\|")
