"""Building blocks of option groups: settings declared with default, validation and effect.

`poptorch.options` declares them; its methods only store. Checks, `repr`, freezing, copies, and the page of all options
are derived from the declarations.
"""

from __future__ import annotations

import copy
import difflib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self, get_type_hints

NO_EFFECT = "no effect here"
"""Effect text of settings that affect only speed, memory or scheduling of the original hardware."""


@dataclass(eq=False)
class Setting:
    """Setting of a group, declared in its class body: `device_iterations: int = setting(1, ...)`.

    Values lie in the `__dict__` of each group, where they stand before this declaration.

    Args:
        default: initial value; each group has its own copy.
        effect: effect in a sentence, or `NO_EFFECT`, with a reason if there is one.
        setter: method that sets it.
        kind: accepted types; by default that of the default, or those annotated if the default is `None`.
        valid: predicate for values of these types.
        expects: these values, in words.
        error: error for invalid values.
        make: function that returns the initial value in place of `default`, for settings from the environment.
        default_text: description of the default, for the page of all options; by default "unset" for `None`.
        words: a sentence that programs look for in the error; it comes first.
        of_the_run: whether it depends on the machine, for example by naming a folder: saved models do not contain it.
    """

    default: Any
    effect: str
    setter: str
    kind: Any = None
    valid: Callable[[Any], bool] | None = None
    expects: str = ""
    error: type[Exception] = AssertionError
    make: Callable[[], Any] | None = None
    default_text: str = ""
    words: str = ""
    of_the_run: bool = False

    def __post_init__(self) -> None:
        self.kind = self.kind or (None if self.default is None else type(self.default))
        self.default_text = self.default_text or (_default_text_of(self.default) if self.make is None else "")

    def initial(self) -> Any:
        """Initial value of a new group."""
        return copy.deepcopy(self.default) if self.make is None else self.make()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self._owner = name, owner

    def check(self, value: Any, owner: str) -> None:
        """Raise an error unless this setting of group `owner` accepts the value."""
        kind = self.kind or get_type_hints(self._owner)[self.name]
        if isinstance(value, kind) and (self.valid is None or self.valid(value)):
            return
        expected = self.expects or in_words(kind)
        words = f"{self.words} " * bool(self.words)
        raise self.error(f"{words}{owner}.{self.setter}: `{self.name}` is {value!r}; expected {expected}.")


def _default_text_of(default: Any) -> str:
    if default is None:
        return "unset"
    return default.name if isinstance(default, Enum) else repr(default)


setting: Any = Setting  # of any type, so that a class can say which type its values have


class Group:
    """Nested option group, declared in a class body; each object owns one instance.

    Args:
        kind: class of the group.
        says: description in a sentence.
    """

    def __init__(self, kind: type[OptionsDict], says: str) -> None:
        self.kind = kind
        self.__doc__ = says

    def __set_name__(self, owner: type, name: str) -> None:
        self.kind._called = f"{owner.__name__}.{name}"


group: Any = Group


