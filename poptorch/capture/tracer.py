"""`Tracer`: intercepts PyTorch functions and ops, and records them.

Two modes of PyTorch listen. One hears of each op, after PyTorch has worked out dtypes, broadcasting and autograd; one,
above it, of the functions that are better kept whole: losses, norms, recurrent layers, whatever has a name of its own
in a printed graph. Ops for which there is no lowering are replaced by what PyTorch says they are made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from poptorch.base.structures import structure_of
from poptorch.capture.composed import COMPOSED, sequential_update
from poptorch.capture.cuts import GraphBreaks
from poptorch.capture.devices import ASKING, HOST, IPU, LIKE_ANOTHER, on_cpu
from poptorch.capture.frozen import is_users
from poptorch.capture.host_function import HostFunction
from poptorch.capture.indexing import getitem, setitem
from poptorch.capture.number_inputs import holds_counters, with_numbers
from poptorch.capture.recorder import Recorder
from poptorch.capture.seeding import Remade
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.torch_private import (
    NORMS,
    UNREADABLE,
    FakeTensor,
    TorchDispatchMode,
    decomposition,
    fake_mode,
    hears_functions,
    in_transform,
    is_wrapped,
    shares_storage,
    with_weight,
    without_modes,
    written_arguments,
)
from poptorch.capture.trace import Trace
from poptorch.capture.whole import (
    COMPOSED_LOSSES,
    LOSSES,
    WHOLE,
    PreservedFunction,
    as_activation,
    with_masks_of_bools,
    with_plain_sizes,
)
from poptorch.errors import createPoptorchError
from poptorch.placement.ambient import Ambient

_OVERWRITING = frozenset(
    f"aten.{name}_"
    for name in ("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random")
) | {"aten.uniform_", "aten.zero_"}
"""Ops in place that do not look at what they overwrite. Their names keep the underscore."""


CANNOT_READ = (
    "The numbers in a tensor cannot be read while a model is compiled: it becomes one program for whatever numbers "
    "come. Choose by them with `torch.where` or `poptorch.cond`, index with `index_select`, `gather` or "
    "`poptorch.dynamic_slice`, and state sizes such as `num_classes`."
)
"""What is said where a model reads a number."""


_NOT_A_VIEW = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
    "contiguous subspaces). Use .reshape(...) instead."
)

_NARROWED = frozenset({"torch.linear", "torch.matmul", "torch.scaled_dot_product_attention"})
"""Functions that `torch.autocast` computes in the narrower type, and that are kept whole in it."""


def autocast_dtype() -> torch.dtype | None:
    """Dtype in which `torch.autocast` computes products; `None` if autocast is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _narrowed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


