"""Host copies of variables: reading, validating and writing values."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from popxl.core.tensor import Constant, Variable
from popxl.utils import narrowed


def host_value(t: Variable | Constant, values_of_all: Mapping[Variable, np.ndarray]) -> np.ndarray:
    """Host value of a variable or constant; one row per replica for variables retrieved from all replicas.

    Args:
        values_of_all: values of such variables on all replicas, if they have been downloaded.
    """
    if isinstance(t, Constant) or t.retrieval_mode != "all_replicas" or t.replica_grouping.group_size == 1:
        return t.data if isinstance(t, Constant) or t.replica_grouping.is_const else t.data.copy()
    if t in values_of_all:
        return values_of_all[t].copy()
    grouping = t.replica_grouping
    rows = t.data if grouping.num_groups > 1 else t.data[None]
    return rows[np.asarray(grouping.assignment)]


def write_host_values(data: Mapping[Variable, np.ndarray], copy: bool = True) -> None:
    """Overwrite host copies of variables.

    Args:
        copy: whether to copy these arrays. Otherwise they may become the host copies.
    """
    for v, array in data.items():
        if v.initial is None:
            np.copyto(v.data, array)
        else:  # its initial value need not be made
            v.data = np.array(array) if copy else array


def new_data(v: Variable, data: Any) -> np.ndarray:
    """Convert user data to an array of a variable's host dtype and shape; see `Session.write_variable_data`.

    Raises:
        TypeError: for any other dtype, or a complex number for a real variable.
        ValueError: for another shape, or a number that does not fit the dtype.
        AttributeError: for an object that is neither an array nor a number.
    """
    wanted = v.dtype.as_numpy()
    if isinstance(data, numbers.Number):
        if wanted.names:
            raise TypeError(f"Session.write_variable_data: {v!r} is a float8; expected an array of dtype {wanted}.")
        if np.asarray(data).dtype.kind == "c" and not v.dtype.is_complex:
            raise TypeError(
                f"Session.write_variable_data: the data for {v!r} is {data!r}, which is complex; expected a real "
                "number."
            )
        data = narrowed(np.asarray(data), wanted, f"Session.write_variable_data: the data for {v!r}")
    if not hasattr(data, "dtype"):
        raise AttributeError(
            f"Session.write_variable_data: the data for {v!r} is {data!r} ({type(data).__name__}); expected an "
            f"array: `np.asarray(data, np.{wanted})`."
        )
    if data.dtype != wanted:
        raise TypeError(
            f"Session.write_variable_data: the data for {v!r} has the dtype {data.dtype}; expected {wanted}."
        )
    if data.shape != v.shape_on_host:
        raise ValueError(
            f"Session.write_variable_data: the data for {v!r} has the shape {data.shape}; expected {v.shape_on_host}."
        )
    return np.asarray(data)
