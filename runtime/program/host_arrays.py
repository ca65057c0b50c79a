"""Host arrays of a program's streams: validation, conversion and output."""

from __future__ import annotations

import contextlib
import math
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from popxl.base.arguments import check_type
from popxl.core.rounding import RoundingKey, next_key, seed_of
from popxl.errors import PopxlRuntimeError
from popxl.fp8_utils import in_transit, to_host
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.transforms.jax_keys import key_data
from popxl.utils import downcast_np_dtypes, narrowed, to_numpy
from runtime.lowering.channels import encode_transfer
from runtime.lowering.platform_hooks import hooks_for
from runtime.program.layout import Layout
from runtime.signals import defer_signals


class Outputs(UserDict[DeviceToHostStream, np.ndarray], dict[DeviceToHostStream, np.ndarray]):  # type: ignore[misc]
    """Results of a run, keyed by stream. Arrays are copied from the device on first access.

    It is a `dict` for `isinstance`; but its contents are in `data`, because a `dict` would return them before they are
    fetched. (A C function that bypasses the methods of `dict` finds it empty.)
    """

    def __init__(self, arrays: dict[DeviceToHostStream, Any]) -> None:
        self.data = arrays  # not copied: filling another dict would be a tenth of an empty run

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def wait(self) -> None:
        """Wait until the run ends, without fetching arrays."""
        jax.block_until_ready(list(self.data.values()))

    def __reversed__(self) -> Iterator[DeviceToHostStream]:
        return reversed(self.data)

    def __getitem__(self, stream: DeviceToHostStream) -> np.ndarray:
        try:
            array = self.data[stream]
        except KeyError:
            expected = ", ".join(map(str, self.data)) or "none"
            raise KeyError(
                f"Session.run: the program stores to no stream {stream!r}; those it stores to: {expected}. The "
                "keys are the streams themselves."
            ) from None
        if not isinstance(array, np.ndarray):
            host = to_host(np.asarray(array), stream.dtype)
            array = self.data[stream] = host if host.flags.writeable else host.copy()
        return array


