"""The models of a program whose memory is planned together: their graphs, and which of them are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from popxl.base.liveness import last_uses
from popxl.base.memory_requests import RequestedMemory
from popxl.core.recording import Op
from popxl.graph import Graph
from runtime.memory_plans.needs import GraphNeeds
from runtime.memory_plans.solver import Treatments


class PlannedModel(Protocol):
    """Model to which a memory plan was applied. Plans are values of the kit that applies them."""

    name: str
    model: Graph
    covers_model: bool
    gradient_graph: Graph | None

    @property
    def names(self) -> Mapping[Graph, str]:
        """Names of the planned graphs, which the model calls."""

    @property
    def needs(self) -> Sequence[GraphNeeds]:
        """Memory and time of these graphs."""

    @property
    def plan(self) -> Any:
        """The applied plan."""

    def plan_with(self, treatments: Treatments, *constraints: Any) -> Any:
        """Plan with other treatments."""


class PlannedModels:
    """Models of a program with a common memory plan.

    Several models have names: the plan states them, and the names of graphs in `needs` begin with them.

    Args:
        models: models to which the plan was applied, at least one.
        requested: request under which they were built.
    """

    def __init__(self, models: Sequence[PlannedModel], requested: RequestedMemory) -> None:
        self._requested = requested
        self.by_name = {each.name if len(models) > 1 else "": each for each in models}

    @property
    def models(self) -> tuple[Graph, ...]:
        """Graphs of the models."""
        return tuple(each.model for each in self.by_name.values())

    @property
    def are_whole(self) -> bool:
        """Whether each model is planned as a whole, as none calls graphs."""
        return all(each.covers_model for each in self.by_name.values())

    @property
    def graphs(self) -> Iterator[tuple[str, Graph]]:
        """Planned graphs, with the names that `needs` has."""
        for model, each in self.by_name.items():
            yield from ((_qualified(model, name), graph) for graph, name in each.names.items())

    @property
    def plan(self) -> Any:
        """The plan that was applied."""
        return self._joined({name: each.plan for name, each in self.by_name.items()})

    def plan_with(self, treatments: Treatments, *constraints: Any) -> Any:
        """Plan for the same models with new treatments; `constraints` as for the `plan_with` of each."""
        plans = {}
        for model, each in self.by_name.items():
            own = {name: treatments.get(_qualified(model, name), ()) for name in each.names.values()}
            plans[model] = each.plan_with(own, *constraints)
        return self._joined(plans)

    def _joined(self, plans: dict[str, Any]) -> Any:
        """One plan of several: it states what steps leave open as the tool requested it."""
        first = next(iter(plans.values()))
        if len(plans) == 1:
            return first
        requested = self._requested
        counts = {plan.micro_batches for plan in plans.values()}
        states = {plan.optimizer_state for plan in plans.values()}
        return first.of_models(plans).model_copy(
            update={
                "micro_batches": counts.pop() if len(counts) == 1 else requested.request.micro_batches,
                "optimizer_state": states.pop() if len(states) == 1 else requested.request.optimizer_state,
            }
        )

    @property
    def needs(self) -> tuple[GraphNeeds, ...]:
        """Memory and time of the planned graphs, with the other models in memory at the same time."""
        if len(self.by_name) == 1:
            return tuple(g for each in self.by_name.values() for g in each.needs)
        needs = {name: each.needs for name, each in self.by_name.items()}
        lives = {name: _Lifetime(each.model, each.gradient_graph) for name, each in self.by_name.items()}
        graphs = list[GraphNeeds]()
        for name, own in needs.items():
            others = {other: life for other, life in lives.items() if other != name}
            waiting = {other: lives[name].waiting_calls(life) for other, life in others.items()}
            for g in own:
                is_shared = self.models.count(lives[name].model) > 1  # its calls can be divided only once
                graphs.append(
                    replace(
                        g,
                        name=_qualified(name, g.name),
                        ends=() if is_shared else g.ends,
                        model=name,
                        live_models={
                            other: needs[other][0].live_steps if count is None else count
                            for other, count in waiting.items()
                            if count != 0 and needs[other]
                        },
                        ended_models=frozenset(
                            other for other, life in others.items() if lives[name].meets_gradients(life)
                        ),
                        ipus=lives[name].ipus,
                    )
                )
        return tuple(graphs)


def _qualified(model: str, graph: str) -> str:
    return f"{model}/{graph}" if model else graph


class _Interval(NamedTuple):
    """Position of an op, and of the last one that uses its results."""

    first: int
    last: int


class _Lifetime:
    """Time in which activations and gradients of a model are in memory.

    Attributes:
        graph: graph with all forward and backward calls; `None` if they are in several graphs, as in pipelines: then
            their order is unknown.
        forward: intervals from forward calls to the backward calls that use their results.
        backward: intervals from backward calls to the last use of their results.
    """

    def __init__(self, model: Graph, gradient: Graph | None) -> None:
        self.model = model
        forward_calls, backward_calls = model.call_sites, [] if gradient is None else gradient.call_sites
        self.ipus = frozenset(call.ipu for call in (*forward_calls, *backward_calls))
        callers = {call.graph for call in (*forward_calls, *backward_calls)}
        self.graph = callers.pop() if backward_calls and len(callers) == 1 else None
        self.forward: list[_Interval] = []
        self.backward: list[_Interval] = []
        if self.graph is None:
            return
        ops = self.graph.ops
        positions = {op: number for number, op in enumerate(ops)}
        in_backward, anywhere = set(backward_calls), last_uses((op.inputs for op in ops), self.graph.outputs)
        read = last_uses(op.inputs if op in in_backward else () for op in ops)

        def intervals(calls: Sequence[Op], uses: dict[Any, int]) -> list[_Interval]:
            return [
                _Interval(positions[call], max((uses[t] for t in call.outputs if t in uses), default=positions[call]))
                for call in calls
            ]

        self.forward, self.backward = intervals(forward_calls, read), intervals(backward_calls, anywhere)

    def waiting_calls(self, other: _Lifetime) -> int | None:
        """Calls of another model that wait for their gradients during a backward call of this one, at most; `None` if
        unknown."""
        if self.graph is None or self.graph is not other.graph:
            return None
        return max(sum(each.first < now < each.last for each in other.forward) for now, _ in self.backward)

    def meets_gradients(self, other: _Lifetime) -> bool:
        """Whether gradients of another model may be in memory during a backward call of this one."""
        if self.graph is None or self.graph is not other.graph:
            return True
        return any(each.first < now < each.last for now, _ in self.backward for each in other.backward)
