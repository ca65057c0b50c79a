"""`Recorder`: records ops in functional form during execution.

PyTorch has storages that tensors view and write to; a `Trace` has values that are assigned once. A `TensorStorage`
links a storage with its current value. A `TensorView` links a tensor with its storage, by a *lens*: the views that lead
from the storage's base to the tensor. Reading a tensor whose storage was overwritten meanwhile repeats these views;
writing puts the new value back through them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from poptorch.base.patching import patched, pushed
from poptorch.capture.captured_constants import locate_constant, user_line
from poptorch.capture.constants import buffer_dependencies, constant_contents, distance
from poptorch.capture.frames import FrameStack
from poptorch.capture.gradient_flow import is_in_own_derivative, stop_gradients, warn_about_derivative
from poptorch.capture.host_tensors import MADE_IN_CAPTURE, HostTensors
from poptorch.capture.request import CaptureRequest
from poptorch.capture.stand_ins import StandIn
from poptorch.capture.storages import TensorStorage, TensorView
from poptorch.capture.tensor_layout import TensorLayout, offsets_of, views_between
from poptorch.capture.torch_private import FakeTensor, become, forget_history, storage_key, without_modes
from poptorch.capture.trace import BASE, Data, Node, Trace, Value, View, detached, tensors_in, with_leaf, with_values
from poptorch.errors import createPoptorchError
from popxl.extend.source import SourceLocation


class Recorder:
    """Recorder of a function's ops during execution.

    Attributes:
        scopes: names of the modules that are running, outermost first.
        host: tensors of the host whose numbers have become a part of the program.
        frames: functions under recording.
        source: function that finds the user's line that is running, or active in a given frame.
        read_buffers: buffers whose numbers were read, by name, and the first place.
        reshaped: last place where a tensor's layout was changed, by the identity of each.
        makes_on_host: whether results of ops without tensor operands are on the host, for the model.
        regions: numbers of the regions that are running whose activations are recomputed, outermost first.
        keeps: whether the results of the next op are kept for the backward pass.
    """

    def __init__(self, request: CaptureRequest) -> None:
        self.scopes: list[str] = []
        self.host = HostTensors()
        self.source = partial(user_line, excludes=tuple(request.excludes))
        self.read_buffers: dict[str, SourceLocation] = {}
        self.reshaped: dict[int, SourceLocation] = {}
        self.makes_on_host = False
        self.regions: tuple[int, ...] = ()
        self.keeps = False
        self._region_count = 0
        self._context, self._module = request.context, request.module
        self.frames = FrameStack(self.host, self.source)
        self._views: dict[int, TensorView] = {}
        self._storages: dict[int, TensorStorage] = {}
        self._all_storages: list[TensorStorage] = []
        self._is_decomposing = False
        self._recording_at: Node | None = None
        self._buffer_contents: dict[Value, torch.Tensor] = {}

    # Tensors and values ---------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """Innermost function under recording."""
        return self.frames.trace

    def new_input(self, t: torch.Tensor, name: str = "", numbers: torch.Tensor | None = None) -> Value:
        """Add a function input for a tensor's initial contents; `numbers` gives host contents of a buffer."""
        value = self.frames.add(Value(tuple(t.shape), t.dtype, name, of_buffer=numbers is not None))
        if numbers is not None:
            self._buffer_contents[value] = numbers
        self._register_base(t, value)
        self.trace.inputs.append(value)
        return value

    def value_of(self, t: torch.Tensor) -> Value:
        """Current value of a tensor within the innermost function."""
        tracked = self._views.get(id(t))
        if tracked is None:
            tracked = self._register(t)
        if tracked.version == tracked.storage.version:
            return self.frames.capture(tracked.value)
        value = self._view_values(tracked.storage, tracked.lens)[-1]
        if self.frames.owns(tracked.storage.value):
            tracked.value, tracked.version = value, tracked.storage.version
        return value

    def state_of(self, t: torch.Tensor) -> tuple[TensorStorage, int]:
        """State of a tensor: storage, and version of its contents."""
        if id(t) not in self._views:
            self.value_of(t)  # registers it
        storage = self._views[id(t)].storage  # perhaps of a body that has ended
        return storage, storage.version

    def is_constant(self, t: torch.Tensor) -> bool:
        """Whether current contents of a tensor are constant across runs, independent of buffers."""
        return self.value_of(t).is_constant

    def overwritten(self) -> Iterator[str]:
        """Display names of host tensors that a model reads, and overwrites or replaces by run-dependent tensors."""
        for frozen in self.host.constants:
            t = frozen.tensor()
            tracked = None if t is None else self._views.get(id(t))
            if (
                tracked is not None
                and tracked.storage.version
                or any(map(self.is_of_run, pytree.tree_leaves(frozen.current_object)))
            ):
                yield frozen.text

    def is_of_run(self, each: object) -> bool:
        """Whether an object is a run-dependent tensor: computed, or an input."""
        if not isinstance(each, FakeTensor) or id(each) not in self._views:
            return False
        value = self.value_of(each)
        return not value.is_constant and not (value.producer is None and value.name)

    def uses(self, value: Value | None) -> bool:
        """Whether any recorded op reads a value."""
        return value is not None and any(value in node.inputs for node in self.trace.nodes)

    def constant_contents(self, t: torch.Tensor) -> torch.Tensor | None:
        """Current contents of a tensor, read-only; `None` if they depend on a run."""
        value = self.value_of(t)
        for name in value.buffer_dependencies or ():
            self.read_buffers.setdefault(name, self.source())
        return constant_contents(value, self._buffer_contents)

    def distance(self, start: torch.Tensor, stop: torch.Tensor, sees_selects: bool) -> int | None:
        """Difference `stop - start` of two integers, if both are known offsets from one value; otherwise `None`."""
        return distance(self.value_of(start), self.value_of(stop), self._buffer_contents, sees_selects)

    def new_constant(self, t: torch.Tensor, numbers: torch.Tensor) -> Node:
        """Record a constant with these contents, which callers must not modify, as a tensor's value."""
        node = self.add_node("poptorch.constant", "", {"data": Data(numbers)})
        self._register_base(t, self.add_result(node, tuple(t.shape), t.dtype))
        return node

    def add_preexisting(self, t: torch.Tensor) -> Node:
        """Record a constant with the current contents of a tensor that no recorded op made."""
        with without_modes():
            numbers = t.detach().clone()
        is_on_host = self.is_on_host(t)
        node = self.new_constant(t, numbers)
        node.is_on_host = is_on_host
        return node

    def new_host_result(self, t: torch.Tensor) -> Value:
        """New value without a producing op, for a tensor computed on the host."""
        value = self.frames.add(Value(tuple(t.shape), t.dtype))
        self._register_base(t, value)
        return value

    def overwrite(self, node: Node, tensors: Iterable[torch.Tensor]) -> None:
        """Add results to an op, as the new values of tensors that it overwrites."""
        for t in tensors:
            self._write(t, self.add_result(node, tuple(t.shape), t.dtype))

    def _write(self, t: torch.Tensor, value: Value) -> None:
        """Write a new value into a tensor, visible through all views of its storage."""
        self.value_of(t)  # registers it
        tracked = self._views[id(t)]
        storage = tracked.storage
        self._check_own(t, storage.value)
        if storage.layout.overlaps:
            self._deduplicate(storage)
        lens = tracked.lens
        if any(view.repeats for view in lens):  # putting it back would overwrite the new number by its old copies
            is_detached = any(view.op == "aten.detach" for view in lens)
            lens = (
                *[detached(storage.value)] * is_detached,
                *views_between(storage.layout, TensorLayout.from_tensor(t)),
            )
        content = value
        for view, base in reversed(list(zip(lens, self._view_values(storage, lens), strict=False))):
            node = self.add_node("poptorch.put", "", {"base": base, "content": content, "view": view})
            content = self.add_result(node, base.shape, base.dtype)
        keeps_history = storage.base.requires_grad and not torch.is_grad_enabled() and not is_in_own_derivative()
        if keeps_history:  # changes hidden from PyTorch do not affect its derivatives
            content = self._with_history_of(self.frames.capture(storage.value), content)
        storage.value = content
        storage.version += 1
        if not (keeps_history or TensorLayout.from_tensor(t).overlaps):
            tracked.value, tracked.version = value, storage.version
        storage.resolve_requires_grad()
        self._defer_gradient_flow(storage, value, t)

    def rebind(self, t: torch.Tensor, before: Value, content: Value) -> None:
        """Give a tensor new storage and contents, with unchanged autograd history."""
        self._check_own(t, before)
        self._register_base(t, self._with_history_of(before, content))

    def _with_history_of(self, before: Value, content: Value) -> Value:
        node = self.add_node("poptorch.put", "", {"base": before, "content": content, "view": detached(content)})
        return self.add_result(node, content.shape, content.dtype)

    def _check_own(self, t: torch.Tensor, value: Value) -> None:
        """Check that a tensor's value belongs to the function under recording."""
        if not self.frames.owns(value):
            raise createPoptorchError(
                f"A body of a loop or of a conditional overwrites a tensor from outside of it, {tuple(t.shape)} of "
                f"{t.dtype} ({self.source()}). Pass it to the body as an input, which is a copy, and return it."
            )

    def record_requires_grad(self, t: torch.Tensor, requires_grad: bool = True) -> None:
        """Record an imminent change of `requires_grad`, which applies to later reads of the tensor."""
        tracked = self._views.get(id(t))
        if tracked is not None and t.requires_grad != requires_grad:
            tracked.storage.resolve_requires_grad()
            tracked.is_frozen = not requires_grad

    def record_new_view(self, t: torch.Tensor) -> None:
        """Record that a tensor now views other elements of its storage (`transpose_`), or another storage."""
        self.reshaped[id(t)] = self.source()
        self._views.pop(id(t), None)

    def _view_values(self, storage: TensorStorage, lens: Sequence[View]) -> list[Value]:
        """Value of a storage, followed by results of each view in a lens."""
        values = [self.frames.capture(storage.value)]
        for view in lens:
            node = self.add_node(view.op, view.overload, with_leaf(view.arguments, BASE, values[-1]))
            results = [self.add_result(node, shape, view.dtype) for shape in view.shapes]
            values.append(results[view.result])
        return values

    def _register_base(self, t: torch.Tensor, value: Value, blocks_grad: bool = True) -> None:
        """Register a tensor that owns its storage."""
        key = self._storage_key(t)  # refuses sparse tensors, which have no layout
        storage = self._storages[key] = TensorStorage(t, TensorLayout.from_tensor(t), value, blocks_grad)
        self._all_storages.append(storage)
        self._views[id(t)] = TensorView(t, storage, (), value, 0)
        self._defer_gradient_flow(storage, value, t)

    def _deduplicate(self, storage: TensorStorage) -> None:
        """Deduplicate the elements of a storage whose base tensor overlaps itself."""
        self._check_own(storage.base, storage.value)
        layout = storage.layout
        offsets, first = np.unique(offsets_of(layout.shape, layout.stride), return_index=True)
        if len(first) == prod(layout.shape):
            return
        step = int(offsets[1]) if len(offsets) > 1 else 1
        if (np.diff(offsets) != step).any():
            raise createPoptorchError(
                f"A tensor of {layout.shape} with the strides {layout.stride} overlaps itself, and has gaps "
                f"({self.source()}). Make it contiguous before it is overwritten, or looked at in another way."
            )
        with without_modes():
            data = Data(torch.from_numpy(first))
        index = self.add_result(self.add_node("poptorch.constant", "", {"data": data}), first.shape, torch.int64)
        taken = self.add_node("aten.take", "default", {"input": storage.value, "index": index})
        storage.layout = replace(layout, shape=first.shape, stride=(step,))
        storage.value = self.add_result(taken, first.shape, layout.dtype)
        for tracked in self._views.values():
            if tracked.storage is storage:
                tracked.lens = (*views_between(storage.layout, layout), *tracked.lens)

    def _defer_gradient_flow(
        self, storage: TensorStorage, value: Value, t: torch.Tensor, blocks_grad: bool = True
    ) -> None:
        """Schedule a gradient-flow check for a value, if PyTorch tracks it.

        Args:
            blocks_grad: whether this tensor alone decides that no gradients flow, and not the operands of the value.
        """
        if not self._is_decomposing:
            storage.pending.append((value, t, blocks_grad and storage.blocks_grad))

    def _register(self, t: torch.Tensor) -> TensorView:
        """Register a tensor without a recorded op: preexisting, or another view of storage (`t.data`, strides)."""
        storage = self._storages.get(self._storage_key(t))
        if storage is None:
            if isinstance(t, FakeTensor):
                raise createPoptorchError(
                    f"A tensor of {tuple(t.shape)} was made where it could not be seen ({self.source()}): in a "
                    "function that is taken as a whole, by PyTorch's own backward pass, or when the model was compiled "
                    "before, and kept since. Make it in `forward`, from what `forward` is given."
                )
            node = self.add_preexisting(t)
            if node.is_on_host:
                with without_modes():
                    frozen = locate_constant(t, node.arguments["data"].tensor, self._module, sys._getframe(1))
                if frozen is not None:
                    self.host.add(node, frozen)
            return self._views[id(t)]
        if storage.layout.overlaps:
            self._deduplicate(storage)
        lens = views_between(storage.layout, TensorLayout.from_tensor(t))
        tracked = self._views[id(t)] = TensorView(t, storage, lens, storage.value, -1)
        return tracked

    def _storage_key(self, t: torch.Tensor) -> int:
        """Storage key, equal for tensors with shared storage."""
        if t.layout is not torch.strided:
            raise createPoptorchError(
                f"A tensor of {tuple(t.shape)} is sparse ({t.layout}, {self.source()}). Tensors of a program have all "
                "their numbers: use `to_dense()` before the model, or give it places and values, and add up rows with "
                "`index_add`, as in `torch.zeros(n, k).index_add(0, rows, values[:, None] * x[columns])`."
            )
        return storage_key(t)

    def is_on_host(self, t: torch.Tensor) -> bool:
        """Whether the model sees a tensor on the host: it existed before capture, or derives from host tensors only."""
        if not isinstance(t, FakeTensor):
            return not getattr(t, MADE_IN_CAPTURE, False)
        tracked = self._views.get(id(t))
        return (
            tracked is not None
            and (tracked.value if tracked.version == tracked.storage.version else tracked.storage.value).is_on_host
        )

    def move_to_device(self, t: torch.Tensor, moved: torch.Tensor) -> None:
        """Record an explicit move of a host tensor to the device: an intended program constant."""
        node = self.add_node("aten.alias", "default", {"input": t})
        node.is_on_host = False
        self.add_results(node, moved)

    # Ops ------------------------------------------------------------------------------------------------------------

    def add_node(
        self,
        op: str,
        overload: str,
        arguments: Mapping[str, Any],
        has_effect: bool = False,
        written: Iterable[torch.Tensor] = (),
    ) -> Node:
        """Record an op. Tensors among its arguments are read; `written` lists overwritten tensors."""
        keeps, self.keeps = self.keeps, False
        values = pytree.tree_map_only(torch.Tensor, self._input_value, dict(arguments))
        values = with_values(values, self.frames.capture)
        scope = self.scopes[-1] if self.scopes else ""
        if op == "aten.convolution" and self._recording_at is None:
            self._context.count_convolution()
        names = buffer_dependencies(op, overload, values)
        placement = self._context.placement() if self._recording_at is None else self._recording_at.placement
        node = Node(op, overload, values, placement, scope, self.source(), has_effect, buffers=names)
        given = [*(value.is_on_host for value in node.inputs), *map(self.is_on_host, written)]
        node.is_on_host = all(given) if given else self.makes_on_host
        node.regions, node.is_saved = self.regions, keeps
        if not node.is_on_host:
            self.host.check_use(node)
        self.trace.nodes.append(node)
        return node

    def _input_value(self, t: torch.Tensor) -> Value:
        """Current value of a tensor as an op input; frozen tensors pass no gradients."""
        value = self.value_of(t)
        if not self._views[id(t)].is_frozen:
            return value
        stop = self.add_result(self.add_node("aten.detach", "default", {"input": value}), value.shape, value.dtype)
        stop.requires_grad = False
        return stop

    def add_result(self, node: Node, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        """Add a result value to an op."""
        value = self.frames.add(Value(shape, dtype, producer=node))
        node.results.append(value)
        return value

    def add_results(self, node: Node, tensors: Any, blocks_grad: bool = True) -> None:
        """Add op results for tensors, each with separate storage.

        Args:
            blocks_grad: whether results that need no gradient, according to PyTorch, let none flow.
        """
        for t in tensors_in(tensors):
            value = self.add_result(node, tuple(t.shape), t.dtype)
            if id(t) not in self._views:
                self._register_base(t, value, blocks_grad)

    def add_views(self, node: Node, arguments: Mapping[str, Any], tensors: Any) -> bool:
        """Record results as views, if they share storage with a tensor argument; returns whether they do."""
        results = tensors_in(tensors)
        given = tensors_in(dict(arguments))
        viewed = next((t for t in given if results and self._storage_key(t) == self._storage_key(results[0])), None)
        if viewed is None:
            return False
        base = self._views[id(viewed)]
        of_base = with_leaf(dict(arguments), viewed, BASE)
        shapes = tuple(tuple(t.shape) for t in results)
        # Functions that create tensors (`torch.zeros`) end with a `detach`; gradients may flow through these later.
        is_same = node.op == "aten.detach" and not viewed.requires_grad
        for i, t in enumerate(results):
            value = self.add_result(node, shapes[i], t.dtype)
            view = View(node.op, node.overload, of_base, shapes, t.dtype, i, TensorLayout.from_tensor(t).overlaps)
            lens = base.lens if is_same else (*base.lens, view)
            self._views[id(t)] = TensorView(t, base.storage, lens, value, base.storage.version)
            # No gradients flow through tensors that PyTorch keeps for its backward pass, such as the mean of a norm.
            self._defer_gradient_flow(base.storage, value, t, blocks_grad=not is_same)
        return True

    def keep(self, t: torch.Tensor) -> None:
        """Mark a newly computed tensor as saved for the backward pass."""
        node = self.value_of(t).producer
        assert node is not None
        node.is_saved = True

    def region(self) -> AbstractContextManager[None]:
        """Record ops of a block as a region with recomputed activations."""
        self._region_count += 1
        return patched(self, regions=(*self.regions, self._region_count))

    @contextmanager
    def recording_decomposition(self) -> Iterator[list[torch.Tensor]]:
        """Record a decomposition. PyTorch tracks no gradients within, except for results that the caller lists."""
        results: list[torch.Tensor] = []
        with patched(self, _is_decomposing=True):
            yield results
        for t in results:
            value = self.value_of(t)
            self._defer_gradient_flow(self._views[id(t)].storage, value, t)

    # Functions ------------------------------------------------------------------------------------------------------

    @contextmanager
    def recording_at(self, node: Node) -> Iterator[None]:
        """Record ops with the placement and module scope of an earlier op."""
        with patched(self, _recording_at=node), pushed(self.scopes, node.scope):
            yield

    def resolve_requires_grad(self) -> None:
        """Record gradient flow for all values."""
        for storage in self._all_storages:
            storage.resolve_requires_grad()

    def finish(self, is_trained: bool = False) -> Trace:
        """Complete and return the function; no recording is possible afterwards.

        Args:
            is_trained: whether the trace is to be differentiated. Ignored gradients then cause a warning.
        """
        self.resolve_requires_grad()
        results = [value for node in self.trace.nodes for value in node.results]
        for function in {value.of_function for value in results if value.of_function is not None and is_trained}:
            warn_about_derivative(function)
        stop_gradients(self.trace)
        return self.trace

    @contextmanager
    def materialising_constants(self) -> Iterator[None]:
        """Materialise still-referenced tensors with known contents after a recorded block.

        A function that makes a mask once and caches it returns a usable mask to later callers, not a tensor of this
        capture. Others become stand-ins, with the place where they were made. The recorder drops all tensors.
        """
        try:
            yield
        finally:
            kept = self._fake_tensors()
            self._views.clear()
            self._storages.clear()
            self._all_storages.clear()
            # A kept tensor may be a view of another one: that is free once the view has its own numbers.
            for ref, value, is_constant in reversed(kept):
                if (t := ref()) is None:
                    continue
                numbers = constant_contents(value, self._buffer_contents) if is_constant else None
                if numbers is not None:
                    become(t, numbers.clone().requires_grad_(t.requires_grad))
                    setattr(t, MADE_IN_CAPTURE, True)
                else:
                    forget_history(t)
                    become(t, StandIn.for_tensor(t, "" if value.producer is None else str(value.producer.source)))

    def _fake_tensors(self) -> list[tuple[weakref.ref[Any], Value, bool]]:
        """Tensors of the capture, without keeping them alive: each with its value, and whether that is constant."""
        found = []
        for tracked in list(self._views.values()):
            if isinstance(tracked.tensor, FakeTensor):
                is_constant = self._is_constant(tracked)
                value = self.value_of(tracked.tensor) if is_constant else tracked.value
                found.append((weakref.ref(tracked.tensor), value, is_constant))
        return found

    def _is_constant(self, tracked: TensorView) -> bool:
        """Whether tensor contents are known, and do not belong to a loop body."""
        return all(self.frames.owns(v) and v.is_constant for v in (tracked.value, tracked.storage.value))