class OptionsDict:
    """Named settings with defaults, optionally frozen.

    Settings are read as attributes. Objects with the same settings are equal. Setting an unknown name raises
    `AttributeError`, setting a value of another type raises `AssertionError`.

    Args:
        default_values: settings, where they differ from their defaults.
    """

    _frozen: bool
    _called = ""  # name of a nested group in messages

    def __init__(self, **default_values: Any) -> None:
        vars(self)["_frozen"] = False
        for name, declared in self._declared().items():
            vars(self)[name] = declared.initial() if isinstance(declared, Setting) else declared.kind()
        self._set(**default_values)

    @classmethod
    def _declared(cls) -> dict[str, Setting | Group]:
        """Settings and groups declared by this class and its base classes, base classes first."""
        return {
            name: declared
            for above in reversed(cls.__mro__)
            for name, declared in vars(above).items()
            if isinstance(declared, (Setting, Group))
        }

    def _values(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self._declared()}

    def _set(self, **values: Any) -> Self:
        """Validate all given settings, then set them."""
        self._check(**values)
        vars(self).update({name: _copy_setting(value) for name, value in values.items()})
        return self

    def _check(self, **values: Any) -> None:
        if self._frozen:
            raise AttributeError(
                "Can't modify frozen Options: a model or a data loader uses them. Change a copy, `options.clone()`, "
                "and wrap the model again."
            )
        declared, own = self._declared(), self._called or type(self).__name__
        for name, value in values.items():
            known = declared.get(name)
            if not isinstance(known, Setting):
                near = difflib.get_close_matches(name, declared)
                hint = f"; did you mean {' or '.join(near)}?" if near else "."
                raise AttributeError(f"{own} has no setting {name!r}{hint}")
            known.check(value, own)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # a subclass, with methods of its own
            object.__setattr__(self, name, value)
            return
        self._set(**{name: value})

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}: the setting {name!r} can't be deleted.")

    def _mark(self, frozen: bool) -> None:
        vars(self)["_frozen"] = frozen
        for value in self._values().values():
            if isinstance(value, OptionsDict):
                value._mark(frozen)

    def exists(self, name: str) -> bool:
        """Whether a setting of this name exists.

        Example:
            >>> import poptorch
            >>> poptorch.Options().Training.exists("gradient_accumulation")
            True
        """
        return isinstance(self._declared().get(name), Setting)

    def update(self, other: Mapping[str, Any]) -> Self:
        """Update settings from a dictionary by name, in `toDict` format.

        Raises:
            AttributeError: if there is no setting of a name, or the options are frozen. Nothing is set then.
            AssertionError: if a value is of another type than the setting has.

        Example:
            >>> import poptorch
            >>> poptorch.Options().Training.update({"gradient_accumulation": 4}).gradient_accumulation
            4
        """
        return self._set(**other)

    def toDict(self) -> dict[str, Any]:
        """Settings by name.

        Example:
            >>> import poptorch
            >>> poptorch.Options().Training.toDict()["gradient_accumulation"]
            1
        """
        return {name: _copy_setting(value) for name, value in self._values().items()}

    def freeze(self) -> None:
        """Reject further changes. Users of options freeze them, to preserve the values used."""
        self._mark(True)

    def clone(self) -> Self:
        """An unfrozen deep copy."""
        cloned = copy.deepcopy(self)
        cloned._mark(False)
        return cloned

    def _adopt(self, other: OptionsDict) -> None:
        """Copy settings from `other`, of the same class; group objects keep their identity."""
        for name, value in other._values().items():
            if isinstance(self._declared()[name], Group):
                vars(self)[name]._adopt(value)
            else:
                vars(self)[name] = value

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]  # they change

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"


def _copy_setting(value: Any) -> Any:
    """Copy of a value, independent of later changes by its user; unfrozen for settings."""
    if isinstance(value, OptionsDict):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def positive(value: int) -> bool:
    """Whether a number is positive."""
    return value > 0


def strings(value: Iterable[object]) -> bool:
    """Whether all values are strings."""
    return all(isinstance(each, str) for each in value)


def table(group: type[OptionsDict], title: str, path: str) -> str:
    """Markdown table of a group's settings: name, setter, default, effect."""
    settings = [declared for declared in group._declared().values() if isinstance(declared, Setting)]
    rows = [f"| `{s.name}` | `{path}{s.setter}` | {_cell(s.default_text)} | {_sentence(s.effect)} |" for s in settings]
    heading = [f"## {title}", "", "| setting | set by | default | effect here |", "|---|---|---|---|"]
    return "\n".join(heading + rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    text = _cell(textwrap.dedent(text))
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def in_words(kind: Any) -> str:
    """Description of acceptable types for error messages."""
    kinds = getattr(kind, "__args__", None) or (kind if isinstance(kind, tuple) else (kind,))
    return "a value of " + " or ".join("None" if each is type(None) else each.__name__ for each in kinds)
