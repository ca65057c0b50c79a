"""Rows of ops that use remote buffers. What a buffer is filled with, and what is refused: test_remote_buffer.py."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ops
from tests.popxl.ops.rows.schema import ANY, Row, bad, over


def stored(t: Any) -> tuple[popxl.RemoteBuffer, popxl.Tensor]:
    """A buffer with `t` in its second slot, and the number of that."""
    buffer, slot = popxl.remote_buffer(t.shape, t.dtype, entries=2), popxl.constant(1, popxl.uint32, "slot")
    assert ops.remote_store(buffer, slot, t) is None
    return buffer, slot


def loaded(t: Any) -> popxl.Tensor:
    return ops.remote_load(*stored(t), "w")


def loaded_in_place(t: Any) -> popxl.Tensor:
    return ops.remote_load_(*stored(t), ops.init(t.shape, t.dtype, "room"))


SAMPLES = over(ANY, (2, 3)) + over("float32 int32", ()) + over("float16", (1,))
NO_BUFFER = bad(TypeError, "expected a RemoteBuffer, got 1", 1, 0, None)

REMOTE = [
    Row("remote_load", lambda t: t, SAMPLES, "RemoteStore Init RemoteLoad", "w_remote_loaded", adds=3, tolerance=0,
        build=loaded, colocated=False, bad=[NO_BUFFER]),
    Row("remote_load_", lambda t: t, SAMPLES, "RemoteStore Init RemoteLoadInplace", "remote_load_inplace_out", adds=3,
        tolerance=0, build=loaded_in_place, colocated=False, bad=[NO_BUFFER]),
    Row("remote_store", lambda t: t, SAMPLES, "RemoteStore Init RemoteLoad", "", tolerance=0, build=loaded,
        colocated=False, bad=[NO_BUFFER]),
]  # fmt: skip
