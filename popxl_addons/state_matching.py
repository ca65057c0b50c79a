"""Matches between stored arrays and the variables of a session's state, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, cast, get_args

import numpy as np

from popxl.extend.arguments import word
from popxl.tensor import Constant, Variable
from popxl_addons import array_files, sharded_arrays
from popxl_addons.array_munging import unshard
from popxl_addons.named_tensors import NamedTensors

ReportMissingMethods = Literal["none", "warn", "error"]


def match_state(
    named: Mapping[str, Variable | Constant],
    what: str,
    source: str,
    stored: Mapping[str, array_files.LazyArray],
    report_missing: ReportMissingMethods,
    differences: Iterable[str] = (),
    maps: AbstractSet[str] = frozenset(),
) -> tuple[dict[Variable, array_files.LazyArray], str]:
    """Match arrays with variables by name.

    Args:
        source: the kind of the array's source, for messages.
        report_missing: as for `TaskSession.load_checkpoint`; with ``"error"``, missing names raise.
        differences: further differences, which are reported with the missing names.
        maps: file names in the source: memory-mapped variables with one of these need not be in `stored`.

    Returns:
        The array of each variable in the layout of that variable, and a text that lists missing names.

    Raises:
        ValueError: for all mismatches together.
    """
    word(report_missing, f"{what}: `report_missing`", get_args(ReportMissingMethods))
    stored = {name: _in_groups(named[name], a) if name in named else a for name, a in stored.items()}
    expected = {name for name, t in named.items() if name in stored or not _is_mapped_to(t, maps)}
    missing = [*key_differences(source, stored.keys(), expected), *differences]
    both = {name: (named[name], array) for name, array in stored.items() if name in named}
    others = {name: (t, a) for name, (t, a) in both.items() if (a.dtype, a.shape) != _on_host(t)}
    unfit = [
        f"`{name}` is {_brief(array.dtype, array.shape)} there and {_brief(*_on_host(t))} in the state{_parts_text(t)}"
        for name, (t, array) in others.items()
    ]
    if expected and expected.isdisjoint(stored):
        unfit = ["No name is on both sides: values are copied by their names in `state`, so these have to agree"]
    if any(_may_be_divided(t, array.shape) for t, array in others.values()):
        unfit.append(
            "If groups of replicas have parts of one value, say along which axis where the variable is made, with "
            "`group_axis`; if each has a value of its own, leave the variable out of `state`"
        )
    if unfit or (missing and report_missing == "error"):
        raise ValueError(f"{what}: nothing has been loaded. {'. '.join([*missing, *unfit])}.")
    values = {v: stored[name] for name, v in named.items() if name in stored and isinstance(v, Variable)}
    return values, ". ".join(missing)


def named_tensors(state: NamedTensors) -> dict[str, Variable | Constant]:
    """Variables and constants of a state by name."""
    return {name: cast("Variable | Constant", t) for name, t in state.to_dict().items()}


def is_saved_as_shards(t: Variable | Constant) -> bool:
    """Whether processes save separate shards; false for shared files and replicated values."""
    if not isinstance(t, Variable) or (t.initial is None and array_files.map_file(t.data) is not None):
        return False
    return t.retrieval_mode != "all_replicas" or t.replica_grouping.group_size == 1


def shard_spec(v: Variable) -> sharded_arrays.ShardSpec:
    """Host shape of a whole value, and the axis divided by its shards."""
    has_groups = v.replica_grouping.num_groups > 1
    return sharded_arrays.ShardSpec(shape=v.shape_on_host, axis=v.group_axis if has_groups else None)


def merged_value(t: Variable | Constant, array: np.ndarray) -> np.ndarray:
    """Merge group parts to a whole value; other arrays, including memory maps, unchanged."""
    if not isinstance(t, Variable) or t.group_axis is None or t.replica_grouping.num_groups == 1:
        return array
    if array.shape != t.shape_on_host or array_files.map_file(array):
        return array
    return unshard(array, t.group_axis)


def _in_groups(t: Variable | Constant, array: array_files.LazyArray) -> array_files.LazyArray:
    """Expand a whole value or group rows to one row per group of `t`; other arrays unchanged."""
    axis = t.group_axis if isinstance(t, Variable) else None
    if not isinstance(t, Variable) or axis is None or array.shape == t.shape_on_host:
        return array
    groups = t.replica_grouping.num_groups
    expected = (*t.shape[:axis], groups * t.shape[axis], *t.shape[axis + 1 :])
    has_rows = len(array.shape) == len(expected) + 1 and array.shape[0] > 0
    whole = sharded_arrays.join(array, axis) if has_rows else array
    if whole.shape != expected:
        return array
    return sharded_arrays.split(whole, groups, axis) if groups > 1 else whole


def _parts_text(t: Variable | Constant) -> str:
    """Whole-value spec for group parts."""
    if not isinstance(t, Variable) or t.group_axis is None or t.replica_grouping.num_groups == 1:
        return ""
    shape = list(t.shape)
    shape[t.group_axis] *= t.replica_grouping.num_groups
    return f", {shape} as one value"


def _may_be_divided(t: Variable | Constant, shape: tuple[int, ...]) -> bool:
    """Whether differing group partition might explain a mismatched value."""
    if not isinstance(t, Variable) or t.group_axis is not None:
        return False
    return t.replica_grouping.num_groups > 1 or len(shape) == len(t.shape) + 1


def key_differences(source: str, stored: AbstractSet[str], present: AbstractSet[str], where: str = "") -> list[str]:
    """Texts listing names present on one side only."""
    sides = {
        f"{source} keys not in state": stored - present,
        f"state keys not in {source.lower()}": present - stored,
    }
    of = f" (of `{where}`)" if where else ""
    return [f"{text}: {', '.join(sorted(names))}{of}" for text, names in sides.items() if names]


def _is_mapped_to(t: Variable | Constant, names: AbstractSet[str]) -> bool:
    if isinstance(t, Variable) and t.initial is not None:
        return False
    file = array_files.map_file(t.data)
    return file is not None and file.name in names


def _on_host(t: Variable | Constant) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Host dtype and shape; one row per replica for per-replica reads."""
    shape = t.shape_on_host if isinstance(t, Variable) else t.shape
    if isinstance(t, Variable) and t.retrieval_mode == "all_replicas" and t.replica_grouping.group_size > 1:
        shape = (len(t.replica_grouping.assignment), *t.shape)
    return t.dtype.as_numpy(), shape


def _brief(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype.names[0] if dtype.names else dtype.name}{list(shape)}"  # float8 has a name
