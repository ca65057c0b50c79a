"""Functions under recording: the model, and within it bodies of loops and of conditionals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from poptorch.base.patching import pushed
from poptorch.capture.host_tensors import HostTensors
from poptorch.capture.trace import Trace, Value
from popxl.extend.source import SourceLocation


@dataclass(eq=False)
class Frame:
    """Trace under construction, and values that belong to it."""

    trace: Trace = field(default_factory=Trace)
    values: dict[int, Value] = field(default_factory=dict)
    inputs: dict[int, Value] = field(default_factory=dict)
    """Inputs that represent outside values, by identity of the latter."""


class FrameStack:
    """The functions under recording, outermost first.

    Args:
        host: tensors of the host, which are on the device once an inner function reads them.
        source: function that finds the user's line that is running.
    """

    def __init__(self, host: HostTensors, source: Callable[[], SourceLocation]) -> None:
        self._frames = [Frame()]
        self._host, self._source = host, source

    @property
    def trace(self) -> Trace:
        """Innermost function under recording."""
        return self._frames[-1].trace

    @property
    def is_nested(self) -> bool:
        """Whether a nested function is under recording."""
        return len(self._frames) > 1

    def add(self, value: Value) -> Value:
        """Add a new value to the innermost function."""
        self._frames[-1].values[id(value)] = value
        return value

    def owns(self, value: Value) -> bool:
        """Whether a value belongs to the innermost function."""
        return id(value) in self._frames[-1].values

    def capture(self, value: Value) -> Value:
        """A value within the innermost function: captured as an input if it originates outside."""
        home = next(i for i, frame in enumerate(self._frames) if id(value) in frame.values)
        for frame in self._frames[home + 1 :]:
            inside = frame.inputs.get(id(value))
            if inside is None:
                self._host.leave(value, self._source())
                inside = Value(value.shape, value.dtype)
                frame.inputs[id(value)] = frame.values[id(inside)] = inside
                frame.trace.outer.append(value)
            value = inside
        return value

    @contextmanager
    def nested(self) -> Iterator[Trace]:
        """Record a function for an op of the current frame."""
        frame = Frame()
        with pushed(self._frames, frame):
            yield frame.trace
        frame.trace.inputs += [frame.inputs[id(value)] for value in frame.trace.outer]