class Tracer:
    """A capture in progress.

    Attributes:
        recorder: where ops are written down.
        hooks: what has hooks on gradients, in words.
    """

    def __init__(
        self,
        ambient: Ambient,
        lowered: Callable[[str, str], bool],
        excludes: Sequence[str],
        keeps_whole: bool = True,
        module: torch.nn.Module | None = None,
        cuts: GraphBreaks | None = None,
        has_counters: bool = False,
    ) -> None:
        self._cuts = cuts
        self._has_counters = has_counters
        self.recorder = Recorder(ambient, excludes, module)
        self.hooks: list[str] = []
        self._keeps_whole = keeps_whole
        self._has_whole = False
        self._derives = not keeps_whole
        self._lowered = lowered
        self._suspended = False
        self._generator: torch.Generator | None = None
        self._drawn_last: dict[torch.Generator, list[torch.Tensor]] = {}
        self._fake = fake_mode()
        self._ops, self._functions = _Ops(self), _Functions(self)

    def fake(self, t: torch.Tensor) -> torch.Tensor:
        """Fake counterpart of a tensor; repeated calls return an identical object."""
        return self._fake.from_tensor(t)

    def fake_in(self, place: TensorLayout) -> torch.Tensor:
        """Fake tensor with a given layout in separate storage."""
        steps = zip(place.shape, place.stride, strict=True)
        extent = place.offset + 1 + sum((size - 1) * stride for size, stride in steps)
        with self._fake:
            memory = torch.empty(max(extent, 0), dtype=place.dtype)
            return memory.as_strided(place.shape, place.stride, place.offset).detach()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Intercept all ops within a block."""
        with ExitStack() as stack:
            for mode in (torch.enable_grad(), self._fake, self._ops, self._functions):
                stack.enter_context(mode)
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend recording within a block."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def hears(self, given: Any) -> bool:
        """Whether operations on these arguments are recorded: another thread may run unrelated ones."""
        is_own = any(isinstance(t, FakeTensor) and t.fake_mode is self._fake for t in pytree.tree_leaves(given))
        return is_own and not self._suspended and not in_transform()

    # Where tensors are ----------------------------------------------------------------------------------------------

    def device_of(self, t: torch.Tensor, frame: FrameType) -> torch.device | None:
        """Device of a tensor, as reported to user code in a frame; `None` if PyTorch should answer."""
        is_heard = hears_functions(self._functions) and not self._suspended
        return self.to_model(t) if is_heard and is_users(frame) else None

    def to_model(self, t: torch.Tensor) -> torch.device:
        """Device of a tensor from the model's perspective."""
        return HOST if not is_wrapped(t) and self.recorder.is_on_host(t) else IPU

    @contextmanager
    def making(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Place intermediate tensors of a function on the host, if all tensor arguments are host tensors."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = self.recorder.makes_on_host
        self.recorder.makes_on_host = bool(tensors) and all(self.to_model(t) == HOST for t in tensors)
        try:
            yield
        finally:
            self.recorder.makes_on_host = before

    def on_device(self, t: torch.Tensor) -> torch.Tensor:
        """Move a host tensor to the device; return other tensors unchanged."""
        if self._suspended or self.to_model(t) == IPU:
            return t
        with self.suspended():
            moved = t.clone()
        self.recorder.move(t, moved)
        return moved

    # What is heard --------------------------------------------------------------------------------------------------

    def record(
        self, op: str, compute: Callable[..., Any], arguments: Mapping[str, Any], has_effect: bool = False
    ) -> Any:
        """Record a computation as a single op, regardless of its constituent ops.

        Args:
            op: its name, for its lowering.
            compute: gives results with the right shapes and dtypes, for these arguments.
            arguments: by name.
            has_effect: whether it is kept even if nothing uses it.
        """
        with self.suspended():
            results = compute(**arguments)
        node = self.recorder.node(op, "", arguments, has_effect)
        self.recorder.results(node, results)
        return results

    def function_of(self, body: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[Trace, list[torch.Tensor]]:
        """Trace a function body for a control-flow op, on copies of its inputs; returns fake results, too."""
        with self.recorder.recording_function() as trace:
            with self.suspended():
                copies = [t.clone() for t in inputs]
            for t in copies:
                self.recorder.new_input(t)
            results = body(*copies)
            results = list(results) if isinstance(results, list | tuple) else [results]
            if others := [each for each in results if not isinstance(each, torch.Tensor)]:
                raise createPoptorchError(
                    f"The body {getattr(body, '__qualname__', body)} of a loop or of a conditional returns "
                    f"{others[0]!r}; expected a tensor, or a list or tuple of tensors."
                )
            trace.outputs = [self.recorder.value_of(t) for t in results]
        return trace, results

    def function(self, whole: PreservedFunction, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a preserved PyTorch function as one op, or run it op by op if preserving is disabled."""
        narrow = autocast_dtype()
        if self._keeps_whole and narrow is not None and whole.op in _NARROWED:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _narrowed(t, narrow), (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return self.function(whole, function, args, kwargs)
        if not self._keeps_whole or narrow is not None:  # autocasting casts what functions are made of
            results = function(*args, **kwargs)
            return self.loss(results) if whole.op in LOSSES else results
        given = whole.arguments(function, args, kwargs)
        if given is None and whole.otherwise is not None:
            with self._functions:
                return whole.otherwise(*args, **kwargs)
        if given is None:
            return function(*args, **kwargs)
        if given.pop("inplace", False):
            return given["input"].copy_(self.function(whole, function, (), given))
        written = whole.writes(given)
        with self.suspended():
            try:
                results = function(*args, **kwargs) if whole.shaped_as is None else whole.shaped_as(**given)
            except (AssertionError, IndexError, RuntimeError, ValueError):
                if whole.op not in LOSSES:
                    raise
                results = _as_pytorch_says(function, args, kwargs)
        if any(shares_storage(t, given) for t in pytree.tree_leaves(results)):  # a view, or the argument itself
            return function(*args, **kwargs)
        self._has_whole = True
        node = self.recorder.node(whole.op, "", given)
        self.recorder.results(node, results)
        for t in written:
            self.recorder.write(t, self.recorder.result(node, tuple(t.shape), t.dtype))
        return results

    def detach_(self, t: torch.Tensor) -> torch.Tensor:
        """Record `Tensor.detach_`, which PyTorch does not dispatch as an op."""
        node = self.recorder.node("aten.detach", "default", {"input": t})
        self.recorder.write(t, self.recorder.result(node, tuple(t.shape), t.dtype))
        return t.detach_()

    def set_data(self, t: torch.Tensor, data: torch.Tensor) -> None:
        """Record `t.data = data`, which PyTorch does not dispatch as an op: new contents, unchanged autograd history.

        They are copied: what is written to `data` afterwards does not show in `t`. What looked at the numbers of `t`
        before still looks at those.
        """
        if (t.shape, t.dtype) != (data.shape, data.dtype):
            raise createPoptorchError(
                f"`.data` of a tensor of {tuple(t.shape)} and {t.dtype} is set to one of {tuple(data.shape)} and "
                f"{data.dtype} ({self.recorder.source()}). While a model is compiled a tensor keeps its shape and "
                "dtype: use a new tensor for others."
            )
        before, content = self.recorder.value_of(t), self.recorder.value_of(data)
        with self.suspended():
            t.data = data.detach().clone()
        self.recorder.rebind(t, before, content)

    def read_contents(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Result of a function that reads tensor contents."""
        numbers = None if in_transform() else self.recorder.numbers_of(args[0])
        if numbers is None and function not in _NEVER_CUT and self._may_break_graph:
            return self._made_by_host(function, args, kwargs)
        if numbers is None:
            raise createPoptorchError(
                f"{CANNOT_READ} It is needed here ({self.recorder.source()}): {function.__name__}."
            )
        with self.suspended(), without_modes():
            return function(numbers.clone(), *args[1:], **kwargs)

    def copied(self, t: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """`copy.deepcopy(t)`."""
        if id(t) not in memo:
            copy = t.detach().clone().requires_grad_(t.requires_grad)
            memo[id(t)] = torch.nn.Parameter(copy, t.requires_grad) if isinstance(t, torch.nn.Parameter) else copy
        return memo[id(t)]

    def differentiate(self, is_forward: bool) -> None:
        """Ensure that PyTorch can differentiate recorded functions: preserved ones hide their ops from autograd.

        Args:
            is_forward: whether it is what is done from now on, together with that (`torch.autograd.forward_ad`).

        Raises:
            Again: if there was one, or may be.
        """
        if (self._keeps_whole if is_forward else self._has_whole) and not in_transform():
            raise RetryWithoutPreserving

    def has_known_values(self, t: torch.Tensor) -> bool:
        """Whether the contents of a tensor are constant across runs."""
        return not in_transform() and self.recorder.is_constant(t)

    def distance(self, start: torch.Tensor, stop: torch.Tensor) -> int | None:
        """Difference `stop - start` of two scalars, if constant across runs; otherwise `None`."""
        return self.recorder.distance(start, stop)

    def check_classes(self, input: torch.Tensor, num_classes: int = -1) -> None:
        """Check that `one_hot` receives a number of classes, or can read its input.

        Raises:
            poptorch.Error: if it is not: the shape of the result is made from it.
        """
        if num_classes == -1 and not self.has_known_values(input) and not self._may_break_graph:
            raise createPoptorchError(
                "OneHot num classes must be specified and must be constant. Without it the shape of the result depends "
                f"on the numbers in the tensor: `one_hot(x, num_classes=...)` ({self.recorder.source()})."
            )

    def loss(self, x: torch.Tensor) -> Any:
        """Mark a tensor as a loss."""
        return self.record("poptorch.identity_loss", lambda x, reduction: x.clone(), {"x": x, "reduction": "none"})

    def op(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Record an op of PyTorch."""
        if self._suspended or op.namespace == "prim":
            return op(*args, **kwargs)
        if (
            op._opname in ("index_put", "index_put_")
            and _is_mixed(args[1])
            and (places := self._masks_to_indices(args[1]))
        ):
            args = (args[0], places, *args[2:])
        given = _by_name(op, args, kwargs)
        generator = given.pop("generator", None)
        if generator is not None and generator is not torch.default_generator:
            with self._ops:  # what PyTorch hands on to ops stands for the user's generator, and is another object
                return self._draw_on_host(op, self._generator or generator, args, kwargs)
        written = {name: given[name] for name in written_arguments(op) if name in given}
        name = f"{op.namespace}.{op._opname}"
        if written and name not in _OVERWRITING and not name.endswith("__"):
            name = name.removesuffix("_")
        is_part = self._derives and op in NORMS  # its statistics are functions of the input, to derivatives
        moves = torch.Tag.inplace_view in op.tags
        changes = [*written] == ["input"] and not moves and name not in _OVERWRITING
        made_of = sequential_update(op, args[0]) if changes and isinstance(args[0], torch.Tensor) else None
        if made_of is None and (is_part or not self._lowered(name, op._overloadname)):
            made_of = decomposition(op)
        if made_of is not None:
            with self.recorder.recording_decomposition() as whole, self._ops:
                results = made_of(*args, **kwargs)
                if all(result.alias_info is None for result in op._schema.returns):  # where the parts give a view
                    results = pytree.tree_map(lambda t: t.clone() if shares_storage(t, given) else t, results)
                made = results[:1] if is_part else results
                whole += [t for t in pytree.tree_leaves([made, *written.values()]) if isinstance(t, torch.Tensor)]
            if results is not NotImplemented:
                return results
        plain = [t for t in pytree.tree_leaves(written) if not isinstance(t, FakeTensor)]
        try:
            results = self._on_stand_ins(op, args, kwargs, plain) if plain else op(*args, **kwargs)
        except ValueError:
            if op is torch.ops.aten.view.default:  # as PyTorch says it of tensors that have numbers
                raise RuntimeError(_NOT_A_VIEW) from None
            raise
        except UNREADABLE:
            results = self._constant_result(op, args, kwargs)
            if results is None and not self._may_break_graph:
                raise
            return self._made_by_host(op, args, kwargs) if results is None else results
        if moves:
            self.recorder.moved(args[0])
        if moves or name == "aten.as_strided":
            return results  # where it looks shows when it is read
        if written:
            self._record_written(name, op._overloadname, given, written, results)
        elif any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(results)):  # and no plain value
            node = self.recorder.node(name, op._overloadname, given)
            if name == "aten.lift_fresh":  # `torch.tensor` does so, and types of the host, such as `torch.LongTensor`
                if is_of_type := hears_functions(self._functions):  # which is no function
                    self.recorder.made_on_host.add(node)
                node.is_on_host = is_of_type or self.recorder.makes_on_host
            # A conjugate or a sign that was put off is made good in a clone, below what PyTorch differentiates.
            is_resolved = name == "aten.clone" and (args[0].is_conj() or args[0].is_neg()) and torch.is_grad_enabled()
            if not self.recorder.views(node, given, results):
                self.recorder.results(node, results, says_no=not is_resolved)
        return results

    def _record_written(
        self, name: str, overload: str, given: Mapping[str, Any], written: Mapping[str, Any], results: Any
    ) -> None:
        """Record an op that overwrites arguments: their new values become results."""
        read = {"input"} if name not in _OVERWRITING else set()
        inputs = {key: value for key, value in given.items() if key not in written or key in read}
        tensors = [t for t in pytree.tree_leaves(dict(written)) if isinstance(t, torch.Tensor)]
        node = self.recorder.node(name, overload, inputs, written=tensors)
        overwritten = list(map(id, tensors))
        self.recorder.results(node, [t for t in pytree.tree_leaves(results) if id(t) not in overwritten])
        for t in tensors:
            self.recorder.write(t, self.recorder.result(node, tuple(t.shape), t.dtype))

    def _draw_on_host(self, op: torch._ops.OpOverload, generator: torch.Generator, args: Any, kwargs: Any) -> Any:
        """Draw from a user's generator, on the host, each time the program reaches this op.

        One that `forward` makes is another one in each run, and the same as ever: it gives constants.
        """
        kwargs = {**kwargs, "generator": None}
        given = structure_of((args, kwargs), op._opname)
        tensors = given.tensors((args, kwargs))
        is_in_place = op._schema.arguments[0].alias_info is not None

        def draw(generator: torch.Generator, args: Any, kwargs: Any) -> Any:
            args = (args[0].clone(), *args[1:]) if is_in_place else args
            return op(*args, **{**kwargs, "generator": generator})

        function = HostFunction(op._opname, lambda *args, **kwargs: draw(generator, args, kwargs), given)
        if type(generator) is Remade:  # others seem to be of it, too
            state = generator.get_state()
            with self.suspended(), without_modes():
                zeros = given.rebuild([torch.zeros(t.shape, dtype=t.dtype) for t in tensors])
                drawn = draw(generator, *zeros)
            if is_in_place or not tensors:
                made = self._constant(drawn)
                return args[0].copy_(made) if is_in_place else made
            function = HostFunction(
                op._opname, lambda *args, **kwargs: draw(Remade.new_generator(state), args, kwargs), given
            )

        def compute(**_: Any) -> Any:
            return torch.empty_like(args[0]) if is_in_place else op(*args, **kwargs)

        before = self._drawn_last.get(generator, [])  # what is drawn first is known before what is drawn then
        parts = {"inputs": [*tensors, *before], "function": function, "name": op._opname}
        made = self.record("poptorch.cpu", compute, parts, True)
        self._drawn_last[generator] = [made.reshape(-1)[:1]]
        return args[0].copy_(made) if is_in_place else made

    def _constant_result(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Result of an op that reads tensor contents; `None` if these are unknown before a run."""
        if op in (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default):
            return self._index_by_masks(*args)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        known = [self.recorder.numbers_of(t) if isinstance(t, torch.Tensor) else t for t in leaves]
        if any(numbers is None and leaf is not None for numbers, leaf in zip(known, leaves, strict=True)):
            return None
        with without_modes():
            args, kwargs = pytree.tree_unflatten(known, structure)
            results = op(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._constant, results)

    @property
    def _may_break_graph(self) -> bool:
        """Whether a graph break is allowed at this point."""
        return self._cuts is not None and not (self.recorder.is_nested or in_transform())

    def _made_by_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Insert a graph break for a function with run-dependent results; returns these results."""
        assert self._cuts is not None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        values = [self.recorder.value_of(leaves[i]) for i in places]
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            given = list(others)
            for i, t in zip(places, tensors, strict=True):
                given[i] = t
            args, kwargs = pytree.tree_unflatten(given, structure)
            return function(*args, **kwargs)

        source = self.recorder.source()
        with self.suspended(), without_modes():
            tracked = any(leaves[i].requires_grad for i in places)
            cut, made = self._cuts.insert(len(self.recorder.trace.nodes), values, run, source, tracked)

        def begin(t: torch.Tensor) -> torch.Tensor:
            fake = self.fake(t.detach())
            cut.made.append(self.recorder.new_made(fake))
            return fake

        result = pytree.tree_map_only(torch.Tensor, begin, made)
        self._cuts.know(cut, made)
        return result

    def _constant(self, numbers: torch.Tensor) -> torch.Tensor:
        t = self.fake(numbers)
        self.recorder.new_constant(t, numbers)
        return t

    def _index_by_masks(self, t: torch.Tensor, indices: Any) -> Any:
        """Index by masks with known contents; `None` if a mask is unknown and no graph break is allowed."""
        if isinstance(indices, torch.Tensor):
            with self._ops:
                t, indices = torch.broadcast_tensors(t, indices)
            indices = [indices]
        places = self._masks_to_indices(indices)
        return None if places is None else self.op(torch.ops.aten.index.Tensor, (t, places), {})

    def _masks_to_indices(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Convert masks among indices to integer indices; `None` if a mask is unknown and no graph break is allowed."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            mask = self.recorder.numbers_of(index)
            if mask is None:
                if not self._may_break_graph:
                    return None
                places += self._made_by_host(_mask_coordinates, (index,), {})
                continue
            with without_modes():
                found = _mask_coordinates(mask)
            places += [self._constant(numbers) for numbers in found]
        return places

    def _on_stand_ins(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, plain: Sequence[torch.Tensor]) -> Any:
        """Run an op that overwrites user tensors outside the model on fake copies, so that they keep their contents."""
        for t in plain:
            self.recorder.value_of(t)  # as it is now
        others = {id(t): self.fake(t) for t in plain}
        back = {id(other): t for other, t in zip(others.values(), plain, strict=True)}
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: others.get(id(t), t), (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), op(*args, **kwargs))


_IRRELEVANT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Arguments of ops that do not change a number here."""


def _by_name(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Relevant op arguments by name, with `input` for PyTorch's `self`, as in its functions."""
    names = ("input" if a.name == "self" else a.name for a in op._schema.arguments)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: value for name, value in given.items() if name not in _IRRELEVANT}


class _Ops(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.op(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self._tracer
        if tracer._has_counters and holds_counters((args, kwargs)):
            call = partial(self.__torch_function__, func, types)
            return with_numbers(call, args, kwargs or {}, tracer.recorder.trace, tracer.recorder.is_nested)
        if func in ASKING and not tracer._suspended and is_users(sys._getframe(1)):
            return ASKING[func](tracer.to_model(args[0]))
        func, args, kwargs, moves = on_cpu(func, args, kwargs or {})
        if func in LIKE_ANOTHER:
            others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.Tensor)]
            moves |= any(tracer.to_model(other) == IPU for other in others)
        with tracer.making(args, kwargs):
            results = self._function(func, args, kwargs)
        return pytree.tree_map_only(torch.Tensor, tracer.on_device, results) if moves else results

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        whole = None
        if not tracer._suspended:
            if func is torch.Tensor.detach_:
                return tracer.detach_(*args)
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                return tracer.set_data(*args)
            if func is torch.Tensor.requires_grad_ or func == torch.Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
                tracer.recorder.track(*args, **kwargs)
            if func is torch.Tensor.__getitem__:
                return getitem(args[0], args[1], tracer)
            if func is torch.Tensor.__setitem__:
                return setitem(args[0], args[1], args[2], tracer)
            if func is torch.nn.functional.one_hot:
                tracer.check_classes(*args, **kwargs)
            if func in _DIFFERENTIATING or func is _MAKE_DUAL:
                tracer.differentiate(is_forward=func is _MAKE_DUAL)
            tracer._generator = kwargs.get("generator")
            if func in _READING or func in _ROUNDING and tracer._may_break_graph:
                return tracer.read_contents(func, args, kwargs)
            if func is torch.Tensor.__deepcopy__:
                return tracer.copied(*args)
            if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
                tracer.hooks.append(f"A tensor of `forward` ({tracer.recorder.source()})")
            if (composed := _composed(func)) is not None:
                with self:
                    return composed(*args, **kwargs)
            if isinstance(func, torch._ops.HigherOrderOperator):
                raise createPoptorchError(
                    f"Unsupported function {func.name()} of functions at {tracer.recorder.source()}. Use "
                    "`poptorch.for_loop`, a loop of Python's, or `torch.where`, which chooses between what both "
                    "functions give; where a model only runs, `poptorch.cond`."
                )
            tracer._derives |= in_transform()
            whole = None if in_transform() else _preserved_function(func)
        args, kwargs = as_activation(func, *with_masks_of_bools(func, args, with_weight(func, kwargs)))
        if whole is None:
            results = func(*args, **kwargs)
            return tracer.loss(results) if any(func is each for each in COMPOSED_LOSSES) else results
        return tracer.function(whole, func, *with_plain_sizes(func, args, kwargs))


def _as_pytorch_says(loss: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Retry a loss that fake tensors reject: with real tensors, for PyTorch's own error message, then with fake ones
    again. Labels of dtype uint8, which only fake tensors reject, are widened."""

    def zeros(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=t.dtype).expand(t.shape)

    def labels(t: torch.Tensor) -> torch.Tensor:
        return t.long() if t.dtype is torch.uint8 else t

    with without_modes():
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, zeros, (args, kwargs))
        loss(*real_args, **real_kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, labels, (args, kwargs))
    return loss(*args, **kwargs)


_READING = frozenset(getattr(torch.Tensor, name) for name in ("__array__", "__format__", "data_ptr", "numpy", "tolist"))
"""Functions in which numbers leave PyTorch without an op of its."""


_ROUNDING = (torch.Tensor.__bool__, torch.Tensor.__int__)
"""Functions that read a number, and make one of fewer of it: a program is for that one."""


_NEVER_CUT = (torch.Tensor.data_ptr, torch.Tensor.__format__)
"""Functions whose result says nothing to the program, or something else in each run."""


def _is_mixed(indices: Sequence[torch.Tensor | None]) -> bool:
    """Whether indices combine a mask with other indices."""
    dtypes = [index.dtype for index in indices if index is not None]
    return len(dtypes) > 1 and (torch.bool in dtypes or torch.uint8 in dtypes)


def _mask_coordinates(mask: torch.Tensor) -> list[torch.Tensor]:
    """Coordinates of true elements, as one index tensor per dimension of a mask."""
    return [numbers.contiguous() for numbers in mask.nonzero().unbind(1)]


_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

_MAKE_DUAL = torch._VF._make_dual


class RetryWithoutPreserving(BaseException):
    """Request to restart a capture without preserved functions. Models' `except Exception` must not catch it."""


@cache
def _by_function() -> dict[Any, PreservedFunction]:
    return {function: whole for whole in WHOLE for function in whole.functions}


def _preserved_function(function: Any) -> PreservedFunction | None:
    try:
        return _by_function().get(function)
    except TypeError:  # it cannot be hashed
        return None


def _composed(function: Any) -> Callable[..., Any] | None:
    try:
        return COMPOSED.get(function)
    except TypeError:  # it cannot be hashed
        return None


_tracers: list[Tracer] = []


def current() -> Tracer | None:
    """Innermost capture in progress; `None` outside captures."""
    return _tracers[-1] if _tracers else None


@contextmanager
def going_on(tracer: Tracer) -> Iterator[None]:
    """Make this capture `current` within a block."""
    _tracers.append(tracer)
    try:
        yield
    finally:
        _tracers.pop()
