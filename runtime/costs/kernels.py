"""The kernels that a compiler makes of a program, guessed from what JAX traces: which values need room, and which are
computed where they are used.

The rules, which hold for most programs:

- What is computed element by element, and what only moves elements, is computed by the kernel that uses it. It needs
  room if a product, a loop, a collective or the end of the program takes it. On a TPU, products compute it, too.
- What a product gives goes through what is computed of it element by element, as far as all of that ends in one value.
- What is computed twice of the same is computed once. What nobody needs is left out.
- A loop needs room for what its turns carry and stack, and for the most that a turn needs.
- Of what a collective gives, and everyone rounds, the rounded is kept; on a GPU also of what a product gives.
- On a GPU, all arrays that begin with the same number are filled in at once. Products compute what is computed of one
  array alone.
- On a TPU, float32 that only products use, which round it, is kept as bfloat16; so are stacks of loops whose turns do
  that. What is reduced besides is reduced by the kernel that rounds it. What several kernels use is written down, if
  each would read four times as much to compute it; numbers that are repeated are filled in for each. Products that
  choose between a few numbers keep by what they choose. What convolutions give is tiled along images and channels. Sums
  of replicas lie where their parts lay.

`runtime.costs.foreseen` asks when each value is there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend import core

from runtime.costs.heap import Span

_FUSED = frozenset(
    "add sub mul div rem neg abs sign max min pow integer_pow square sqrt rsqrt cbrt exp exp2 log expm1 log1p logistic "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc erf_inv lgamma digamma floor ceil "
    "round nextafter clamp add_any and or xor not eq ne lt le gt ge select_n convert_element_type is_finite shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz broadcast_in_dim iota pad concatenate slice rev "
    "dynamic_slice gather transpose reduce_precision bitcast_convert_type threefry2x32 random_bits random_wrap "
    "random_unwrap random_fold_in copy copy_p".split()
)
"""Primitives that compute each element of their result of few others, or move elements."""

_SLOW = frozenset("exp exp2 log expm1 log1p logistic sin cos tan tanh erf erfc pow gather concatenate pad".split())
"""Those of them that GPUs do not append to a product."""

_MOVES = frozenset("transpose slice dynamic_slice gather rev copy copy_p".split())
"""Those of them that give elements of what they take first, and nothing else."""

_VIEWS = frozenset("reshape squeeze expand_dims pvary sharding_constraint layout_constraint stop_gradient".split())
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin cumsum cumprod cummax cummin "
    "reduce_window_sum reduce_window_max reduce_window_min".split()
)
_CONVERSIONS = frozenset({"convert_element_type"})
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = frozenset({"dot_general", _CONVOLUTION})
_ALL_REDUCES = frozenset("psum psum_invariant pmax pmin".split())
_EXCHANGES = _ALL_REDUCES | frozenset("all_gather reduce_scatter all_to_all ppermute".split())
_IN_PLACE = frozenset(
    "dynamic_update_slice scatter scatter-add scatter_add scatter-mul scatter_mul scatter_min scatter_max".split()
)
"""Primitives that overwrite some elements of their first operand."""

_INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""The parameters by which primitives name the one trace that they stand for."""

ROW = 16384
"""So many numbers of a row a GPU reduces and goes on with in one kernel."""

FAR_MORE = 4
"""Where two kernels read four arrays to compute one, fewer bytes are moved if that is written down, and read twice."""

MANY_MORE = 128
"""Of arrays that are so much smaller than what is computed, nobody minds how often they are read."""

Room = Callable[..., int]
"""The bytes of an array: of its shape, the size of an element, and the two dimensions that it is tiled along, if others
are no choice."""


