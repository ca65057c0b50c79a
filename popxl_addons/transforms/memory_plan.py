"""Memory plans: a treatment for each activation that a gradient graph takes from the forward pass, as data.

The activations that a gradient reads are inputs of its graph, so all are known before compilation. Each is *kept* from
the forward call to the backward call, *recomputed* in the backward call, or *offloaded*: kept in host memory meanwhile.
A `MemoryPolicy` chooses by a rule; a `MemoryPlan` states the choice for each, as data.
"""

from __future__ import annotations

import fnmatch
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from popxl.extend.arguments import check_type
from popxl.extend.files import replace_file
from popxl.extend.memory import StateLocation
from popxl.extend.pages import OnPage, Page, Table, bytes_text, seconds_text
from popxl.extend.source import SourceLocation, user_frame, warn_at
from popxl_addons.transforms.activations import Treatment, matches_nothing, without_repeated_scopes

CalledGraphs = Literal["inlined", "rolled", "batched"]
"""Mode of called graphs that a plan is made for, as in `ir.options.calledGraphs`."""


class PlannedActivation(BaseModel):
    """Treatment of one activation in a plan.

    Attributes:
        path: the name of the activation within its graph.
        treatment: `"keep"`, `"recompute"` or `"offload"`.
        line: line of the program that computes it: `model.py:12`.
        bytes: memory that keeping one needs, on each replica; 0 for a transposed input, which gradients read itself.
        operations: floating-point operations to compute it from the operands of the op that makes it. Views, such as
            reshapes, have those of the op before them, unless its result is an activation of the plan, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    treatment: Treatment
    line: str = ""
    bytes: int = 0
    operations: int = 0


class GraphPlan(BaseModel):
    """Plan of one forward graph, or of one group of its calls.

    Attributes:
        graph: the name of the graph.
        calls: number of calls in a step; if a plan has several groups of calls of one graph, of those in the group.
        activations: activations of the graph, in order.
        model: name of the model that calls the graph, in a plan for several models.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    graph: str
    calls: int = 1
    activations: tuple[PlannedActivation, ...]
    model: str = ""

    @model_serializer(mode="wrap")
    def _serialized(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return fields if self.model else {name: value for name, value in fields.items() if name != "model"}

    @property
    def key(self) -> tuple[str, str]:
        """Names of the model and the graph: plans of groups of calls have them in common."""
        return self.model, self.graph

    def bytes(self, treatment: Treatment) -> int:
        """Total bytes of activations with a treatment, over all calls."""
        return self.calls * sum(a.bytes for a in self.activations if a.treatment == treatment)

    def paths(self, treatment: Treatment) -> tuple[str, ...]:
        """Paths of activations with a given treatment."""
        return tuple(a.path for a in self.activations if a.treatment == treatment)

    def with_treatment(self, treatment: Treatment, patterns: Iterable[str]) -> Self:
        """Copy of the plan with a new treatment for activations whose paths match any pattern."""
        paths = [a.path for a in self.activations]
        matches = {path for pattern in patterns for path in _matches(paths, pattern)}
        lines = [a.model_copy(update={"treatment": treatment}) if a.path in matches else a for a in self.activations]
        return self.model_copy(update={"activations": tuple(lines)})


class MemoryPlan(OnPage, BaseModel):
    """Treatment of every activation in called graphs, with JSON form.

    `train_step` applies one and returns it; edit the JSON, or `with_treatments`, and apply the result in its place.

    A plan for several models of a program has the graphs of all of them. Give it to each: the model applies what the
    plan says of it. Models have the names of their graphs; equal names are numbered in the order of the program:
    `Model`, `Model#2`.

    Attributes:
        graphs: the plans of the graphs, in the order of their first calls. Several plans of one graph are of groups of
            its calls: the first is of its first calls, the next of those that follow.
        micro_batches: number of micro-batches of a batch, for `train_step(micro_batches="auto")`.
        optimizer_state: where the state of the optimiser is between steps, for `train_step(optimizer_state="auto")`.
        logit_chunks: number of chunks of the logits of losses, where the model leaves it open; see `chunk_logits`.
        budget: bytes of a device that the plan was made for; 0 for none. It becomes `ir.options.memoryBudget`.
        called_graphs: mode of called graphs that the plan was made for, if it was chosen. It becomes
            `ir.options.plannedCalls`, for GPUs and TPUs.

    Example:
        >>> line = PlannedActivation(path="scores", treatment="keep", bytes=64, line="model.py:3")
        >>> plan = MemoryPlan(graphs=(GraphPlan(graph="block", calls=2, activations=(line,)),))
        >>> plan = plan.with_treatments("recompute", "score*")
        >>> MemoryPlan.model_validate_json(plan.model_dump_json()) == plan
        True
        >>> print(plan)
        Memory plan
        <BLANKLINE>
          block, called 2 times: 0 B kept, 128 B recomputed, 0 B offloaded
        <BLANKLINE>
          activation   line         bytes   treatment   operations to recompute it
          scores       model.py:3    64 B   recompute                            0
        >>> plan = plan.with_treatments("keep", "scores", calls=slice(-1, None))
        >>> [(each.calls, each.paths("keep")) for each in plan.graphs]
        [(1, ()), (1, ('scores',))]
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    graphs: tuple[GraphPlan, ...]
    micro_batches: int = Field(default=1, ge=1)
    optimizer_state: StateLocation = "device"
    logit_chunks: int = Field(default=1, ge=1)
    budget: int = Field(default=0, ge=0)
    called_graphs: CalledGraphs | None = None

    @classmethod
    def of_models(cls, plans: Mapping[str, MemoryPlan]) -> Self:
        """One plan for several models, from the plan of each by its name.

        What a plan states of the whole program, such as its budget, is that of the first one. `TypeError` for values
        that are no plans, `ValueError` for the plan of another model, or of several.
        """
        for name, plan in plans.items():
            check_type(plan, MemoryPlan, f"of_models: the plan of {name!r}", "a MemoryPlan")
            if plan.models not in ((), (name,)):
                raise ValueError(
                    f"of_models: the plan of {name!r} is of the models {[*plan.models]}; expected that of one model, "
                    "such as `plan.for_model(...)`."
                )
        first = next(iter(plans.values()), cls(graphs=()))
        graphs = (graph.model_copy(update={"model": name}) for name, plan in plans.items() for graph in plan.graphs)
        return cls.model_validate({**dict(first), "graphs": tuple(graphs)})

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, if the plan is for several."""
        return tuple(dict.fromkeys(graph.model for graph in self.graphs if graph.model))

    def for_model(self, name: str) -> Self:
        """Plan of one of the `models`, to edit it, and to apply it alone. `ValueError` for another name.

        Example:
            >>> graph = GraphPlan(graph="block", activations=(PlannedActivation(path="scores", treatment="keep"),))
            >>> plan = MemoryPlan.of_models(dict.fromkeys(["Teacher", "Model"], MemoryPlan(graphs=(graph,))))
            >>> own = {name: plan.for_model(name) for name in plan.models}
            >>> own["Model"] = own["Model"].with_treatments("recompute", "scores")
            >>> [(each.model, each.paths("keep")) for each in MemoryPlan.of_models(own).graphs]
            [('Teacher', ('scores',)), ('Model', ())]
        """
        if name not in self.models:
            models = f"the models {[*self.models]}" if self.models else "one model, without a name"
            raise ValueError(f"for_model: there is no model {name!r}; the plan is of {models}.")
        graphs = (graph.model_copy(update={"model": ""}) for graph in self.graphs if graph.model == name)
        return self.model_copy(update={"graphs": tuple(graphs)})

    def write_json(self, file: str | Path) -> None:
        """Write the plan to a JSON file."""
        replace_file(Path(file), (self.model_dump_json(indent=2) + "\n").encode())

    @classmethod
    def read_json(cls, file: str | Path) -> Self:
        """Read a plan that `write_json` has written. `ValueError` for a file that holds none."""
        try:
            return cls.model_validate_json(Path(file).read_bytes())
        except ValidationError as error:
            raise ValueError(f"MemoryPlan.read_json: {str(file)!r} holds no memory plan: {error}") from error

    def bytes(self, treatment: Treatment) -> int:
        """Total bytes of activations with a treatment, over all calls of all graphs."""
        return sum(graph.bytes(treatment) for graph in self.graphs)

    def with_treatments(self, treatment: Treatment, *patterns: str, calls: slice = slice(None)) -> Self:  # noqa: B008
        """Copy of the plan with new treatments for some activations.

        Args:
            treatment: `"keep"`, `"recompute"` or `"offload"`.
            *patterns: paths of activations, as the plan prints them; `*` and `?` stand for any characters.
            calls: calls of each graph that are meant, in the order in which a step makes them: `slice(8)` is the first
                eight, `slice(-1, None)` the last one. By default all.

        Raises:
            TypeError: if a pattern is not text, or `calls` not a slice of integers.
            ValueError: for an unknown treatment, a pattern that matches no activation, and `calls` with a step.

        Warns of `calls` beyond those of each graph, which change nothing.
        """
        if treatment not in get_args(Treatment):
            treatments = ", ".join(map(repr, get_args(Treatment)))
            raise ValueError(f"with_treatments: `treatment` is {treatment!r}; expected one of {treatments}.")
        check_type(calls, slice, "with_treatments: `calls`", "a slice, such as `slice(8)` for the first eight calls")
        for pattern in patterns:
            check_type(pattern, str, "with_treatments: each of `patterns`", "a path as the plan prints it, such as '*'")
        if not all(bound is None or isinstance(bound, SupportsIndex) for bound in (calls.start, calls.stop)):
            raise TypeError(f"with_treatments: `calls` is {calls}; expected integers, such as `slice(8)`.")
        if calls.step not in (None, 1):
            raise ValueError(f"with_treatments: `calls` is {calls}; expected calls that follow each other, so no step.")
        paths = [activation.path for graph in self.graphs for activation in graph.activations]
        if missing := [pattern for pattern in patterns if not _matches(paths, pattern)]:
            raise ValueError(matches_nothing("with_treatments", missing, paths))
        totals, calls_before = self._calls(), Counter[tuple[str, str]]()
        if totals and all(_is_beyond(calls, total) for total in totals.values()):
            counts = ", ".join(f"{total} of {graph}" for (_, graph), total in totals.items())
            warn_at(
                SourceLocation.of(user_frame()),
                f"with_treatments: `calls` is {calls}, which selects no call; there are {counts}.",
                UserWarning,
            )
        graphs: list[GraphPlan] = []
        for graph in self.graphs:
            first, last = calls_before[graph.key], calls_before[graph.key] + graph.calls
            start, stop, _ = calls.indices(totals[graph.key])
            calls_before[graph.key] = last
            bounds = sorted({first, last, *(bound for bound in (start, stop) if first < bound < last)})
            for begin, end in pairwise(bounds):
                segment = graph.model_copy(update={"calls": end - begin})
                segment = segment.with_treatment(treatment, patterns) if start <= begin < stop else segment
                graphs.append(segment)
        return self.model_copy(update={"graphs": tuple(_merged(graphs))})

    @property
    def besides(self) -> str:
        """Other choices of the plan as text: "4 micro-batches, the state of the optimiser on the host, logits in 2
        chunks"."""
        batches = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        state = "the state of the optimiser on the host" if self.optimizer_state == "host" else ""
        logits = f"logits in {self.logit_chunks} chunks" if self.logit_chunks > 1 else ""
        return ", ".join(text for text in (batches, state, logits) if text)

    def _calls(self) -> Counter[tuple[str, str]]:
        totals = Counter[tuple[str, str]]()
        for graph in self.graphs:
            totals[graph.key] += graph.calls
        return totals

    def page(self, host_bandwidth: float | None = None) -> Page:
        """Page for `print` and notebooks.

        Args:
            host_bandwidth: bytes per second between a device and its host; without it, there is no column of the time
                to copy an activation to the host and back.
        """
        columns = ["activation", "line", "bytes", "treatment", "operations to recompute it"]
        if host_bandwidth is not None:
            columns.append("to the host and back")
        content: list[str | Table] = [f"In addition: {self.besides}."] if self.besides else []
        if self.budget:
            calls = f", with called graphs {self.called_graphs}" if self.called_graphs else ""
            content.append(f"It was made for {bytes_text(self.budget)} of a device{calls}.")
        totals, calls_before, model = self._calls(), Counter[tuple[str, str]](), ""
        for graph in self.graphs:
            if graph.model != model:
                model = graph.model
                content.append(f"Model {model}: {_totals(each for each in self.graphs if each.model == model)}")
            total, first = totals[graph.key], calls_before[graph.key] + 1
            calls_before[graph.key] += graph.calls
            if graph.calls == total:
                calls = "called once" if total == 1 else f"called {total} times"
            else:
                numbers = f"call {first}" if graph.calls == 1 else f"calls {first} to {calls_before[graph.key]}"
                calls = f"{numbers} of {total}"
            content.append(f"{graph.graph}, {calls}: {_totals([graph])}")
            rows = []
            for a in graph.activations:
                copies = [] if host_bandwidth is None else [seconds_text(2 * a.bytes / host_bandwidth)]
                rows.append([a.path, a.line, bytes_text(a.bytes), a.treatment, str(a.operations), *copies])
            content.append(Table(columns, rows))
        if not self.graphs:
            content.append("The gradients read no activations that could be recomputed.")
        return Page("Memory plan", content)


def _totals(graphs: Iterable[GraphPlan]) -> str:
    """Bytes of activations by treatment: "1 MB kept, 2 MB recomputed, 0 B offloaded"."""
    totals = Counter[Treatment]()
    for graph in graphs:
        totals.update({treatment: graph.bytes(treatment) for treatment in get_args(Treatment)})
    return "{} kept, {} recomputed, {} offloaded".format(*(bytes_text(totals[each]) for each in get_args(Treatment)))


def _matches(paths: Sequence[str], pattern: str) -> list[str]:
    """Paths that a pattern matches, or else those that it matches without repeated scopes, as of older plans."""
    matches = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    shorter = without_repeated_scopes(pattern)
    return matches if matches or shorter == pattern else _matches(paths, shorter)


def _is_beyond(calls: slice, total: int) -> bool:
    """Whether a slice selects calls that do not exist, and no others. Slices that end where they start, and the rest
    after or before all calls, select none on purpose."""
    if range(total)[calls] or calls in (slice(total, None), slice(-total)):
        return False
    return bool(range(sys.maxsize)[calls])


def _merged(groups: Iterable[GraphPlan]) -> Iterator[GraphPlan]:
    """Merge consecutive groups of calls with equal treatments."""
    for _, plans in groupby(groups, key=lambda plan: (plan.key, plan.activations)):
        first, *others = plans
        yield first.model_copy(update={"calls": first.calls + sum(plan.calls for plan in others)})
