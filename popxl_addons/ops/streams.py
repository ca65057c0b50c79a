"""A stream and its load or store in one step."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops


def host_load(
    t: Any, dtype: popxl.dtype, name: str, num_host_transfers: int | None = None
) -> tuple[np.ndarray, popxl.HostToDeviceStream, popxl.Tensor]:
    """A tensor `name` that is fed from the host, shaped like the sample `t` (an array, a NumPy scalar, a torch tensor).

    Returns the sample as a NumPy array of `dtype`, the stream ``<name>_stream``, and the tensor. The sample is not
    remembered: it has to be given to ``Session.run`` like any other input. `num_host_transfers` is as for
    `popxl.h2d_stream`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x_host, x_stream, x = host_load(np.ones((3, 2)), popxl.float32, "x")
        >>> x_host.dtype, x_stream.shape, x.shape
        (dtype('float32'), (3, 2), (3, 2))
    """
    stream = popxl.h2d_stream(tuple(np.shape(t)), dtype, f"{name}_stream", num_host_transfers)
    return popxl.utils.to_numpy(t, dtype), stream, ops.host_load(stream, name)


def host_store(t: popxl.Tensor, num_host_transfers: int | None = None) -> popxl.DeviceToHostStream:
    """Store `t` to a new stream ``<t.name>_stream`` and return the stream. `num_host_transfers` as in
    `popxl.d2h_stream`: 1 for a loss stored once per run.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     stream = host_store(popxl.variable([1.0, 2.0], name="v"))
        >>> stream.tensor_id
        'v_stream'
    """
    if not isinstance(t, popxl.Tensor):
        raise TypeError(
            f"host_store: `t` must be a Tensor; got {t!r} ({type(t).__name__}). Of a graph, store what a call of it "
            "returns: `(y,) = graph.call(x)`."
        )
    stream = popxl.d2h_stream(t.shape, t.dtype, f"{t.name}_stream", num_host_transfers)
    ops.host_store(stream, t)
    return stream
