"""Lags of actions: modulo scheduling of an iteration that goes through several IPUs.

In round `r` of a loop, the actions with lag `k` of iteration `r - k` are executed. The lag of an action is the number
of returns to an IPU on the way to it. Of a model on three IPUs, the forward stages and the last backward stage have lag
0, and the backward stages before it have 1 and 2. This is the schedule 1F1B: the first IPU is at most three iterations
ahead of the results, and the last one none.

An action has at least the lag of those that it has to follow, within an iteration or in the next one. Actions that have
to follow each other in both ways, such as all that use a value which each iteration changes, have the same lag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


@dataclass
class Use:
    """Uses of values by an action of an iteration. Values may be any objects.

    Attributes:
        reads: values that it reads.
        writes: values that it makes or overwrites.
        drops: values that are gone afterwards.
        ipu: IPU that computes; `None` for actions of the host.
        in_order: streams and buffers, which iterations use in their order.
    """

    reads: Sequence[Hashable] = ()
    writes: Sequence[Hashable] = ()
    drops: Sequence[Hashable] = ()
    ipu: int | None = None
    in_order: Sequence[Hashable] = ()


def lags_of(uses: Sequence[Use], carried: Mapping[Hashable, Hashable]) -> list[int]:
    """Lag of each action.

    Args:
        uses: uses of values by the actions of an iteration, in order.
        carried: values of the next iteration, with the values of this one that they are at its start.

    Example:
        >>> forward = [Use(["x"], ["y"], ipu=0), Use(["y"], ["z"], ipu=1)]
        >>> backward = [Use(["y", "z"], ["dy"], ipu=1), Use(["dy"], ["dx"], ipu=0)]
        >>> lags_of([*forward, *backward], {})
        [0, 0, 0, 1]
        >>> lags_of([*forward, *backward], {"x": "dx"})
        [0, 0, 0, 0]
    """
    follows = _order_within(uses)
    for before, after in _order_between(uses, carried):
        follows.setdefault((before, after), 0)
    if not follows:
        return [0] * len(uses)
    pairs = tuple(zip(*follows, strict=True))
    links = coo_array(([True] * len(follows), pairs), shape=(len(uses), len(uses)))
    _, group = connected_components(links, connection="strong")
    lags = defaultdict[int, int](int)
    is_raised = True
    while is_raised:
        is_raised = False
        for (before, after), returns in follows.items():
            lag = lags[group[before]] + returns
            if group[before] != group[after] and lags[group[after]] < lag:
                lags[group[after]], is_raised = lag, True
    rank = {lag: i for i, lag in enumerate(sorted({lags[g] for g in group}))}
    return [rank[lags[g]] for g in group]


def _order_within(uses: Sequence[Use]) -> dict[tuple[int, int], int]:
    """Pairs of actions in an iteration of which the second follows the first, with 1 if it returns to an IPU."""
    follows: dict[tuple[int, int], int] = {}
    writer: dict[Hashable, int] = {}
    readers: defaultdict[Hashable, list[int]] = defaultdict(list)
    visited: list[frozenset[int]] = []  # all IPUs on the way to each action, and the last ones
    latest: list[frozenset[int]] = []
    for i, use in enumerate(uses):
        sources = dict.fromkeys(writer[value] for value in use.reads if value in writer)
        own = frozenset(() if use.ipu is None else (use.ipu,))
        visited.append(own.union(*(visited[source] for source in sources)))
        latest.append(own or own.union(*(latest[source] for source in sources)))
        for source in sources:
            follows[source, i] = int(not own.isdisjoint(visited[source]) and latest[source] != own)
        for value in (*use.writes, *use.drops):
            for earlier in (*readers.pop(value, ()), *([writer[value]] if value in writer else ())):
                follows.setdefault((earlier, i), 0)
        writer.update(dict.fromkeys(use.writes, i))
        for value in (*use.reads, *use.drops):
            readers[value].append(i)
    return {pair: returns for pair, returns in follows.items() if pair[0] != pair[1]}


def _order_between(uses: Sequence[Use], carried: Mapping[Hashable, Hashable]) -> Iterator[tuple[int, int]]:
    """Pairs of an action and one of the next iteration that follows it."""
    users: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, use in enumerate(uses):
        for value in dict.fromkeys((*use.reads, *use.writes)):
            users[value].append(i)
    in_order: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, use in enumerate(uses):
        for channel in dict.fromkeys(use.in_order):
            in_order[channel].append(i)
    for value, origin in carried.items():
        for source in _origins(value, carried) if origin != value else ():
            yield from ((before, after) for before in users[source] for after in users[value] if before != after)
    written = {value for use in uses for value in use.writes}
    updated = (users[value] for value, origin in carried.items() if origin == value and value in written)
    for actions in (*in_order.values(), *updated):  # all of them have the same lag
        for before, after in pairwise(actions):
            yield before, after
            yield after, before


def _origins(value: Hashable, carried: Mapping[Hashable, Hashable]) -> list[Hashable]:
    """Values that one may be at the start of later iterations: some are handed on for several of these."""
    origins = [carried[value]]
    while (origin := carried.get(origins[-1])) is not None and origin not in origins:
        origins.append(origin)
    return origins
