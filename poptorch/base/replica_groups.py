"""Replica groups: sets of replicas sharing a value, for inputs and per-group parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import createPoptorchError


@dataclass(frozen=True)
class ReplicaGroups:
    """Partition of all replicas into equal-sized groups, each sharing one value.

    The distance between neighbours within a group is always `stride` replicas; `popxl.Ir.replica_grouping(stride,
    size)` defines the same groups in the same order.

    Attributes:
        replicas: number of replicas.
        size: number of replicas in each group, from 1, a value per replica, to `replicas`, one shared value.
        stride: distance in replicas between neighbours within a group; 1 for groups of one.

    Example:
        >>> ReplicaGroups.from_type(CommGroupType.Consecutive, 2, replicas=6).assignment
        (0, 0, 1, 1, 2, 2)
        >>> ReplicaGroups.from_type(CommGroupType.Orthogonal, 2, replicas=6).assignment
        (0, 1, 2, 0, 1, 2)
    """

    replicas: int
    size: int = 1
    stride: int = 1

    @classmethod
    def from_type(cls, group_type: CommGroupType, size: int, replicas: int) -> ReplicaGroups:
        """Replica groups specified by a `CommGroupType`.

        Args:
            group_type: `All`: one group; `NoGrouping`: one for each replica; `Consecutive`: neighbours form a group;
                `Orthogonal`: with `m` groups, replicas `m` apart do.
            size: number of replicas in each group; without effect for `All` and `NoGrouping`.

        Raises:
            ValueError: if groups of this size do not make up all replicas, or there is no such type.
        """
        group_type = CommGroupType(group_type)
        if group_type == CommGroupType.All:
            return cls(replicas, replicas)
        if group_type == CommGroupType.NoGrouping:
            return cls(replicas)
        if size < 1 or replicas % size:
            raise ValueError(
                f"Groups of {size} replicas do not make up {replicas}, the replication factor. Choose one of its "
                "divisors, or set `options.replicationFactor` first."
            )
        orthogonal = group_type == CommGroupType.Orthogonal and size > 1
        return cls(replicas, size, replicas // size if orthogonal else 1)

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.replicas // self.size

    @property
    def assignment(self) -> tuple[int, ...]:
        """Group index of each replica."""
        block = self.stride * self.size
        return tuple(r % self.stride + self.stride * (r // block) for r in range(self.replicas))


@dataclass(frozen=True)
class GroupedParameter:
    """A parameter with one value per replica group, stacked along the first dimension on the host.

    Attributes:
        groups: the groups. `forward` sees, on each replica, the row of its group.
        retrieval: values that are read back: one row for each group, or one for each replica. In the latter case the
            host's parameter has more rows from then on; those of the first replicas of the groups are used again.

    Example:
        >>> grouped = GroupedParameter(ReplicaGroups(4, 2), VariableRetrievalMode.AllReplicas)
        >>> grouped.to_host(np.array([5, 7]))
        array([5, 5, 7, 7])
        >>> grouped.to_device(np.array([5, 5, 7, 7]))
        array([5, 7])
    """

    groups: ReplicaGroups
    retrieval: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup

    def to_device(self, array: np.ndarray) -> np.ndarray:
        """Data for the `popxl.variable`: one row per group; with a single group, its value.

        Args:
            array: value on the host, with a row for each group; or for each replica, if `retrieval` says so.
        """
        assignment = self.groups.assignment
        if len(array) == len(assignment):
            array = array[[assignment.index(group) for group in range(self.groups.count)]]
        return array if self.groups.count > 1 else array[0]

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """Host value from variable data; the inverse of `to_device`."""
        rows = array if self.groups.count > 1 else array[None]
        return rows[list(self.groups.assignment)] if self.retrieval == VariableRetrievalMode.AllReplicas else rows


class ParameterProxy:
    """A parameter as an attribute of a wrapped model: the parameter itself, with its replica grouping.

    Args:
        parameter: parameter, with all operations of tensors.
        group: function called with the arguments of `replicaGrouping`; `None` for one value for all replicas.

    Example:
        >>> module = torch.nn.Linear(3, 2)
        >>> model = poptorch.inferenceModel(module, poptorch.Options().replicationFactor(4))
        >>> model.weight.replicaGrouping(
        ...     poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
        ... )
    """

    def __init__(
        self, parameter: torch.nn.Parameter, name: str, replicas: int, group: Callable[[GroupedParameter | None], None]
    ) -> None:
        vars(self).update(_parameter=parameter, _name=name, _replicas=replicas, _group=group)

    def replicaGrouping(
        self, comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
    ) -> None:
        """Assign separate values to replica groups. Call this before compilation.

        The parameter has a leading dimension, with a row for each group; `forward` sees the row of its group.

        Args:
            comm_group_type: arrangement of the groups; `All` means one value for all replicas, without that dimension.
            shards: number of replicas in each group.
            variable_retrieval_mode: whether to read back one value for each group or one for each replica.

        Raises:
            Error: for a parameter without dimensions, or if its first one is not the number of groups.
            ValueError: if groups of this size do not make up all replicas, or an argument is of another type.
        """
        if not isinstance(shards, int):
            raise ValueError(
                f"replicaGrouping: `shards` is {shards!r}; expected the number of replicas in each group, for the "
                f"parameter {self._name}."
            )
        groups = ReplicaGroups.from_type(comm_group_type, shards, self._replicas)
        retrieval = VariableRetrievalMode(variable_retrieval_mode)
        if comm_group_type == CommGroupType.All:
            self._group(None)
            return
        shape = tuple(self._parameter.shape)
        if not shape:
            raise createPoptorchError(
                f"replicaGrouping: the parameter {self._name} is a scalar and cannot have a value for each group of "
                f"replicas. Give it a leading dimension of {groups.count}, the number of groups."
            )
        if shape[0] != groups.count:
            raise createPoptorchError(
                f"replicaGrouping: the parameter {self._name} has the shape {list(shape)}; its first dimension should "
                f"be {groups.count}, the number of groups: {groups.replicas} replicas in groups of {groups.size}."
            )
        self._group(GroupedParameter(groups, retrieval))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # used by isinstance
        return type(self._parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_unwrapped, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._parameter, name, value)


def _unwrapped(value: Any) -> Any:
    return value._parameter if type(value) is ParameterProxy else value


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: ParameterProxy, *args: Any) -> Any:
        return operator.methodcaller(name, *map(_unwrapped, args))(self._parameter)

    return method


# Python looks for operators in classes only.
for _name in (set(dir(torch.Tensor)) - set(dir(ParameterProxy)) - {"__weakref__"}) | {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__", "__format__",
    "__dir__", "__reduce_ex__",
}:  # fmt: skip
    if _name.startswith("__") and callable(getattr(torch.Tensor, _name)):
        setattr(ParameterProxy, _name, _forwarded(_name))
