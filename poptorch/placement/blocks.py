"""Model annotations: blocks, name scopes, attributes, multi-convolutions.

They change the context of the capture in progress (`poptorch.placement.capture_context`), and have no effect outside of
captures.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, update_wrapper
from types import MethodType, TracebackType
from typing import Any, Self, TypeVar

import torch

from poptorch.base.patching import patched
from poptorch.enums import MultiConvPlanType
from poptorch.errors import Error
from poptorch.placement.capture_context import CaptureContext, current
from poptorch.placement.strategies import BlockId
from poptorch.settings.setting import NO_EFFECT, OptionsDict, setting

Layer = TypeVar("Layer", bound=Callable[..., Any])


class _Scope:
    """A `with` statement that annotates captured operations."""

    def _open(self, ambient: CaptureContext) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        ambient = current()
        opened = nullcontext() if ambient is None else self._open(ambient)
        opened.__enter__()
        vars(self).setdefault("_opened", []).append(opened)
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        vars(self)["_opened"].pop().__exit__(type, value, traceback)


class Block(_Scope, torch.nn.Module):
    """A model block: all operations inside the `with` statement run on one unit, in one stage.

    Args:
        user_id: id of the block, by which stages list it; the next number, `"0"`, `"1"`, ..., if None. Blocks with one
            id are one block; a number is the same as its string.
        ipu_id: unit of the block, if its stage does not define one.

    Raises:
        AssertionError: if the id is not a string or number, or the unit no number from 0.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         with Block("first", ipu_id=0):
        ...             x = x + 1
        ...         with Block("second", ipu_id=1):
        ...             return x * 2
        >>> Model()(torch.ones(2))
        tensor([4., 4.])
    """

    def __init__(self, user_id: BlockId | int | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        _check_ids("Block", user_id, ipu_id)
        self._user_id = user_id
        self._ipu_id = ipu_id

    def _open(self, ambient: CaptureContext) -> AbstractContextManager[Any]:
        return ambient.block(_as_string(self._user_id), self._ipu_id)

    @staticmethod
    def start(user_id: BlockId | int | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one begins; for the arguments see the class."""
        _check_ids("Block.start", user_id, ipu_id)
        if (ambient := current()) is not None:
            ambient.begin_block(_as_string(user_id), ipu_id)

    @staticmethod
    def useAutoId() -> None:
        """Restart automatic block ids at `"0"`; call this at the top of `forward`."""
        if (ambient := current()) is not None:
            ambient.number_blocks_anew()


def _as_string(user_id: BlockId | int | None) -> BlockId | None:
    return None if user_id is None else str(user_id)


def _check_ids(what: str, user_id: object, ipu_id: object) -> None:
    if not (user_id is None or isinstance(user_id, (str, int))) or isinstance(user_id, bool):
        raise AssertionError(
            f"{what}: `user_id` is {user_id!r}; expected a string, a number or None. A unit is given as `ipu_id`."
        )
    if not (ipu_id is None or (isinstance(ipu_id, int) and ipu_id >= 0)):
        raise AssertionError(f"{what}: `ipu_id` is {ipu_id!r}; expected the number of a unit, from 0, or None.")


class _Mark:
    """Block marker of a function; or of a module, as its forward-pre-hook. A class, so that both support pickling.

    Args:
        ends: whether the block ends with the module or function; `end` is the forward-hook. Otherwise it lasts until
            the next one begins.
    """

    def __init__(self, user_id: BlockId | int | None, ipu_id: int | None, ends: bool) -> None:
        self.ends = ends
        self._ids, self._block = (user_id, ipu_id), Block(user_id, ipu_id)

    def __call__(self, *module_and_inputs: object) -> None:
        if self.ends:
            self._block.__enter__()
        else:
            Block.start(*self._ids)

    def end(self, *module_inputs_and_result: object) -> None:
        """End the block."""
        self._block.__exit__(None, None, None)

    def __str__(self) -> str:
        user_id, ipu_id = self._ids
        return f"{'BlockFunction' if self.ends else 'BeginBlock'}(user_id={user_id}, ipu_id={ipu_id})"


class _Annotated:
    """A function with a block. A class, so that modules referencing it support copying and pickling."""

    def __init__(self, function: Callable[..., Any], mark: _Mark) -> None:
        update_wrapper(self, function)
        self._arguments = function, mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, mark = self._arguments
        mark()
        try:
            return function(*args, **kwargs)
        finally:
            if mark.ends:
                mark.end()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # as functions in a class are methods

    def __reduce__(self) -> Any:
        function, _ = self._arguments
        name = getattr(function, "__qualname__", "")
        target: Any = sys.modules.get(getattr(function, "__module__", None) or "")
        for part in name.split("."):
            target = getattr(target, part, None)
        return name if target is self else (type(self), self._arguments)  # where it decorates, it has the name

    def __repr__(self) -> str:
        function, mark = self._arguments
        return f"{mark} {function!r}"