@dataclass(eq=False)
class Value:
    """An array.

    Attributes:
        shape: its shape.
        bytes: the room that it needs; none, in the host's memory.
        maker: what makes it; `None`, of what is given.
        name: what is told of it.
        is_given: whether the program is given it. It is not, if it is a number that is written down.
        again: the array that this is, which XLA is not told: what is computed of it is computed once more.
        waits: the barriers that it is behind: all that each of these is given is there before.
    """

    shape: tuple[int, ...]
    bytes: int
    maker: Step | None = None
    name: str = ""
    is_given: bool = False
    again: Value | None = None
    waits: frozenset[tuple[Value, ...]] = frozenset()

    @property
    def itself(self) -> Value:
        return self.again or self

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        return self.name.partition("[")[0]

    @property
    def is_on_host(self) -> bool:
        return self.elements > 0 and not self.bytes


@dataclass(eq=False)
class Step:
    """A primitive that is carried out.

    Attributes:
        kind: its name.
        taken: what it takes.
        made: what it makes.
        inside: what a turn of a loop, or a branch, needs.
        in_place: what of the taken it may overwrite.
        rounded: what of the taken it rounds before it does anything: products do, and turns of a loop.
    """

    kind: str
    taken: tuple[Value, ...]
    made: tuple[Value, ...]
    inside: Turn = field(default_factory=lambda: Turn(0))
    in_place: tuple[Value, ...] = ()
    rounded: frozenset[Value] = frozenset()

    @property
    def is_fused(self) -> bool:
        return self.kind in _FUSED

    @property
    def is_exchange(self) -> bool:
        """Whether it is a collective."""
        return self.kind in _EXCHANGES


@dataclass(eq=False)
class Kernel:
    """What is carried out at once.

    Attributes:
        step: what gives its results.
        reads: what it reads.
        made: what it makes.
        overwrites: what of the read it may overwrite, if nobody needs that any more.
    """

    step: Step
    reads: tuple[Value, ...]
    made: tuple[Value, ...]
    overwrites: tuple[Value, ...]


@dataclass(frozen=True)
class Turn:
    """What a turn of a loop, or a branch, needs.

    Attributes:
        bytes: the most, besides what it is given.
        rounded: of each that it is given, whether it is rounded before anything is done with it.
        kernels: how many it has.
        spans: the room that it takes, and when.
    """

    bytes: int
    rounded: tuple[bool, ...] = ()
    kernels: int = 0
    spans: tuple[Span, ...] = ()


