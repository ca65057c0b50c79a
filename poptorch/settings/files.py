"""Options from files and JSON, restricted to calls of option methods.

A line of a file is parsed, never executed: `_value` has the accepted syntax.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ConfigFileError(Exception):
    """Error in a line of an options file. The message contains error type, line text and line number."""


def run_lines(options: object, filepath: str | os.PathLike[str], names: Mapping[str, Any]) -> None:
    """Execute each line of a file as a method call on `options`.

    Args:
        options: object of the calls.
        filepath: the file.
        names: names for arguments, such as `poptorch`.

    Raises:
        ConfigFileError: if a line cannot be parsed, is not a call, or its call fails.
    """
    scope = {**names, "options": options}
    for number, line in enumerate(Path(filepath).read_text(encoding="utf-8").splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            _value(_call(line), scope)
        except Exception as error:  # a line may raise any error of a method; it is reported with the line
            problem = error.msg if isinstance(error, SyntaxError) else error  # which counts lines from this one
            raise ConfigFileError(
                f"{type(error).__name__} at line {number} of {os.fspath(filepath)}: {problem}\n> {line}"
            ) from error


def _call(line: str) -> ast.expr:
    """Parse a line as a method call on `options`."""
    parsed = ast.parse(f"options.{line}", mode="eval").body
    if not isinstance(parsed, ast.Call):
        raise SyntaxError("expected a call of a method of the options, such as `deviceIterations(4)`")
    return parsed


def _value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Evaluate an expression of literals, names in `scope`, their public attributes, and calls of these."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_value(each, scope) for each in node.elts]
        case ast.Tuple():
            return tuple(_value(each, scope) for each in node.elts)
        case ast.Dict():
            keys = [_literal(key) for key in node.keys]
            return dict(zip(keys, (_value(each, scope) for each in node.values), strict=True))
        case ast.UnaryOp(op=ast.USub()):
            return _literal(node)
        case ast.Name():
            if node.id not in scope:
                raise NameError(
                    f"name {node.id!r} is not defined; expected literals, poptorch's enums and constructors"
                )
            return scope[node.id]
        case ast.Attribute(value=ast.Name() | ast.Attribute() | ast.Call()):
            if node.attr.startswith("_") and node.attr != "_Popart":
                raise AttributeError(f"{node.attr!r} is private")
            return getattr(_value(node.value, scope), node.attr)
        case ast.Call(func=ast.Attribute()):
            arguments = [_value(each, scope) for each in node.args]
            keywords = {str(each.arg): _value(each.value, scope) for each in node.keywords if each.arg}
            if len(keywords) < len(node.keywords):
                raise SyntaxError("`**` is not possible here")
            return _value(node.func, scope)(*arguments, **keywords)
    raise SyntaxError(
        f"`{ast.unparse(node)}` is not possible here; expected literals, poptorch's enums and constructors"
    )


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        raise SyntaxError("`**` is not possible here")
    return ast.literal_eval(node)


def run_calls(options: object, text: str, enums: Mapping[str, Any]) -> None:
    """Call methods of `options` named in a JSON object: `{"Training.gradientAccumulation": 4}`.

    Args:
        options: object of the calls.
        text: the JSON object; a list is spread over the arguments.
        enums: enums whose members may be named, by strings such as `"OutputMode.All"`.

    Raises:
        ValueError: if the text is no JSON object.
        AttributeError: if there is no such method.
    """
    try:
        calls = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'Options.from_json: {error}; expected a JSON object, {{"deviceIterations": 4}}.') from error
    if not isinstance(calls, dict):
        raise ValueError(f'Options.from_json: expected a JSON object, {{"deviceIterations": 4}}; it is {text!r}.')
    for path, given in calls.items():
        method: Any = options
        for name in path.split("."):
            if name.startswith("_") and name != "_Popart":
                raise AttributeError(f"Options.from_json: {path!r} is private.")
            method = _named(method, name, f"Options.from_json: {path!r}")
        if not callable(method):
            raise AttributeError(f"Options.from_json: {path!r} is no method; name the one that sets it.")
        method(*(_member(each, enums) for each in (given if isinstance(given, list) else [given])))


def _named(owner: Any, name: str, what: str) -> Any:
    """Attribute requested by a text, with `what` for messages; an `AttributeError` lists alternatives."""
    if not hasattr(owner, name):
        near = list(getattr(owner, "__members__", ())) or difflib.get_close_matches(name, dir(owner))
        hint = f"; expected {' or '.join(near)}." if near else "."
        raise AttributeError(f"{what}: there is no {name!r}{hint}")
    return getattr(owner, name)


def _member(value: Any, enums: Mapping[str, Any]) -> Any:
    """Enum member named by a string; any other value unchanged."""
    kind, dot, member = value.removeprefix("poptorch.").partition(".") if isinstance(value, str) else ("", "", "")
    return _named(enums[kind], member, f"Options.from_json: {value!r}") if dot and kind in enums else value