def _hooks(module: torch.nn.Module) -> dict[int, _Mark]:
    """Block hooks of this module itself, by hook key; at most one."""
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _Mark)}


def _check_without_block(what: str, module: torch.nn.Module) -> None:
    if _hooks(module):
        raise Error(
            f"{what}: the {type(module).__name__} module has already been assigned to a block. Remove that first, with "
            "`poptorch.removeBlocks(module)`."
        )


def BeginBlock(layer_to_call: Layer, user_id: BlockId | int | None = None, ipu_id: int | None = None) -> Layer:
    """Begin a block with a module; subsequent operations belong to it until the next block.

    Parameters and the state dictionary of the module keep their names; copies and pickles keep the block.
    Forward-pre-hooks that were registered earlier run outside the block.

    Args:
        layer_to_call: the module; or a function, for which a function is returned.
        user_id: the id of the block; see `Block`.
        ipu_id: the unit of the block.

    Returns:
        The module itself; or a function that begins the block and then calls the one given.

    Raises:
        Error: if the module begins a block already, or is neither a module nor callable.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> _ = BeginBlock(model[1], "second", ipu_id=1)
        >>> print(model)
        Sequential(
          (0): Linear(in_features=3, out_features=4, bias=True)
          (1): BeginBlock(user_id=second, ipu_id=1) Linear(in_features=4, out_features=2, bias=True)
        )
    """
    _check_ids("BeginBlock", user_id, ipu_id)
    mark = _Mark(user_id, ipu_id, ends=False)
    if isinstance(layer_to_call, torch.nn.Module):
        _check_without_block("BeginBlock", layer_to_call)
        layer_to_call.register_forward_pre_hook(mark)
        return layer_to_call
    if not callable(layer_to_call):
        raise Error(f"BeginBlock: `layer_to_call` is {layer_to_call!r}; expected a module or a function.")
    return _Annotated(layer_to_call, mark)  # type: ignore[return-value]


def BlockFunction(user_id: BlockId | int | None = None, ipu_id: int | None = None) -> Callable[[Layer], Layer]:
    """Decorator that turns all operations of a function into a block; arguments as for `Block`.

    A module is unchanged, with the same parameters; copies and pickles of it keep the block.

    Example:
        >>> @BlockFunction("decoder", ipu_id=1)
        ... def decode(x):
        ...     return x + 1
        >>> decode(2)
        3
    """
    _check_ids("BlockFunction", user_id, ipu_id)

    def decorate(function: Layer) -> Layer:
        mark = _Mark(user_id, ipu_id, ends=True)
        if not isinstance(function, torch.nn.Module):
            return _Annotated(function, mark)  # type: ignore[return-value]
        _check_without_block("BlockFunction", function)
        function.register_forward_pre_hook(mark)
        function.register_forward_hook(mark.end, always_call=True)
        return function

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Remove `BeginBlock` and `BlockFunction` hooks from a module and its submodules.

    Example:
        >>> import torch
        >>> layer = BeginBlock(torch.nn.ReLU(), ipu_id=1)
        >>> removeBlocks(layer)
        >>> print(layer)
        ReLU()
    """
    for each in module.modules():
        for key in _hooks(each):
            del each._forward_pre_hooks[key]
        for key in [key for key, hook in each._forward_hooks.items() if _is_end(hook)]:
            del each._forward_hooks[key]
            each._forward_hooks_always_called.pop(key)


def _is_end(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), _Mark)


def module_repr(m: torch.nn.Module) -> str:
    """Text representation of a module with blocks: `BeginBlock(user_id=..., ipu_id=...)` precedes class names.

    Example:
        >>> import torch
        >>> module_repr(BeginBlock(torch.nn.ReLU(), "A", ipu_id=1))
        'BeginBlock(user_id=A, ipu_id=1) ReLU()'
    """
    with ExitStack() as stack:
        for module in m.modules():
            for hook in _hooks(module).values():
                # torch's own text asks each module for its name, so overrides of subclasses are kept
                name = partial(str, f"{hook} {module._get_name()}")
                stack.enter_context(patched(vars(module), _get_name=name))
        return repr(m)


def print(*values: object, **how: Any) -> None:
    """Python's `print`, with modules formatted by `module_repr`."""
    shown = (module_repr(value) if isinstance(value, torch.nn.Module) else value for value in values)
    builtins.print(*shown, **how)


