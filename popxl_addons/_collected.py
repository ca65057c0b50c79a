"""State of a module while its graph is built: factories, placeholders, stashed tensors, gradients of called graphs.

Submodules are linked, not copied: additions of a child appear in the parent under the child's name. Everything but
these links is dropped at the end of the build.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import popxl
from popxl.transforms import GradGraphInfo
from popxl_addons.build_grad import Aux, VarGrad
from popxl_addons.grad_info import CalledGraphs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

_placeholders_of_build: ContextVar[list[popxl.Tensor]] = ContextVar("_placeholders_of_build")
"""Registry of placeholders that modules of a build add to graphs."""


@dataclass(frozen=True)
class BuildResult:
    """Result of one build, independent of later module changes."""

    factories: NamedVariableFactories
    args: NamedTensors
    aux: dict[Any, Any]
    called_graphs_grad_info: dict[popxl.Graph, GradGraphInfo]


class BuildState:
    """Collections of one module, linked to submodules."""

    def __init__(self) -> None:
        self.factories = NamedVariableFactories()
        self.args = NamedTensors()
        self.aux = Aux()
        self.var_grad = VarGrad()
        self.called_graphs = CalledGraphs()
        self._children: dict[str, BuildState] = {}

    def link(self, name: str, child: BuildState) -> None:
        """Show all that `child` collects, now or later, under `name`. `ValueError` if the name is taken."""
        self.factories.insert(name, child.factories)
        self.args.insert(name, child.args)
        self.called_graphs.add_submap(child.called_graphs)
        self._children[name] = child

    @overload
    def add(self, name: str | int, recipe: VariableFactory, overwrite: bool = False) -> popxl.Tensor: ...
    @overload
    def add(self, name: str | int, recipe: NamedVariableFactories, overwrite: bool = False) -> NamedTensors: ...
    def add(
        self, name: str | int, recipe: VariableFactory | NamedVariableFactories, overwrite: bool = False
    ) -> popxl.Tensor | NamedTensors:
        """Register a factory, or copied factory tree, under `name`, with placeholders in the current graph."""
        head, _, rest = str(name).partition(".")
        if rest and overwrite and head in self._children:
            return self._children[head].add(rest, recipe, overwrite)  # a merge here would cut the link to the child
        self.factories.insert(name, recipe.copy() if isinstance(recipe, NamedVariableFactories) else recipe, overwrite)
        placeholders = _placeholders(recipe)
        added = [placeholders] if isinstance(placeholders, popxl.Tensor) else placeholders.values_flat()
        _placeholders_of_build.get([]).extend(added)
        self.args.insert(name, placeholders, overwrite)
        return placeholders

    @contextmanager
    def build_scope(self) -> Iterator[None]:
        """Start fresh collections, including submodules, and restore previous ones afterwards.

        A module that is built in the midst of its parent's build neither finds nor leaves anything there.
        """
        before = {collected: dict(vars(collected)) for collected in self._walk()}
        self._start_anew()
        token = _placeholders_of_build.set([])
        try:
            yield
        finally:
            _placeholders_of_build.reset(token)
            self._start_anew()  # for submodules that the build has assigned
            for collected, contents in before.items():
                vars(collected).update(contents)

    def unnamed(self, graph: popxl.Graph) -> list[popxl.Tensor]:
        """Placeholders of this build in `graph` without a name."""
        named = {*self.args.values_flat()}
        return [t for t in _placeholders_of_build.get() if t.graph is graph and t not in named]

    def result(self) -> BuildResult:
        """Copy of current collections."""
        return BuildResult(
            self.factories.copy(), self.args.copy(), self.aux.to_dict(), self.called_graphs.consolidate()
        )

    def _walk(self) -> Iterator[BuildState]:
        yield self
        for child in self._children.values():
            yield from child._walk()

    def _start_anew(self) -> None:
        """Forget everything but the links, here and in all submodules."""
        links = {collected: collected._children for collected in self._walk()}
        for collected in links:
            vars(collected).update(vars(BuildState()))
        for collected, children in links.items():
            for name, child in children.items():
                collected.link(name, child)


def _placeholders(recipe: VariableFactory | NamedVariableFactories) -> popxl.Tensor | NamedTensors:
    if isinstance(recipe, VariableFactory):
        return recipe.create_input()
    return NamedTensors.from_dict({name: factory.create_input() for name, factory in recipe.to_dict().items()})