class Traced:
    """What JAX has traced, without calls: steps in order, each that computes the same as another left out.

    Args:
        platform: what it is for: "tpu", "cuda".
        room: the bytes of an array there.
        most: the most that a trace needs which is carried out as a whole; see `runtime.costs.foreseen`.
        chips: how many share what is traced outside of what each does.
    """

    def __init__(self, platform: str, room: Room, most: Callable[[Any, int, int], Turn], chips: int = 1) -> None:
        self.platform = platform
        self.steps: list[Step] = []
        self._room, self._most, self._chips = room, most, chips
        self._known: dict[Any, tuple[Value, ...]] = {}

    def value(self, aval: Any, name: str = "", along: Sequence[int] | None = None) -> Value:
        """What JAX describes. It is tiled along two dimensions, if they are told."""
        shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)
        size = getattr(dtype, "itemsize", 8)
        on_host = "Host" in str(getattr(aval, "memory_space", ""))
        bytes = 0 if on_host else self._room(shape, size, along) // self._chips
        return Value(shape, bytes, name=f"{dtype}{[*shape]} {name}".rstrip())

    def given(self, jaxpr: Any) -> list[Value]:
        """What a trace is given."""
        found = [self.value(v.aval) for v in jaxpr.invars]
        for value in found:
            value.is_given = True
        return found

    def go_through(self, jaxpr: Any, given: Sequence[Value]) -> list[Value]:
        """Append the steps of a trace. Returns what it gives."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(inner.invars, given, strict=True)) | {v: self.value(v.aval) for v in inner.constvars}

        def read(v: Any) -> Value:
            if not isinstance(v, core.Literal):
                return known[v]
            key = ("literal", str(v.val), str(v.aval))
            return self._known.setdefault(key, (self.value(v.aval),))[0]

        for equation in inner.eqns:
            made = self._equation(equation, tuple(read(v) for v in equation.invars))
            known.update(zip(equation.outvars, made, strict=True))
        return [read(v).itself for v in inner.outvars]

    def _equation(self, equation: Any, taken: tuple[Value, ...]) -> Sequence[Value]:
        kind, params = equation.primitive.name, equation.params
        if kind == "cond" and (platforms := params.get("branches_platforms")):
            there = (i for i, names in enumerate(platforms) if names is None or self.platform in names)
            return self.go_through(params["branches"][next(there)], taken[1:])
        if kind in _VIEWS or (kind == "broadcast_in_dim" and _is_product_of_same_size(taken[0], equation.outvars[0])):
            return taken[: len(equation.outvars)]
        if kind == "optimization_barrier":
            barrier = tuple(value.itself for value in taken)
            return [replace(value, again=value.itself, waits=value.waits | {barrier}) for value in taken]
        if kind not in ("scan", "while", "cond"):
            for name in _INLINED:
                if name in params:
                    inner = params[name]
                    count = len(getattr(inner, "jaxpr", inner).invars)
                    outside = self._chips
                    self._chips = 1 if kind == "shard_map" else outside
                    results = self.go_through(inner, taken[-count:] if count else ())
                    self._chips = outside
                    return results
        if kind in ("add", "add_any"):
            for one, other in (taken, taken[::-1]):
                step = one.maker
                if step is not None and step.kind in ("scatter-add", "scatter_add") and _is_zero(step.taken[0]):
                    kind, taken, params = step.kind, (other, *step.taken[1:]), {}  # it is added to the other at once
                    break
        if kind == "gt" and self.platform == "cuda" and _is_of_convolution(taken[0], taken[1]):
            taken = (taken[0].maker.taken[0], taken[1])  # type: ignore[union-attr]  # max(x, c) > c is x > c
        key = None
        if kind in _FUSED or kind in _REDUCTIONS or kind in _PRODUCTS:
            told = tuple((name, str(value)) for name, value in params.items() if "jaxpr" not in name)
            avals = tuple(str(v.aval) for v in (*equation.invars, *equation.outvars))
            key = (kind, tuple(map(id, taken)), avals, told)
            if key in self._known:
                return self._known[key]
        waits = frozenset[tuple[Value, ...]]().union(*(value.waits for value in taken))
        taken = tuple(value.itself for value in taken)
        name = str(equation.source_info.name_stack)
        along = params["dimension_numbers"].out_spec[:2] if kind == _CONVOLUTION else None  # images, and channels
        made = tuple(self.value(v.aval, name, along) for v in equation.outvars)
        step = Step(kind, taken, made)
        for value in made:
            value.maker, value.waits = step, waits
        if kind == "scan":
            consts, carried = params["num_consts"], params["num_carry"]
            turn = self._most(params["jaxpr"], consts, carried)
            step.inside, step.in_place = turn, step.taken[consts : consts + carried]
            exact = {value for value, rounds in zip(step.taken, turn.rounded, strict=True) if not rounds}
            step.rounded = frozenset(step.taken) - exact
        elif kind == "while":
            others = params["cond_nconsts"] + params["body_nconsts"]
            step.in_place = step.taken[others:]
            step.inside = self._most(params["body_jaxpr"], params["body_nconsts"], len(step.in_place))
        elif kind == "cond":
            step.inside = max((self._most(branch, 0, 0) for branch in params["branches"]), key=lambda turn: turn.bytes)
        elif kind in _PRODUCTS:
            step.rounded = frozenset(() if "HIGH" in str(params["precision"]) else step.taken)
        elif kind in _IN_PLACE:
            step.in_place = step.taken[:1]
        elif kind in _ALL_REDUCES and self.platform == "tpu":
            step.in_place = step.taken
        self.steps.append(step)
        if key is not None:
            self._known[key] = made
        return made


def _is_product_of_same_size(value: Value, made: Any) -> bool:
    """Whether it is what a product gives, and only dimensions of one element are added to it."""
    return value.maker is not None and value.maker.kind in _PRODUCTS and value.elements == math.prod(made.aval.shape)


def _is_of_convolution(value: Value, least: Value) -> bool:
    """Whether it is what a convolution gives, and at least this. (Products compute that where they read it.)"""
    step = value.maker
    if step is None or step.kind != "max" or step.taken[1] is not least:
        return False
    source = _before_transposes(step.taken[0]).maker
    return source is not None and source.kind == _CONVOLUTION


def _is_zero(value: Value) -> bool:
    """Whether it is made of a number that is written down; nobody scatters into another one than zero."""
    value = _before_repeating(value)
    return value.maker is None and not value.is_given


def kernels_of(traced: Traced, given_back: Iterable[Value]) -> list[Kernel]:
    """The kernels, in the order of the program.

    Args:
        traced: the program.
        given_back: what it gives.
    """
    results = set(given_back)
    steps = list(_needed(traced.steps, results))
    users = _users(steps)
    is_tpu = traced.platform == "tpu"
    there = {value for value in results if value.maker is not None}
    if not is_tpu:
        there.update(step.made[0] for step in steps if _is_distance(step) and len(users[step.made[0]]) > 1)
    for step in steps:
        if not step.is_fused:
            there.update(step.made)
            if step.kind not in _REDUCTIONS and not (is_tpu and step.kind in _PRODUCTS):
                there.update(v for v in (_read_by(step, taken) for taken in step.taken) if v.maker is not None)
    barriers = {barrier for step in steps for value in step.made for barrier in value.waits}
    for barrier in barriers:
        if any(value.is_on_host for value in barrier):  # before what is fetched
            there.update(value for value in barrier if value.maker is not None)
    rounding = {step for step in steps if step.is_exchange or (step.kind in _PRODUCTS and not is_tpu)}
    there.update(kept for value in [*there] if value.maker in rounding and (kept := _rounded(value, users)) is not None)
    order = {step: number for number, step in enumerate(steps)}
    alone = set() if is_tpu else {_CONVOLUTION}  # GPUs carry it out by a library, to which nothing is appended
    products = [step for step in steps if step.kind in _PRODUCTS - alone]
    ends = {step: _end(step.made[0], users, order, results) for step in products}

    def is_computed_there(value: Value) -> bool:
        """Whether one product uses it, and nothing else: a TPU computes it there."""
        return is_tpu and len(users[value]) == 1 and all(step.kind in _PRODUCTS for step in users[value])

    there.update(end for end in ends.values() if end is not None and not is_computed_there(end))
    if is_tpu:
        for step, end in ends.items():
            if step.kind == _CONVOLUTION and end is not None and end.dtype == step.made[0].dtype:
                end.bytes = step.made[0].bytes  # it is laid out in the same way
        _write_down(steps, there, users)
        there.update(_masks(products))
        _narrow(there, users, results)
    made = [step for step in steps if not step.is_fused or not there.isdisjoint(step.made)]
    reads = _Reads(there)
    found = {step: _kernel(step, reads) for step in made}
    if not is_tpu:
        _keep_rows(found)
        _fill_at_once(found)
    _append_to_products(found, ends, results, is_tpu)
    kernels = [*found.values()]
    return _fill_for_each(kernels, results) if is_tpu else kernels


def _write_down(steps: Iterable[Step], there: set[Value], users: Mapping[Value, Mapping[Step, None]]) -> None:
    """Write down what several use, if it is computed of so much that to compute it again would move more bytes."""
    reads = _Reads(there)
    for step in steps:
        (value, *_) = step.made
        if step.is_fused and value not in there and len(users.get(value, ())) > 1:
            if sum(each.bytes for each in reads.of([value])) >= FAR_MORE * value.bytes:
                there.add(value)


def _masks(products: Iterable[Step]) -> Iterator[Value]:
    """By what products choose between a few numbers, repeated: that is kept, and what it was computed of is not."""
    for product in products:
        for step in (_before_transposes(value).maker for value in product.taken):
            if step is not None and step.kind == "select_n":
                mask, *cases = step.taken
                if all(MANY_MORE * _before_repeating(case).elements <= mask.elements for case in cases):
                    yield mask


def rounded(traced: Traced, given: Sequence[Value], results: Iterable[Value]) -> tuple[bool, ...]:
    """Of each that a trace is given, whether it is rounded before anything is done with it."""
    back = set(results)
    users = _users(_needed(traced.steps, back))
    return tuple(_is_rounded(value, users, back) for value in given)


def _users(steps: Iterable[Step]) -> Mapping[Value, Mapping[Step, None]]:
    """The steps that take each value, in order."""
    users: defaultdict[Value, dict[Step, None]] = defaultdict(dict)
    for step in steps:
        for value in step.taken:
            users[value][step] = None
    return users


def _narrow(there: Iterable[Value], users: Mapping[Value, Mapping[Step, None]], results: Set[Value]) -> None:
    """Have float32 numbers lie as bfloat16, if that is what all make of them who use them; but for what collectives
    give, which round nothing, and what comes from the host."""
    for value in there:
        is_sent = value.maker is not None and (value.maker.is_exchange or value.maker.kind == "device_put")
        if value.dtype == "float32" and not is_sent and _is_rounded(value, users, results):
            value.bytes //= 2


def _is_rounded(value: Value, users: Mapping[Value, Mapping[Step, None]], results: Set[Value]) -> bool:
    """Whether all that use a value round it, also after it was moved. What makes it may reduce it, too."""
    rounds = [False] if value in results else []
    for step in users.get(value, {}):
        if step.kind in _MOVES and step.taken[0] is value:
            rounds.append(_is_rounded(step.made[0], users, results))
        elif not _is_only_reduced(step, users, results):
            rounds.append(value in step.rounded)
    return any(rounds) and all(rounds)


def _is_only_reduced(step: Step, users: Mapping[Value, Mapping[Step, None]], results: Set[Value]) -> bool:
    """Whether a step reduces, or all that is computed of what it makes, element by element, is reduced in the end."""
    if step.kind in _REDUCTIONS:
        return True
    if not step.is_fused or not results.isdisjoint(step.made):
        return False
    return all(_is_only_reduced(user, users, results) for value in step.made for user in users.get(value, {}))


def _rounded(value: Value, users: Mapping[Value, Mapping[Step, None]]) -> Value | None:
    """A value rounded to fewer bytes, if nobody wants it otherwise: that is kept then."""
    after = [*users.get(value, {})]
    if len(after) != 1:
        return None
    (step,) = after
    return step.made[0] if step.kind == "convert_element_type" and step.made[0].bytes < value.bytes else None


def _needed(steps: Sequence[Step], results: Iterable[Value]) -> Iterator[Step]:
    """The steps that somebody needs, in order."""
    needed: set[Step] = set()
    waiting = [value.maker for value in results]
    while waiting:
        step = waiting.pop()
        if step is not None and step not in needed:
            needed.add(step)
            waiting += [value.maker for value in step.taken]
    return (step for step in steps if step in needed)


def _is_distance(step: Step) -> bool:
    """Whether it is the distance of numbers from the largest of their row, which GPUs compute by a kernel of its own:
    the beginning of a softmax."""
    if step.kind != "sub" or not step.made[0].shape or step.made[0].shape[-1] > ROW:
        return False
    numbers, largest = step.taken
    while largest.maker is not None and largest.maker.kind in ("broadcast_in_dim", "max", "copy"):
        largest = largest.maker.taken[-1]
    return largest.maker is not None and largest.maker.kind == "reduce_max" and largest.maker.taken[0] is numbers


def _before_transposes(value: Value) -> Value:
    while value.maker is not None and value.maker.kind == "transpose":
        value = value.maker.taken[0]
    return value


def _read_by(step: Step, value: Value) -> Value:
    """What is read where a step is given a value. Products transpose, and compute what is computed of one array alone,
    if they need not read more for that; libraries of convolutions convert."""
    absorbed = {"dot_general": _FUSED, _CONVOLUTION: _CONVERSIONS}.get(step.kind)
    while absorbed is not None:
        value = _before_transposes(value)
        if value.maker is None or value.maker.kind not in absorbed:
            break
        arrays = [v for v in value.maker.taken if not _is_number(v)]
        if len(arrays) != 1 or arrays[0].elements != value.elements or arrays[0].bytes > value.bytes:
            break
        (value,) = arrays
    return value


def _before_repeating(value: Value) -> Value:
    """The array that is repeated along dimensions."""
    while value.maker is not None and value.maker.kind in ("broadcast_in_dim", "convert_element_type"):
        (value, *_) = value.maker.taken
    return value


def _is_number(value: Value) -> bool:
    """Whether it is one number, in however many elements."""
    return _before_repeating(value).elements == 1


def _end(
    product: Value, users: Mapping[Value, Mapping[Step, None]], order: Mapping[Step, int], results: set[Value]
) -> Value | None:
    """The last value that all goes through which is computed of a product; `None`, if that is the product."""
    found = None
    open_, left = {product}, 64  # what is open has users that were not looked at; more steps are not worth the time
    while left := left - 1:
        value = min(open_, key=lambda v: -1 if v.maker is None else order[v.maker])
        after = users.get(value, {})
        if not after or value in results:
            return found
        if not all(step.is_fused and step.made[0].elements == product.elements for step in after):
            return found
        open_ = (open_ - {value}) | {step.made[0] for step in after}
        if len(open_) == 1:
            (last,) = open_
            found = last if last.bytes <= (found or product).bytes else found
    return found


@dataclass
class _Reads:
    """What is read where a value is asked for: the value, if it is there, or what it is computed of."""

    there: set[Value]
    known: dict[Value, tuple[Value, ...]] = field(default_factory=dict)

    def of(self, values: Iterable[Value]) -> tuple[Value, ...]:
        """What is read for values, each once."""
        return tuple(dict.fromkeys(found for value in values for found in self._of_one(value)))

    def _of_one(self, value: Value) -> tuple[Value, ...]:
        if value.maker is None or value in self.there:
            return (value,)
        waiting = [value]
        while waiting:  # not by recursion: chains are long
            last = waiting[-1]
            assert last.maker is not None
            inner = [v for v in last.maker.taken if v.maker is not None and v not in self.there]
            new = [v for v in inner if v not in self.known]
            if new:
                waiting += new
                continue
            waiting.pop()
            parts = ((v,) if v.maker is None or v in self.there else self.known[v] for v in last.maker.taken)
            self.known[last] = tuple(dict.fromkeys(found for part in parts for found in part))
        return self.known[value]


def _kernel(step: Step, reads: _Reads) -> Kernel:
    found = reads.of(step.taken)
    return Kernel(step, found, step.made, found if step.is_fused else reads.of(step.in_place))


def _keep_rows(kernels: Mapping[Step, Kernel]) -> None:
    """Have no kernel overwrite the rows that it reduces, too: one kernel does both, if nobody else uses what a row is
    reduced to."""
    readers: defaultdict[Value, list[Kernel]] = defaultdict(list)
    for kernel in kernels.values():
        for value in kernel.reads:
            readers[value].append(kernel)

    def is_of_rows(rows: Value, reduction: Kernel) -> bool:
        (made, *_) = reduction.made
        return all(each.made[0].elements in (rows.elements, made.elements) for each in readers[made])

    for kernel in kernels.values():
        makers = (value.maker for value in kernel.reads)
        before = [kernels[step] for step in makers if step is not None and step.kind in _REDUCTIONS]
        pairs = ((v, other) for other in before for v in other.reads if v.shape and v.shape[-1] <= ROW)
        reduced = {v for v, other in pairs if is_of_rows(v, other)}
        kernel.overwrites = tuple(value for value in kernel.overwrites if value not in reduced)


def _fill_at_once(kernels: Mapping[Step, Kernel]) -> None:
    """Have one kernel fill all arrays that are alike: one for each time that such an array is overwritten."""
    filled = {kernel.made[0]: kernel for kernel in kernels.values() if not any(map(_is_computed, kernel.reads))}
    taken = set[Value]()
    for kernel in kernels.values():
        alike, own = [value for value in kernel.step.in_place if value in filled], list[Value]()
        for value in alike:
            own.append(replace(value) if value in taken else value)
            filled[value].made += tuple({own[-1]} - {value})
            taken.add(value)
        kernel.reads = tuple(dict.fromkeys((*(v for v in kernel.reads if v not in alike), *own)))
        kernel.overwrites = tuple(dict.fromkeys((*(v for v in kernel.overwrites if v not in alike), *own)))


def _fill_for_each(kernels: Sequence[Kernel], results: Set[Value]) -> list[Kernel]:
    """Have arrays of numbers that are written down made right before they are used, for each that uses them."""
    numbers = (kernel for kernel in kernels if not any(map(_is_computed, kernel.reads)))
    fills = {kernel.made[0]: kernel for kernel in numbers if results.isdisjoint(kernel.made)}
    found = list[Kernel]()
    for kernel in kernels:
        if kernel.made and kernel.made[0] in fills:
            continue
        own = {value: replace(value) for value in kernel.reads if value in fills}
        found += [replace(fills[value], made=(new,)) for value, new in own.items()]
        kernel.reads = tuple(own.get(value, value) for value in kernel.reads)
        kernel.overwrites = tuple(own.get(value, value) for value in kernel.overwrites)
        found.append(kernel)
    return found


def _is_computed(value: Value) -> bool:
    """Whether it is anything else than a number that is written down."""
    return value.maker is not None or value.is_given


def _append_to_products(
    kernels: dict[Step, Kernel], ends: Mapping[Step, Value | None], results: set[Value], is_tpu: bool
) -> None:
    """Have products go on with what is computed of their results, and of these alone."""
    users: defaultdict[Value, list[Kernel]] = defaultdict(list)
    for kernel in kernels.values():
        for value in kernel.reads:
            users[value].append(kernel)
    for step in ends:
        product, (made,) = kernels[step], step.made
        if made in results or len(users[made]) != 1:
            continue
        (after,) = users[made]
        if not after.step.is_fused or after.made[0].elements != made.elements:
            continue
        if not is_tpu and _is_slow(after.step, after.reads):
            continue
        after.reads = tuple(dict.fromkeys((*product.reads, *(v for v in after.reads if v is not made))))
        after.overwrites = ()
        for value in product.reads:
            users[value] = [after if kernel is product else kernel for kernel in users[value]]
        del kernels[step]


def _is_slow(step: Step, reads: Sequence[Value]) -> bool:
    """Whether something slow is between what a kernel reads and what it makes."""
    waiting, seen = [step], {step}
    while waiting:
        last = waiting.pop()
        if last.kind in _SLOW:
            return True
        makers = [v.maker for v in last.taken if v not in reads and v.maker is not None]
        new = [maker for maker in makers if maker not in seen]
        waiting += new
        seen.update(new)
    return False
