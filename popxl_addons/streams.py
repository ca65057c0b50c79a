"""Named collections of host streams, in the order in which a program feeds and reads them."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import popxl

StreamType = TypeVar("StreamType", popxl.HostToDeviceStream, popxl.DeviceToHostStream)


class AbstractStreams(Generic[StreamType]):
    """Streams by name, by attribute and by position. Iteration gives the streams, not their names."""

    stream_init: ClassVar[Callable[..., Any]]
    """Constructor of a stream from shape, dtype, name, and optionally its own number of transfers."""

    stream_type: ClassVar[type]
    """Class of the streams."""

    def __init__(self, /, **specs: tuple[Iterable[int], popxl.dtype] | tuple[Iterable[int], popxl.dtype, int | None]):
        for name, spec in specs.items():
            if not isinstance(spec, tuple | list) or len(spec) not in (2, 3):
                raise TypeError(
                    f"{type(self).__name__}: `{name}` is {spec!r}; expected `(shape, dtype)`, as in "
                    f"`{name}=((2, 3), popxl.float32)`."
                )
        self._streams: dict[str, StreamType] = {
            name: type(self).stream_init(shape, dtype, name, *transfers)
            for name, (shape, dtype, *transfers) in specs.items()
        }

    @classmethod
    def from_streams(cls, streams: Iterable[StreamType]) -> Self:
        """Collection of existing streams, each under its ``tensor_id``.

        `TypeError` for anything but streams in this collection's direction.
        """
        collection = cls()
        for stream in streams:
            if not isinstance(stream, cls.stream_type):
                raise TypeError(f"{cls.__name__}: {stream!r} is no {cls.stream_type.__name__}.")
            collection[stream.tensor_id] = stream
        return collection

    def __getattr__(self, name: str) -> StreamType:
        try:
            return self.__dict__["_streams"][name]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__} has no stream '{name}'; it has {list(self.__dict__.get('_streams', ()))}."
            ) from None

    @overload
    def __getitem__(self, key: str | int) -> StreamType: ...
    @overload
    def __getitem__(self, key: slice) -> list[StreamType]: ...
    def __getitem__(self, key: str | int | slice) -> StreamType | list[StreamType]:
        if not isinstance(key, str):
            return list(self)[key]
        if key not in self:
            raise KeyError(f"{type(self).__name__}: there is no stream '{key}'; available: {list(self.keys())}.")
        return self._streams[key]

    def __setitem__(self, name: str, stream: StreamType) -> None:
        self._streams[name] = stream

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[StreamType]:
        return iter(self._streams.values())

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._streams.keys()

    def values(self) -> ValuesView[StreamType]:
        """The streams."""
        return self._streams.values()

    def items(self) -> ItemsView[str, StreamType]:
        """Pairs of name and stream."""
        return self._streams.items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class InputStreams(AbstractStreams[popxl.HostToDeviceStream]):
    """Streams from the host, made from ``name=(shape, dtype)``, or from ``name=(shape, dtype, num_host_transfers)``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     ins = InputStreams(x=((4, 2), popxl.float32), label=((4,), popxl.int32))
        >>> ins.label is ins[1], [stream.shape for stream in ins]
        (True, [(4, 2), (4,)])
    """

    stream_init = staticmethod(popxl.h2d_stream)
    stream_type = popxl.HostToDeviceStream


class OutputStreams(AbstractStreams[popxl.DeviceToHostStream]):
    """Streams to the host, made from ``name=(shape, dtype)``, or from ``name=(shape, dtype, num_host_transfers)``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     outs = OutputStreams(loss=((), popxl.float32))
        >>> "loss" in outs
        True
    """

    stream_init = staticmethod(popxl.d2h_stream)
    stream_type = popxl.DeviceToHostStream