class NameScope(_Scope):
    """Name prefix for operations inside the `with` statement.

    Args:
        name: the name.

    Raises:
        AssertionError: if it is not a string.

    Example:
        >>> with NameScope("attention"):
        ...     y = 1 + 2
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionError(f"NameScope: `name` is {name!r}; expected a string.")
        self._name = name

    def _open(self, ambient: CaptureContext) -> AbstractContextManager[Any]:
        return ambient.named(self._name)


class Attribute(_Scope):
    """Attributes for operations inside the `with` statement.

    Args:
        kwargs: dictionaries from names to strings, numbers or bools.

    Raises:
        ValueError: if one is something else.

    Example:
        >>> with Attribute(__outline={"layer": "embedding"}):
        ...     y = 1 + 2
    """

    def __init__(self, **kwargs: dict[str, str | int | float | bool]) -> None:
        for name, values in kwargs.items():
            if not isinstance(values, dict) or not all(
                isinstance(key, str) and isinstance(value, (str, int, float, bool)) for key, value in values.items()
            ):
                raise ValueError(
                    f"Attribute: `{name}` is {values!r}; expected a dictionary from names to strings, numbers or bools."
                )
        self._attributes = {name: dict(values) for name, values in kwargs.items()}

    def _open(self, ambient: CaptureContext) -> AbstractContextManager[Any]:
        return ambient.attributed(self._attributes)


def _single_or_sequence(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Validator for one value, or a list or tuple of values."""
    return lambda given: all(map(valid, given if isinstance(given, (list, tuple)) else [given]))


def _ignored(by: str, expects: str, valid: Callable[[Any], bool], words: str = "") -> Any:
    return setting(None, NO_EFFECT, by, kind=object, valid=valid, expects=expects, words=words)


class MultiConv(_Scope, OptionsDict):
    """Merge convolutions inside the `with` statement into one multi-convolution, which may run them concurrently.

    These settings never change a number. A scope holds at least one convolution, and no other such scope: otherwise the
    capture ends with an `Error`.

    Example:
        >>> import torch
        >>> convolution, x = torch.nn.Conv1d(1, 1, 3), torch.ones(1, 1, 5)
        >>> with MultiConv().planType(MultiConvPlanType.Serial):
        ...     y, z = convolution(x), convolution(2 * x)
    """

    available_memory_proportions: float | list[float] | None = _ignored(
        "availableMemoryProportions",
        "a number from 0 to below 1, or one for each convolution",
        _single_or_sequence(lambda value: isinstance(value, (int, float)) and 0 <= value < 1),
    )
    cycle_back_off: float | None = _ignored(
        "cycleBackOff", "a number from 0 to 1", lambda value: isinstance(value, (int, float)) and 0 <= value <= 1
    )
    conv_dithering: bool | list[bool] | None = _ignored(
        "enableConvDithering",
        "a bool, or one for each convolution",
        _single_or_sequence(lambda value: isinstance(value, bool)),
    )
    partials_types: torch.dtype | list[torch.dtype] | None = _ignored(
        "partialsTypes",
        "torch.float or torch.half, or one of them for each convolution",
        _single_or_sequence(lambda value: value in (torch.float, torch.half)),
        words="Invalid partials types.",
    )
    per_conv_reserved_tiles: int | None = _ignored(
        "perConvReservedTiles", "a number of tiles", lambda value: isinstance(value, int) and value >= 0
    )
    plan_type: MultiConvPlanType | None = _ignored(
        "planType", "a poptorch.MultiConvPlanType", lambda value: isinstance(value, MultiConvPlanType)
    )

    def __init__(self) -> None:
        super().__init__()

    def _open(self, ambient: CaptureContext) -> AbstractContextManager[Any]:
        return ambient.multi_conv()

    def availableMemoryProportions(self, value: float | list[float]) -> Self:
        """Memory proportion for temporary values, from 0 to below 1; one value, or one per convolution."""
        return self._set(available_memory_proportions=value)

    def cycleBackOff(self, value: float) -> Self:
        """Proportion of extra cycles that a plan may spend on saving memory, from 0 to 1."""
        return self._set(cycle_back_off=value)

    def enableConvDithering(self, value: bool | list[bool]) -> Self:
        """Enable layout of convolutions from different tiles; one value, or one per convolution."""
        return self._set(conv_dithering=value)

    def partialsTypes(self, value: torch.dtype | list[torch.dtype]) -> Self:
        """Accumulation dtype, `torch.float` or `torch.half`; one value, or one per convolution.

        Raises:
            AssertionError: if it is another.
        """
        return self._set(partials_types=value)

    def perConvReservedTiles(self, value: int) -> Self:
        """Number of tiles reserved per convolution."""
        return self._set(per_conv_reserved_tiles=value)

    def planType(self, value: MultiConvPlanType) -> Self:
        """Parallel or serial execution of convolutions."""
        return self._set(plan_type=value)
