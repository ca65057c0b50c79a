"""Named collections of host streams, in the order in which a program feeds and reads them."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import popxl

S = TypeVar("S", popxl.HostToDeviceStream, popxl.DeviceToHostStream)


class AbstractStreams(Generic[S]):
    """Streams by name, by attribute and by position. Iteration gives the streams, not their names."""

    _create: ClassVar[Callable[..., Any]]

    def __init__(self, /, **specs: tuple[Iterable[int], popxl.dtype]):
        self._streams: dict[str, S] = {
            name: type(self)._create(shape, dtype, name) for name, (shape, dtype) in specs.items()
        }

    @classmethod
    def from_streams(cls, streams: Iterable[S]) -> Self:
        """A collection of existing streams, each under its ``tensor_id``."""
        collection = cls()
        for stream in streams:
            collection[stream.tensor_id] = stream
        return collection

    def __getattr__(self, name: str) -> S:
        try:
            return self.__dict__["_streams"][name]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__} has no stream '{name}'; it has {list(self.__dict__.get('_streams', ()))}."
            ) from None

    @overload
    def __getitem__(self, key: str | int) -> S: ...
    @overload
    def __getitem__(self, key: slice) -> list[S]: ...
    def __getitem__(self, key: str | int | slice) -> S | list[S]:
        if not isinstance(key, str):
            return list(self)[key]
        if key not in self:
            raise KeyError(f"{type(self).__name__}: there is no stream '{key}'; available: {list(self.keys())}.")
        return self._streams[key]

    def __setitem__(self, name: str, stream: S) -> None:
        self._streams[name] = stream

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[S]:
        return iter(self._streams.values())

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._streams.keys()

    def values(self) -> ValuesView[S]:
        """The streams."""
        return self._streams.values()

    def items(self) -> ItemsView[str, S]:
        """Pairs of name and stream."""
        return self._streams.items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class InputStreams(AbstractStreams[popxl.HostToDeviceStream]):
    """Streams from the host, made from ``name=(shape, dtype)``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     ins = InputStreams(x=((4, 2), popxl.float32), label=((4,), popxl.int32))
        >>> ins.label is ins[1], [stream.shape for stream in ins]
        (True, [(4, 2), (4,)])
    """

    _create = staticmethod(popxl.h2d_stream)


class OutputStreams(AbstractStreams[popxl.DeviceToHostStream]):
    """Streams to the host, made from ``name=(shape, dtype)``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     outs = OutputStreams(loss=((), popxl.float32))
        >>> "loss" in outs
        True
    """

    _create = staticmethod(popxl.d2h_stream)
