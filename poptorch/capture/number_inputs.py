"""Program inputs for numbers that `forward` updates, in place of the arguments of ops with these numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.base.host_numbers import HostNumbers, Number, NumberPath, Operand
from poptorch.capture.counters import COUNTER_TYPES, Counter, Tape, as_python
from poptorch.capture.torch_private import without_modes
from poptorch.capture.trace import Data, Node, Trace, Value

_OTHER = ("other",)
_FILLED = ("fill_value", "value")

_CARRYING: dict[str, Collection[str]] = {
    **dict.fromkeys((f"aten.{name}" for name in "add sub rsub".split()), ("other", "alpha")),
    **dict.fromkeys((f"aten.{name}" for name in "mul div floor_divide remainder fmod".split()), _OTHER),
    **dict.fromkeys((f"aten.{name}" for name in "eq ne lt le gt ge".split()), _OTHER),
    **dict.fromkeys((f"aten.{name}" for name in "full full_like new_full fill fill_ masked_fill".split()), _FILLED),
    **dict.fromkeys((f"aten.{name}" for name in "clamp clamp_min clamp_max".split()), ("min", "max")),
    "aten.pow": ("input", "exponent"),
    "aten.scalar_tensor": ("s",),
    "aten.lerp": ("weight",),
    "torch.dropout": ("p",),
}
"""Op arguments that may be constants or program inputs."""


def holds_counters(arguments: Any) -> bool:
    """Whether any arguments, nested ones included, are counters."""
    return any(type(each) is Counter for each in pytree.tree_leaves(arguments))


def with_numbers(call: Callable[[Any, Any], Any], args: Any, kwargs: Any, trace: Trace, is_nested: bool) -> Any:
    """Call a PyTorch function with placeholder numbers for counters; recorded ops receive program inputs instead.

    Args:
        is_nested: whether it is called within another function.
    """
    counters: dict[Number, Counter] = {}

    def number(each: Any) -> Any:
        if type(each) is not Counter:
            return each
        if each.__class__ is bool:
            return bool(each)
        stand_in = each.tape.stand_in(each)
        counters[stand_in] = each
        return stand_in

    count = len(trace.nodes)
    with_stand_ins = pytree.tree_map(number, (args, kwargs))
    try:
        results = call(*with_stand_ins)
    except Exception:  # any error: plain numbers may work
        for counter in counters.values():
            counter.tape.refused |= counter.tape.sources([counter])
        raise
    nodes = trace.nodes[count:]
    for stand_in, counter in counters.items():
        uses = list(_number_arguments(nodes, stand_in))
        if is_nested or not uses or any(key not in _CARRYING.get(node.op, ()) for node, key in uses):
            counter.tape.refuse(counter)
        for node, key in uses:
            counter.tape.slots[_slot(node, key, type(stand_in) is float)] = (counter.index,)
    if counters:
        for node in nodes:
            node.buffers = None
    return results


def _number_arguments(nodes: Iterable[Node], number: Number) -> Iterator[tuple[Node, str]]:
    """Op arguments that contain a number. A scalar constant with this number becomes a fill op."""
    for node in nodes:
        data = node.arguments.get("data")
        if isinstance(data, Data) and _contains_number(number, data.tensor):
            if data.tensor.dim() == 0:
                _fill(node)
                yield node, "fill_value"
            else:
                yield node, "data"
            continue
        for key, argument in node.arguments.items():
            if any(type(leaf) is type(number) and leaf == number for leaf in pytree.tree_leaves(argument)):
                yield node, key


def _contains_number(number: Number, tensor: torch.Tensor) -> bool:
    with without_modes():
        return bool((tensor == torch.tensor(number, dtype=tensor.dtype)).any())


def _fill(node: Node) -> None:
    """Convert a scalar constant into an op that fills a tensor with its number."""
    node.op, node.overload, node.arguments = _as_fill_op(node)


def _as_fill_op(node: Node) -> tuple[str, str, dict[str, Any]]:
    """Op name, overload and arguments of a node; a scalar constant is expressed as `aten.full`."""
    data = node.arguments.get("data")
    if isinstance(data, Data) and data.tensor.dim() == 0:
        with without_modes():
            return "aten.full", "default", {"size": [], "fill_value": data.tensor.item()}
    return node.op, node.overload, node.arguments


def _slot(node: Node, key: str, is_float: bool) -> Value:
    """Replace a numeric op argument by a new program input; returns this input."""
    floats = is_float or all(result.dtype.is_floating_point for result in node.results)
    slot = Value((), torch.float32 if floats else torch.int64, requires_grad=False)
    node.arguments = {**node.arguments, key: slot}
    return slot


def merge_captures(
    plain: Trace, captures: Sequence[tuple[Tape, Trace]], problems: Sequence[NumberPath]
) -> tuple[HostNumbers, list[Value]] | None:
    """Merge captures for all choices: host numbers, and program inputs for them; `None` unless these captures differ in
    numbers alone.

    The first trace becomes that of all.

    Args:
        plain: the function, captured with numbers.
        captures: the function, captured with counters: first as Python chooses in the first run.
        problems: the paths on which it raises something.
    """
    (first, trace), *_ = captures
    as_plain = _Comparison(first.slots, {}).positions(trace, plain)
    found_positions = [_Comparison(first.slots, tape.slots).positions(trace, other) for tape, other in captures]
    if as_plain is None or any(each is None for each in found_positions):
        return None
    if not all(_operands_equal(node.op, first.number(a), b) for node, _, a, b in as_plain):
        return None
    slots, rows, dtypes = list[Value](), list[list[Operand]](), list[str]()
    for alternatives in zip(*(each or () for each in found_positions), strict=True):
        node, key, first_operand, _ = alternatives[0]
        row = [operand for *_, operand in alternatives]
        if not isinstance(first_operand, tuple) and all(_operands_equal(node.op, first_operand, each) for each in row):
            continue
        kinds = {type(tape.number(operand)) for (tape, _), operand in zip(captures, row, strict=True)}
        if not isinstance(first_operand, tuple):
            _fill(node)
            _slot(node, key, float in kinds)
        slot = node.arguments[key]
        if bool in kinds:
            slot.dtype = torch.bool
        elif float in kinds:
            slot.dtype = torch.float32
        if slot.dtype is torch.bool and len(kinds) > 1:
            return None
        slots.append(slot)
        rows.append(row)
        dtypes.append({torch.bool: "bool", torch.float32: "float32"}.get(slot.dtype, "int32"))
    paths = [tape.path([row[i] for row in rows]) for i, (tape, _) in enumerate(captures)]
    return HostNumbers(first.first, [*paths, *problems], dtypes), slots


def _operands_equal(op: str, one: Operand, other: Operand) -> bool:
    """Whether two operands are equal numbers, up to float32 rounding where ops may store float32."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        return False
    if op in ("aten.full", "poptorch.constant"):
        return abs(one - other) <= 2.0**-24 * abs(one)
    return type(one) is type(other) and one == other