class HostArrays:
    """Host arrays of one program's streams.

    Args:
        layout: placement of the program's inputs and outputs.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._copy_feed = hooks_for(layout.compile_target.platform).copy_feed
        given = [s for s in layout.inputs if not isinstance(s, RoundingKey)]
        self._inputs = frozenset(given)
        excess = (s for s, count in layout.counts.items() if count > layout.capacity[s])
        self._excess = tuple(s for s in excess if s not in layout.limited)
        self._expected = tuple((s, layout.host_shape(s), in_transit(s.dtype)) for s in given)
        self._unread = self._inputs.difference(layout.used_inputs)
        kept = layout.kept_outputs
        self._kept = tuple(np.zeros(layout.host_shape(s), in_transit(s.dtype)) for s in kept)
        self._rounding = next((i for i, s in enumerate(layout.used_inputs) if isinstance(s, RoundingKey)), None)

    # In -------------------------------------------------------------------------------------------------------------

    def feeds(self, inputs: Mapping[HostToDeviceStream, Any], downcast: bool) -> tuple[Any, ...]:
        """Validated feed arrays in program order. Validates all before using any; omits feeds without consumers.

        Raises:
            ValueError: for a missing or unexpected stream, an array of the wrong shape, or an object that is not an
                array.
            PopxlRuntimeError: for an array of the wrong dtype.
        """
        if self._excess:
            raise too_many_transfers(self._layout, max(self._excess, key=self._layout.counts.__getitem__))
        if type(inputs) is not dict and not isinstance(inputs, Mapping):  # the second takes longer
            raise TypeError(f"Session.run: `inputs` maps streams to arrays; got {inputs!r} ({type(inputs).__name__}).")
        if inputs.keys() != self._inputs:
            _check_streams("input", [s for s, *_ in self._expected], inputs)
        arrays = []
        for stream, shape, dtype in self._expected:
            array = inputs[stream]
            if type(array) is np.ndarray and array.dtype == dtype and array.shape == shape:
                # The program may read it after `run` has returned, when the caller fills it with the next batch.
                arrays.append(self._copy_feed(array))
            else:
                arrays.append(self._converted(stream, array, shape, dtype, downcast))
        if self._unread:
            return tuple(array for (s, *_), array in zip(self._expected, arrays, strict=True) if s not in self._unread)
        return tuple(arrays)

    def completed(self, feeds: tuple[Any, ...]) -> tuple[Any, ...]:
        """Feeds of a run, including the key of stochastic rounding if the program rounds, and what outputs hold that it
        may leave as they are."""
        if self._rounding is not None:
            ir = self._layout.main.ir
            seed = seed_of(ir)
            assert seed is not None  # a session has made it
            key = np.array(np.broadcast_to(next_key(seed), self._layout.host_shape(ir.rounding_key)))
            feeds = (*feeds[: self._rounding], key, *feeds[self._rounding :])
        return (*feeds, *self._kept) if self._kept else feeds

    @contextlib.contextmanager
    def keeping(self, arrays: Mapping[DeviceToHostStream, np.ndarray]) -> Iterator[None]:
        """Runs in the block leave transfers as they are in these arrays, if no store writes them: zeros elsewhere."""

        def before_run(s: DeviceToHostStream) -> np.ndarray:
            shape, dtype = self._layout.host_shape(s), in_transit(s.dtype)
            return np.array(self._converted(s, arrays[s], shape, dtype, downcast=False))

        before = self._kept
        self._kept = tuple(map(before_run, self._layout.kept_outputs))
        try:
            yield
        finally:
            self._kept = before

    def _converted(self, stream: Stream, value: Any, shape: tuple[int, ...], dtype: Any, downcast: bool) -> Any:
        """Convert a feed that is not a NumPy array of the exact shape and dtype."""
        if isinstance(value, jax.Array) and value.shape == shape and value.dtype == dtype and not value.is_deleted():
            if value.sharding == self._layout.feed_sharding(stream):
                return value  # `jax.device_put` takes longer to find that it is in place
        array = self._fit_shape(stream, _array(stream, value, downcast), shape)
        if isinstance(array, jax.Array):
            array = defer_signals(partial(jax.device_put, array, self._layout.feed_sharding(stream)))
        host_dtype = stream.dtype.as_numpy()
        if array.dtype == dtype:
            return array
        if array.dtype == np.int64 and dtype == np.int32:
            return _narrowed(stream, np.asarray(array), dtype)
        if stream.dtype.is_float8 and array.dtype == stream.dtype.as_jax() and isinstance(array, jax.Array):
            return encode_transfer(array, stream.dtype)
        if array.dtype in (host_dtype, stream.dtype.as_jax()):
            return np.ascontiguousarray(array).reshape(array.shape).view(dtype)  # float8, as its bytes
        raise PopxlRuntimeError(
            f"Session.run: the array for {stream} has the dtype {getattr(value, 'dtype', array.dtype)}; expected "
            f"{host_dtype}. Pass `array.astype(np.{host_dtype})`."
        )

    def _fit_shape(self, stream: Stream, array: Any, shape: tuple[int, ...]) -> Any:
        """Adapt an array to its stream's shape where unambiguous: truncate longer arrays, reshape single elements.

        Raises:
            ValueError: for another shape.
            IndexError: for a scalar where one number for each transfer or replica is needed.
        """
        if array.shape == shape:
            return array
        given = array.shape
        transfers = self._layout.capacity[stream]
        own = stream.has_own_transfers
        if transfers > 1:
            if not array.shape or array.shape[0] < transfers:
                raise (ValueError if array.shape else IndexError)(
                    f"Session.run: the array for {stream} has the shape {array.shape}; its first dimension has to hold "
                    f"the {transfers} transfers of one run (`{'stream' if own else 'ir'}.num_host_transfers`), as in "
                    f"{shape}."
                )
            array = array[:transfers]
        one_number_each = len(array.squeeze().shape) <= len(shape) - len(stream.shape)
        if array.shape != shape and not (one_number_each and array.size == np.prod(shape)):
            reason = f" The stream has a number of transfers of its own: {transfers} a run." if own else ""
            reason += self._replica_hint(stream, given, shape)
            has_no_axis = not given and len(shape) > len(stream.shape)  # for the replicas
            raise (IndexError if has_no_axis else ValueError)(
                f"Session.run: the array for {stream} has the shape {given}; expected {shape}.{reason}"
            )
        return array.reshape(shape)

    def _replica_hint(self, stream: Stream, given: tuple[int, ...], shape: tuple[int, ...]) -> str:
        """Hint for a feed with the right elements, but without a replica dimension."""
        replicas = self._layout.replicas.local_count
        if replicas == 1 or not given:
            return ""
        hint = (
            f" Dimension {self._layout.axis(stream)} has the {replicas} replicas of this process, each with its rows: "
        )
        if math.prod(given) == math.prod(shape):
            return hint + "`array.reshape(session.host_shape(stream))`."
        if math.prod(given) * replicas == math.prod(shape):
            return hint + "stack an array for each replica, as in `session.host_shape(stream)`."
        return ""

    # Out ------------------------------------------------------------------------------------------------------------

    def check_outputs(self, arrays: Mapping[DeviceToHostStream, np.ndarray]) -> None:
        """Validate output arrays for a run; raises errors like `feeds`, and `TypeError` for non-arrays."""
        check_type(arrays, Mapping, "Session.run_with_outputs: `outputs`", "a mapping from streams to arrays")
        _check_streams("output", self._layout.outputs, arrays)
        for s in self._layout.outputs:
            if not isinstance(arrays[s], np.ndarray):
                raise TypeError(
                    f"Session.run_with_outputs: expected a NumPy array for {s} to be filled; got {arrays[s]!r} "
                    f"({type(arrays[s]).__name__})."
                )
            if not (arrays[s].flags.c_contiguous and arrays[s].flags.writeable):
                raise ValueError(
                    f"Session.run_with_outputs: the array for {s} cannot be filled: expected one that is C-contiguous "
                    "and can be written, such as `create_host_outputs` makes."
                )
            fitted = self._fit_shape(s, arrays[s], self._layout.host_shape(s))
            if fitted.dtype != s.dtype.as_numpy():
                raise PopxlRuntimeError(
                    f"Session.run_with_outputs: the array for {s} has the dtype {fitted.dtype}; expected "
                    f"{s.dtype.as_numpy()}."
                )

    def fill(
        self, arrays: Mapping[DeviceToHostStream, np.ndarray], results: Mapping[DeviceToHostStream, np.ndarray]
    ) -> None:
        """Copy results of a run into arrays. Unused transfer slots stay unchanged."""
        for s in self._layout.outputs:
            shape = (self._layout.capacity[s], self._layout.replicas.local_count, *s.shape)
            used = self._layout.counts[s]
            array = arrays[s][: shape[0]] if shape[0] > 1 else arrays[s]
            np.copyto(array.reshape(shape)[:used], results[s].reshape(shape)[:used])


def too_many_transfers(layout: Layout, stream: Stream) -> PopxlRuntimeError:
    """Build the error for a run whose transfers of a stream exceed its capacity."""
    count = layout.counts[stream]
    makes, where = (f"up to {count}", "one run, and did here") if stream in layout.limited else (count, "one run")
    setting = "its own `num_host_transfers`" if stream.has_own_transfers else "`ir.num_host_transfers`"
    return PopxlRuntimeError(
        f"Session.run: the program makes {makes} transfers of {stream} in {where}, and {setting} "
        f"was {layout.capacity[stream]} when the session was made. Set it to at least {count} before that."
    )


def _array(stream: Stream, value: Any, downcast: bool) -> Any:
    """Convert a feed to a JAX or NumPy array, narrowed to 32 bits if `downcast`. Raises `ValueError` if conversion or
    narrowing fails."""
    try:
        if isinstance(value, jax.Array):
            if value.is_deleted():
                raise ValueError("it has been deleted, or given to something that overwrote it.")
            return key_data([value])[0]
        is_wide = type(value) is np.ndarray and value.dtype in downcast_np_dtypes
        array = value if downcast and is_wide else to_numpy(value, downcast=False)
    except (TypeError, ValueError, RuntimeError) as problem:  # ragged lists, say, or tensors that NumPy does not know
        raise ValueError(
            f"Session.run: what was given for {stream}, a {type(value).__name__}, is no array: {problem}"
        ) from problem
    target = downcast_np_dtypes.get(array.dtype) if downcast else None
    if target is None:
        return array
    return _narrowed(stream, array, target) if target == stream.dtype.as_numpy() else to_numpy(array)


def _narrowed(stream: Stream, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Narrow a feed to its stream's dtype; raises `ValueError` if a number does not fit."""
    return narrowed(array, dtype, f"Session.run: the array for {stream}")


def _check_streams(what: str, expected: Iterable[Stream], given: Mapping[Any, Any]) -> None:
    """Raise `ValueError` naming all missing and unexpected streams."""
    wanted = dict.fromkeys(expected)
    missing = [str(s) for s in wanted if s not in given]
    unexpected = [repr(s) for s in given if not isinstance(s, Stream) or s not in wanted]
    problems = [
        f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if any(isinstance(s, Stream) and s not in wanted and str(s) in map(str, wanted) for s in given):
        problems.append("streams of another Ir may have the same names as these")
    if problems:
        raise ValueError(
            f"Session.run: the {what} streams do not match those that the program uses; {'; '.join(problems)}. "
            f"Expected are {', '.join(map(str, wanted)) or 'none'}; the keys are the streams themselves."
        )
