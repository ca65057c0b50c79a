"""Objects of the user's: those that stand among arguments, and those that are near when a model is captured."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch

# Objects among arguments ----------------------------------------------------------------------------------------------


class _Store(MutableMapping):
    """Attributes of a graph, in a dictionary; it knows the graph, weakly."""

    def __init__(self, graph: Graph, **attributes: Any) -> None:
        self.__dict__["_parent"] = weakref.ref(graph)
        self.__dict__["_mapping"] = attributes

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__["_mapping"]:
            raise AttributeError(name)
        return self._mapping[name]

    def __copy__(self) -> _Store:
        return self

    def rows(self) -> int:
        return self.__dict__["_parent"]().x.shape[0]


class Graph:
    """A graph as packages for them have it: callable, with attributes in a store of its own."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__["_store"] = _Store(self, **attributes)

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__:
            raise RuntimeError("a graph without a store")
        return getattr(self._store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value

    def __copy__(self) -> Graph:
        return self

    def __call__(self, *keys: str) -> Iterator[tuple[str, Any]]:
        return ((key, self._store[key]) for key in keys or self._store)


class _Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 5)

    def forward(self, graph: Graph) -> torch.Tensor:
        begins, ends = graph.edges
        rows = graph._store.rows()
        sums = torch.zeros(rows, 4).index_add(0, ends, graph.x[begins])
        return self.layer(graph.x + sums) * sum(t.float().sum() for _, t in graph("x", "edges"))


def _graph(seed: int) -> Graph:
    torch.manual_seed(seed)
    return Graph(x=torch.randn(3, 4), edges=torch.randint(3, (2, 6)), name="ring")


def test_a_graph_is_taken_apart() -> None:
    torch.manual_seed(0)
    module = _Convolution()
    model = poptorch.inferenceModel(module)
    for seed in range(3):
        torch.testing.assert_close(model(_graph(seed)), module(_graph(seed)))


def test_a_graph_is_changed_and_returned() -> None:
    def forward(graph: Graph) -> Graph:
        graph.x = graph.x * 2
        graph.y = graph.x + 1
        return graph

    for seed in range(2):
        given, expected = _graph(seed), _graph(seed)
        forward(expected)
        result = poptorch.inferenceModel(forward)(given)
        assert result is given and result._store.rows() == 3
        torch.testing.assert_close((given.x, given.y), (expected.x, expected.y))


def test_another_graph_is_told_apart() -> None:
    convolution = _Convolution()
    model = poptorch.inferenceModel(lambda graph: convolution(graph) * len(graph.name))
    model(_graph(0))
    other = _graph(1)
    other.name = "line"
    with pytest.raises(poptorch.Error, match=r"mismatch for graph\._store\._mapping\['name'\]: expected 'ring' but"):
        model(other)


class Scale:
    """An object that is called."""

    def __init__(self, by: torch.Tensor) -> None:
        self.by = by
        self.me = [self]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.me[0].by

    def times(self, n: int, x: torch.Tensor) -> torch.Tensor:
        return n * self(x)


class Equal(Scale):
    """One that compares in a way of its own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = Scale.__hash__


class Slotted(Scale):
    """One that keeps its attributes in slots."""

    __slots__ = ("by",)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.by


@pytest.mark.parametrize(
    "make",
    [
        Scale,
        Equal,
        lambda by: Scale(by).__call__,
        lambda by: functools.partial(torch.mul, by),
        lambda by: functools.partial(torch.lerp, end=by, weight=0.25),
        lambda by: functools.partial(Scale(by).times, 3),
        lambda by: SimpleNamespace(times=by),
        lambda by: Slotted(by),
    ],
    ids=["object", "comparing", "method", "partial", "keywords", "partial method", "namespace", "slots"],
)
def test_what_can_be_called_is_taken_apart(make: Callable[[torch.Tensor], Callable[..., torch.Tensor]]) -> None:
    def forward(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return function(x) + 1 if callable(function) else function.times * x

    model = poptorch.inferenceModel(forward)
    x = torch.arange(3.0)
    for by in (2.0, 5.0):
        function = make(torch.full((3,), by))
        torch.testing.assert_close(model(function, x), forward(function, x))


class Opaque:
    """One without a dictionary: it stands for itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Opaque()"


def test_what_looks_the_same_and_is_another_object() -> None:
    model = poptorch.inferenceModel(lambda x, opaque: x * 2)
    model(torch.ones(2), Opaque())
    with pytest.raises(poptorch.Error, match=r"expected Opaque\(\) but got Opaque\(\) \(another one"):
        model(torch.ones(2), Opaque())


# Objects that are near ------------------------------------------------------------------------------------------------


class _OwnLook(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _Closed:
    """An object that answers nothing."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class _Raising:
    """A key that can neither be compared nor written."""

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __eq__ = __bool__ = __len__ = __repr__  # type: ignore[assignment]


class _OwnContainers(dict):
    def items(self) -> Any:
        raise RuntimeError("items")

    __iter__ = items


class _Near(torch.nn.Module):
    of_class = _Closed()

    def __init__(self, near: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.near = [near]

    def forward(self, x: torch.Tensor, near: Any = None) -> torch.Tensor:
        return self.layer(x) + torch.tensor([1.0, 2.0])


_alive = torch.nn.Linear(2, 2)
_NEAR = {
    "weak proxy": weakref.proxy(_alive),
    "dead proxy": weakref.proxy(torch.nn.Linear(2, 2)),
    "own look": _OwnLook(),
    "closed": _Closed(),
    "raising key": {_Raising(): 1},
    "own containers": _OwnContainers(a=1),
    "half made": torch.nn.Module.__new__(torch.nn.Module),
}


@pytest.mark.parametrize("name", _NEAR)
def test_objects_that_are_near_are_not_asked(name: str) -> None:
    module, x = _Near(_NEAR[name]), torch.ones(4, 3)
    near = None if name in ("own containers", "raising key") else _NEAR[name]  # arguments are taken apart, and named
    torch.testing.assert_close(poptorch.inferenceModel(module)(x, near), module(x))


def test_a_weak_proxy_of_the_module_itself() -> None:
    module, x = _Near(None), torch.ones(4, 3)
    module.near.append(weakref.proxy(module))
    torch.testing.assert_close(poptorch.inferenceModel(module)(x), module(x))


def test_modules_that_look_for_attributes_themselves() -> None:
    class Outer(_OwnLook):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tensor([1.0, 2.0])

    module, x = Outer(), torch.ones(4, 3)
    torch.testing.assert_close(poptorch.inferenceModel(module)(x), module(x))