class _Comparison:
    """Comparison of two traces: they are to differ in numeric arguments alone.

    Args:
        slots, other_slots: operands of number inputs in each trace.
    """

    def __init__(self, slots: Mapping[Value, Operand], other_slots: Mapping[Value, Operand]) -> None:
        self._slots, self._other_slots = slots, other_slots
        self._counterparts: dict[int, Value] = {}

    def positions(self, trace: Trace, other: Trace) -> list[tuple[Node, str, Operand, Operand]] | None:
        """Numeric arguments that inputs may replace: node, argument name, and operands from both traces.

        `None` if the traces differ in more than that.
        """
        positions: list[tuple[Node, str, Operand, Operand]] = []
        if not self._pair(trace.inputs, other.inputs) or len(trace.nodes) != len(other.nodes):
            return None
        for node, other_node in zip(trace.nodes, other.nodes, strict=True):
            op, overload, arguments = _as_fill_op(node)
            other_op, other_overload, other_arguments = _as_fill_op(other_node)
            if (op, overload, arguments.keys()) != (other_op, other_overload, other_arguments.keys()):
                return None
            for key, argument in arguments.items():
                other_argument = other_arguments[key]
                a, b = _operand(argument, self._slots), _operand(other_argument, self._other_slots)
                if key in _CARRYING.get(op, ()) and all(type(each) in (tuple, *COUNTER_TYPES) for each in (a, b)):
                    positions.append((node, key, a, b))
                elif not self._all_equal(*(pytree.tree_leaves(each) for each in (argument, other_argument))):
                    return None
            if not self._pair(node.results, other_node.results):
                return None
        return positions if self._all_equal(trace.outputs, other.outputs) else None

    def _pair(self, values: list[Value], others: list[Value]) -> bool:
        """Make values counterparts of others. Returns whether all are alike."""
        self._counterparts.update((id(a), b) for a, b in zip(values, others, strict=False))
        return [(a.shape, a.dtype) for a in values] == [(b.shape, b.dtype) for b in others]

    def _all_equal(self, arguments: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(arguments) == len(others) and all(map(self._equal, arguments, others))

    def _equal(self, argument: Any, other: Any) -> bool:
        if isinstance(argument, Value):
            return isinstance(other, Value) and self._counterparts.get(id(argument)) is other
        if isinstance(argument, Trace) and isinstance(other, Trace):
            return argument.is_like(other) and self._all_equal(argument.outer, other.outer)
        if isinstance(argument, torch.Tensor) or isinstance(other, torch.Tensor):
            return argument is other
        return type(argument) is type(other) and Trace.capture_key(argument) == Trace.capture_key(other)


def _operand(argument: Any, slots: Mapping[Value, Operand]) -> Any:
    """Operand of an input for numbers; a number as Python's; other arguments unchanged."""
    return slots.get(argument, argument) if isinstance(argument, Value) else as_python(argument)
