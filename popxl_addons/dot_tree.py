"""An ordered tree with string keys: the structure of every named collection in this package.

Inner nodes are trees, leaves are anything else, and ``"enc.w"`` is the *flat name* of the leaf ``w`` below ``enc``. The
specific collections (`NamedTensors`, `NamedVariableFactories`, …) only add operations on their leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from types import UnionType
from typing import Any, Generic, TypeVar

from popxl.extend.arguments import check_type
from popxl_addons.utils import OrderedDict, duplicate_items

L = TypeVar("L")
K = TypeVar("K")
V = TypeVar("V")
CLS = TypeVar("CLS", bound="DotTree[Any]")

Key = str | int


class DotTree(Generic[L]):
    """A tree whose leaves are reached by attribute, by key, or by dotted path. Levels keep insertion order.

    A component of a key is an identifier (keywords included) or a number; ``tree[0]`` and ``tree["0"]`` are the same
    entry. Attributes and methods of the class win over entries of that name: read those as ``tree["keys"]``.
    ``tree.w = value`` replaces an entry ``w``; where there is none, it is a plain attribute.

    Example:
        >>> t = DotTree.from_dict({"enc.w": 1, "enc.b": 2, "head": 3})
        >>> t.enc.w, t["enc.b"], t.get("head"), "enc.c" in t
        (1, 2, 3, False)
        >>> t
        DotTree({
        enc.w: 1,
        enc.b: 2,
        head: 3,
        })
    """

    _map: dict[str, Any]

    def __init__(self, /, **entries: Any):
        self._map = {}
        for key, value in entries.items():
            self.insert(key, value)

    @classmethod
    def from_dict(cls: type[CLS], d: Mapping[Any, Any]) -> CLS:
        """A tree of the entries of `d`, in its order. Dotted keys make nested trees; values may be trees themselves.

        `ValueError` for an invalid or repeated key, `AttributeError` for a key below a leaf.

        Example:
            >>> DotTree.from_dict({0: "a", "x.y": "b"}).keys()
            ['0', 'x']
        """
        check_type(d, Mapping, f"{cls.__name__}.from_dict: `d`", "a mapping from names to values")
        tree = cls()
        branches: dict[tuple[str, ...], DotTree[Any]] = {(): tree}  # created here, so safe to change

        def branch(path: tuple[str, ...]) -> DotTree[Any]:
            if path not in branches:
                parent, name = branch(path[:-1]), path[-1]
                given = parent._map.get(name, cls())
                if not isinstance(given, DotTree):
                    raise AttributeError(
                        f"{cls.__name__}.from_dict: '{'.'.join(path)}' is a leaf, so nothing can be put below it."
                    )
                branches[path] = given.copy()
                parent.insert(name, branches[path], overwrite=True)
            return branches[path]

        for key, value in d.items():
            *path, name = _text(key).split(".")
            branch(tuple(path)).insert(name, value)
        return tree

    @classmethod
    def pack(cls: type[CLS], keys: Iterable[Key], values: Iterable[Any]) -> CLS:
        """``from_dict(dict(zip(keys, values)))``: the inverse of `unpack`. The longer argument is cut.

        Example:
            >>> DotTree.pack(["w", "b"], [1, 2]).w
            1
        """
        check_type(keys, Iterable, f"{cls.__name__}.pack: `keys`", "a list of names")
        check_type(values, Iterable, f"{cls.__name__}.pack: `values`", "a list of values")
        return cls.from_dict(dict(zip(keys, values, strict=False)))

    # Reading

    def get(self, key: Key) -> Any:
        """Leaf or subtree at `key`, possibly a dotted path.

        A negative number counts back from the largest numeric key: with entries 0, 1, 3, ``get(-1)`` is entry 3 and
        ``get(-2)``, entry 2, is missing. `KeyError` if there is no such entry. A path only leads through trees of one
        class: take a step at a time, or attributes, into a tree of another.

        Example:
            >>> DotTree.from_dict({"a.b": 1}).get("a.b")
            1
        """
        if isinstance(key, Integral) and key < 0:
            key = self._from_the_end(key)
        head, dot, rest = _text(key).partition(".")
        if head not in self._map:
            loops = " Loops go over `values_flat()` or `to_dict().items()`." if isinstance(key, Integral) else ""
            raise KeyError(f"{type(self).__name__}: there is no '{head}' here; available keys: {self.keys()}.{loops}")
        value = self._map[head]
        if not dot:
            return value
        if not isinstance(value, type(self)):
            what = f"a {type(value).__name__}, which is asked by itself" if isinstance(value, DotTree) else "a leaf"
            raise KeyError(f"{type(self).__name__}: '{head}' is {what}, so there is no '{rest}' below it.")
        return value.get(rest)

    def _from_the_end(self, key: int) -> int:
        numbers = [int(name) for name in self._map if name.isdecimal()]
        if not numbers:
            raise ValueError(f"{type(self).__name__}: {key} counts from the largest number, but no key is a number.")
        position = max(numbers) + 1 + key
        if position < 0:
            raise KeyError(f"{type(self).__name__}: {key} points before entry 0; available keys: {self.keys()}.")
        return position

    __getitem__ = get

    def __getattr__(self, name: str) -> Any:
        if name == "_map":  # looked up by `copy` and `pickle` before it exists
            raise AttributeError(f"{type(self).__name__} has not been initialised.")
        try:
            return self.get(name)
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__} has no attribute or entry '{name}'; its keys are {self.keys()}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        # Otherwise `tree.w = x` would hide the entry `w` for attribute access only.
        if name in vars(self).get("_map", ()) and not hasattr(type(self), name):
            self.insert(name, value, overwrite=True)
        else:
            super().__setattr__(name, value)

    def __contains__(self, key: Key) -> bool:
        try:
            self.get(key)
        except KeyError:
            return False
        return True

    def keys(self) -> list[str]:
        """The keys of this level."""
        return list(self._map)

    def values(self) -> list[Any]:
        """Leaves and subtrees of this level."""
        return list(self._map.values())

    def len(self) -> int:
        """Number of entries at this level."""
        return len(self._map)

    def keys_flat(self) -> list[str]:
        """The flat names of all leaves, depth first, each level in the order of insertion: the order of `values_flat`.

        `unpack`, and `tensors` of `NamedTensors`, are sorted instead; ``to_dict().items()`` are pairs.
        """
        return list(self.to_dict())

    def values_flat(self) -> list[L]:
        """All leaves in `keys_flat` order."""
        return list(self.to_dict().values())

    def len_flat(self) -> int:
        """The number of leaves."""
        return len(self.to_dict())

    def to_dict(self) -> OrderedDict[str, L]:
        """Flat name → leaf, depth first.

        Example:
            >>> dict(DotTree.from_dict({"a.c": 1, "a.b": 2}).to_dict())
            {'a.c': 1, 'a.b': 2}
        """
        return OrderedDict(self._leaves())

    def _leaves(self) -> Iterator[tuple[str, L]]:
        for key, value in self._map.items():
            if isinstance(value, DotTree):
                yield from ((f"{key}.{name}", leaf) for name, leaf in value._leaves())
            else:
                yield key, value

    def unpack(self) -> Any:
        """Flat names and leaves, both sorted by flat name (as plain text, so ``"a.z" < "a1"``).

        Example:
            >>> names, leaves = DotTree.from_dict({"b": 1, "a.x": 2}).unpack()
            >>> names, leaves
            (('a.x', 'b'), (2, 1))
        """
        leaves = self.to_dict()
        return zip(*((name, leaves[name]) for name in sorted(leaves)), strict=True) if leaves else ([], [])

    def to_mapping(self, values: DotTree[V]) -> dict[L, V]:
        """Map own leaves to equally named leaves of `values`.

        Example:
            >>> DotTree.from_dict({"a": "x", "b": "y"}).to_mapping(DotTree.from_dict({"b": 1, "c": 2}))
            {'y': 1}
        """
        return to_mapping(self, values)

    # Writing

    def insert(self, key: Key, value: Any, overwrite: bool = False) -> None:
        """Put a leaf or tree at `key`; a tree is kept by reference.

        A dotted key goes into the subtree; `overwrite` is needed if that exists, and merges. The subtree is copied and
        replaced only on success, so a failure changes nothing, and older references to it do not see the new entry. It
        keeps its class. With a key of one component `overwrite` replaces the old entry. `ValueError` for an invalid or
        present key.

        Example:
            >>> t = DotTree(blk=DotTree(w=1))
            >>> t.insert("blk.b", 2, overwrite=True)
            >>> t.keys_flat()
            ['blk.w', 'blk.b']
        """
        if isinstance(key, Integral) and key < 0:
            raise ValueError(f"{type(self).__name__}.insert: key {key} is negative; numeric keys start from 0.")
        head, dot, rest = _text(key).partition(".")
        if head in self._map and not overwrite:
            raise ValueError(
                f"{type(self).__name__}.insert: '{head}' already exists. "
                "Choose another name, or pass `overwrite=True` to replace it or to merge below it."
            )
        if not (head.isnumeric() or head.isidentifier()):
            raise ValueError(
                f"{type(self).__name__}.insert: '{head}' in key '{key}' is neither an identifier nor a number. "
                "`popxl_addons.dot_tree.sanitise` makes one of any text."
            )
        if dot:
            existing = self._map.get(head)
            branch = existing.copy() if isinstance(existing, DotTree) else type(self)()
            branch.insert(rest, value, overwrite)
            value = branch
        self._map[head] = value

    def update(self, values: DotTree[Any], overwrite: bool = False) -> None:
        """Insert a copy of each top-level entry of `values`, in order. With `overwrite` present entries are replaced.

        Entries before one that fails stay.

        Example:
            >>> t = DotTree(a=1)
            >>> t.update(DotTree(b=2))
            >>> t.keys()
            ['a', 'b']
        """
        if not isinstance(values, DotTree):
            raise TypeError(
                f"{type(self).__name__}.update: `values` is a {type(values).__name__}, expected a tree. Make one of a "
                f"dictionary with `{type(self).__name__}.from_dict`."
            )
        for key, value in values.copy()._map.items():
            self.insert(key, value, overwrite)

    def pop(self, key: str) -> Any:
        """Remove and return the leaf or subtree at `key`, in place at every level. The parent stays, even if empty.

        Example:
            >>> t = DotTree.from_dict({"a.b": 1})
            >>> t.pop("a.b"), t.a.len()
            (1, 0)
        """
        if not isinstance(key, str):
            raise AttributeError(f"{type(self).__name__}.pop: the key must be a string, not {key!r}; try pop('{key}').")
        head, dot, rest = key.partition(".")
        value = self.get(head)
        if not dot:
            return self._map.pop(head)
        if not isinstance(value, DotTree):
            raise KeyError(f"{type(self).__name__}.pop: '{head}' is a leaf, so there is no '{rest}' below it.")
        return value.pop(rest)

    def copy(self: CLS) -> CLS:
        """Copy the tree structure, sharing leaves."""
        return self.map(lambda leaf: leaf)

    def filter_keys(self: CLS, keys: Iterable[Key]) -> CLS:
        """Select entries: leaves, or subtrees by reference.

        `ValueError` for a repeated key, `KeyError` for a missing one.

        Example:
            >>> DotTree.from_dict({"a.x": 1, "a.y": 2, "b": 3}).filter_keys(["a.y", "b"]).keys_flat()
            ['a.y', 'b']
        """
        names = [_text(key) for key in keys]
        if repeated := duplicate_items(names):
            raise ValueError(f"{type(self).__name__}.filter_keys: each key can be given once; repeated: {repeated}.")
        return type(self).from_dict({name: self.get(name) for name in names})

    def map(self: CLS, fn: Callable[[L], Any]) -> CLS:
        """A tree of the same class with ``fn(leaf)`` in place of every leaf.

        Example:
            >>> DotTree.from_dict({"a.x": 1, "b": 2}).map(lambda leaf: leaf * 10).values_flat()
            [10, 20]
        """
        tree = type(self)()
        for key, value in self._map.items():
            tree._map[key] = value.map(fn) if isinstance(value, DotTree) else fn(value)
        return tree

    def _clear(self) -> None:
        """Remove all leaves; the subtrees stay, empty."""
        self._map = {key: value for key, value in self._map.items() if isinstance(value, DotTree)}
        for subtree in self._map.values():
            subtree._clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()!r})"


def check_leaves(tree: object, kinds: type | UnionType, what: str, expected: str) -> None:
    """Raise `TypeError` for non-trees and wrong leaf types, naming all.

    Args:
        tree: the argument.
        kinds: the types that its leaves may have.
        what: the function and the name of the argument, as the message begins.
        expected: description of the expected value.
    """
    check_type(tree, DotTree, what, expected)
    leaves = tree.to_dict().items() if isinstance(tree, DotTree) else ()
    odd = [f"`{name}` is {t!r:.80} ({type(t).__name__})" for name, t in leaves if not isinstance(t, kinds)]
    if odd:
        raise TypeError(f"{what} must be {expected}; {', '.join(odd)}.")


def to_mapping(key: DotTree[K], value: DotTree[V]) -> dict[K, V]:
    """Leaf of `key` → leaf of `value` with the same flat name, for the names found in both.

    Example:
        >>> to_mapping(DotTree(a="x", b="y"), DotTree(b=1, c=2))
        {'y': 1}
    """
    values = value.to_dict()
    return {leaf: values[name] for name, leaf in key.to_dict().items() if name in values}


def sanitise(name: str) -> str:
    """Convert `name` to a path component; invalid identifier characters become ``_``.

    Example:
        >>> sanitise("a/b.c 1"), sanitise("1x")
        ('a_b_c_1', '_1x')
    """
    text = "".join(character if f"_{character}".isidentifier() else "_" for character in name)
    return f"_{text}" if text[:1].isdigit() else text


def _text(key: Key) -> str:
    if not isinstance(key, (str, Integral)):
        raise AttributeError(f"DotTree: keys are strings or integers, not {key!r} of type {type(key).__name__}.")
    return str(key)
