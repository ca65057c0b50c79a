"""A memory plan applied during differentiation of a model: each called graph gets the gradient of its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args
from weakref import WeakKeyDictionary

import popxl
from popxl.extend.graphs import op_work, own_flops, through_calls
from popxl.extend.memory import GraphNeeds, Logits, StateLocation, Treatments, current_request
from popxl.extend.source import SourceLocation, user_frame, warn_at
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import activation_inputs, remap_grad_info
from popxl_addons.ops.weight_gather import gathers_weights
from popxl_addons.patterns import apply_patterns
from popxl_addons.transforms.activation_needs import graph_needs
from popxl_addons.transforms.activations import (
    Activation,
    MemoryPolicy,
    Treatment,
    candidates,
    is_kept_by_policy,
    is_transposed_input,
    matches_nothing,
)
from popxl_addons.transforms.call_groups import calls_in, divide_calls
from popxl_addons.transforms.gathered_weights import share_out_before_calls
from popxl_addons.transforms.logit_chunks import chunk_logits, logits_of
from popxl_addons.transforms.memory_plan import CalledGraphs, GraphPlan, MemoryPlan, PlannedActivation
from popxl_addons.transforms.recomputation import recompute_activations, recomputed_ops


class _AppliedPlan(NamedTuple):
    """Plan of a graph as applied, the gradient before that, and the gradient graph with the treatments."""

    plan: GraphPlan
    gradient: GradGraphInfo
    backward: popxl.Graph


@dataclass
class _PlannedGraph:
    """A graph with a plan of its own.

    Attributes:
        name: its name in plans, which groups of its calls have in common.
        calls: number of its calls.
        requested: its plan in the given memory plan, if it has one there.
        applied: the applied plan; `None` if no gradient flows through the graph.
    """

    name: str
    calls: int
    requested: GraphPlan | None = None
    applied: _AppliedPlan | None = None


class PlannedGradients:
    """Transform of called graphs, for `popxl.transforms.autodiff`, that applies a memory plan or policy.

    The planned graphs are those that the model calls directly or in its loops: usually layers. The graphs that these
    call are parts of them. Gathered weights are not part of a plan: they are gathered again where the gradient reads
    them, except for those that the model itself gathers last, which its gradient reads first. A model without calls is
    planned as a whole: call this with its gradient.

    Where the plan divides the calls of a graph into groups, each group but the first calls a copy of it from now on.

    Args:
        memory: a plan, which names each planned graph; or a policy for all of them.
        micro_batches, optimizer_state: what the program does besides, which its plan states.
        inputs_wait: whether inputs and kept products wait for a gradient in the gradients of called graphs, as in
            `jax.checkpoint`.

    Attributes:
        name: name of the model, unique among those of the program that `memory` was given to.
        gradient_graph: gradient graph of the model, once it is made.
    """

    def __init__(
        self,
        model: popxl.Graph,
        memory: MemoryPlan | MemoryPolicy,
        micro_batches: int = 1,
        optimizer_state: StateLocation = "device",
        inputs_wait: bool = False,
    ) -> None:
        if not isinstance(memory, MemoryPlan) and memory not in get_args(MemoryPolicy):
            policies = ", ".join(map(repr, get_args(MemoryPolicy)))
            raise ValueError(
                f"memory: expected a MemoryPlan, or one of {policies}; got {memory!r}. `train_step` and "
                "`value_and_grad` take a budget, too, such as '14 GB'."
            )
        self.memory = memory
        self._micro_batches, self._optimizer_state = micro_batches, optimizer_state
        self.model = model
        calls = Counter[popxl.Graph]()
        for op, times in calls_in(model):
            calls[op.called_graphs[0]] += times
        self.covers_model = not calls
        """Whether the model is planned as a whole: activations are then recomputed right before they are read."""
        self._inputs_wait = inputs_wait and not self.covers_model
        if self.covers_model:
            calls[model] = 1
        self._graphs = {graph: _PlannedGraph(name, calls[graph]) for graph, name in _names(calls).items()}
        self.name = _model_name(model, memory)
        self.gradient_graph: popxl.Graph | None = None
        self._tail = _tail_of(model)
        self._handwritten: set[popxl.Graph] = set()  # graphs whose gradients were not derived
        if isinstance(memory, MemoryPlan):
            self._divide_calls(memory)
            _compile_for(memory, model.ir)
        self._budget_request = current_request()
        if self._budget_request is not None:
            self._budget_request.applied.append(self)
        self._logit_chunks = chunks_for(memory, logits_of(model))
        if self._logit_chunks > 1:
            chunk_logits(model, self._logit_chunks)
            self._warn_of_whole_logits()

    def _warn_of_whole_logits(self) -> None:
        """Warn of a plan with logits in chunks, if the model has no loss that computes them so."""
        is_stated = isinstance(self.memory, MemoryPlan) and not self.memory.models and self._budget_request is None
        if is_stated and not any(op.op_type == "LinearCrossEntropy" for op in self.model.ops):
            warn_at(
                SourceLocation.of(user_frame()),
                f"memory: the plan has logits in {self._logit_chunks} chunks, and {self.model.title} has no loss for "
                "it: expected `ops.linear_cross_entropy`, or the cross entropy of a matrix product whose result "
                "nothing else reads. Take a plan that was made for this program, or state `logit_chunks` 1 in it.",
                UserWarning,
            )

    def warn_if_nothing_is_saved(self) -> None:
        """Warn of a whole model of which nothing is kept, if its backward pass follows its forward pass at once."""
        if self.covers_model and self.memory == "nothing" and self._budget_request is None:
            warn_at(
                SourceLocation.of(user_frame()),
                f"memory: {self.model.title} calls no graph, so it is planned as a whole, and 'nothing' computes all "
                "of it again before its gradients read it, at once: it needs as much memory as without. Call layers "
                "as graphs (`create_graph`), each of which is then computed again by itself, or keep some "
                "activations: memory='products'.",
                UserWarning,
            )

    @property
    def names(self) -> dict[popxl.Graph, str]:
        """Names of the planned graphs in plans."""
        return {graph: each.name for graph, each in self._graphs.items()}

    @property
    def plan(self) -> MemoryPlan:
        """The plan that was applied."""
        applied = (each.applied.plan for each in self._graphs.values() if each.applied is not None)
        if not isinstance(self.memory, MemoryPlan):
            return self._plan_of(applied, 0, None)
        plan = self._plan_of(applied, self.memory.budget, self.memory.called_graphs)
        return MemoryPlan.of_models({self.name: plan}) if self.memory.models else plan

    @property
    def needs(self) -> tuple[GraphNeeds, ...]:
        """Memory and time of the planned graphs, the input of a plan within a budget."""
        live = 1 if self._budget_request is None else self._budget_request.live_micro_batches.get(self.model, 1)
        return tuple(
            graph_needs(each.applied.gradient, each.applied.backward, each.name, self.model, live, self.covers_model)
            for each in self._graphs.values()
            if each.applied is not None
        )

    def plan_with(
        self, treatments: Treatments, budget: int = 0, called_graphs: CalledGraphs | None = None
    ) -> MemoryPlan:
        """Plan for the same model with new treatments for groups of calls, made for a budget."""
        graphs = []
        for each in self._graphs.values():
            if each.applied is not None:
                activations = candidates(each.applied.gradient)
                for group in treatments[each.name]:
                    lines = _planned_activations(
                        (a, "recompute" if a.is_gathered else group.treatments[a.path]) for a in activations
                    )
                    graphs.append(GraphPlan(graph=each.name, calls=group.calls, activations=lines))
        return self._plan_of(graphs, budget, called_graphs)

    def _plan_of(self, graphs: Iterable[GraphPlan], budget: int, called_graphs: CalledGraphs | None) -> MemoryPlan:
        return MemoryPlan(
            graphs=tuple(graphs),
            micro_batches=self._micro_batches,
            optimizer_state=self._optimizer_state,
            logit_chunks=self._logit_chunks,
            budget=budget,
            called_graphs=called_graphs,
        )

    def __call__(self, info: GradGraphInfo) -> GradGraphInfo:
        """Gradient of a called graph, with the treatments of its plan."""
        graph = info.forward_graph
        activations = candidates(info)
        share_out_before_calls(info.graph)
        if graph in self._graphs:
            gradient = self._planned(self._graphs[graph], info, activations)
        else:
            saved = [a.tensor for a in activations if self._is_kept("everything", a)]
            gradient = info if len(saved) == len(activations) else self._recomputing(info, saved)
        if graph is self.model:
            self.gradient_graph = gradient.graph
        return gradient

    def _planned(self, planned: _PlannedGraph, info: GradGraphInfo, activations: list[Activation]) -> GradGraphInfo:
        """Gradient of a planned graph under its plan, which is recorded as applied."""
        treatments = self._treatments(planned, activations)
        by_treatment: dict[Treatment, list[popxl.Tensor]] = {treatment: [] for treatment in get_args(Treatment)}
        for a in activations:
            by_treatment[treatments[a.path]].append(a.tensor)
        reads = {*activation_inputs(info).values()}
        _, recomputed = recomputed_ops(info, {*by_treatment["keep"], *by_treatment["offload"]})
        lines = _planned_activations((a, treatments[a.path]) for a in activations if a.tensor in reads | {*recomputed})
        plan = GraphPlan(graph=planned.name, calls=planned.calls, activations=lines)
        is_saved = all(
            treatments[a.path] == "keep" and not is_transposed_input(a.tensor) for a in activations if a.tensor in reads
        )
        gradient = info if is_saved else self._recomputing(info, by_treatment["keep"], by_treatment["offload"])
        planned.applied = _AppliedPlan(plan, info, gradient.graph)
        return gradient

    def _recomputing(
        self, info: GradGraphInfo, keep: Sequence[popxl.Tensor], offload: Sequence[popxl.Tensor] = ()
    ) -> GradGraphInfo:
        """A gradient that recomputes activations, except for those that are kept or offloaded."""
        if info.forward_graph not in self._handwritten:
            apply_patterns([info.graph])
        how = {"as_read": self.covers_model, "inputs_wait": self._inputs_wait}
        planned, _ = recompute_activations(info, keep, offload, **how)
        return planned

    def with_treatments(self, infos: Mapping[popxl.Graph, GradGraphInfo]) -> dict[popxl.Graph, GradGraphInfo]:
        """Existing gradients, such as handwritten ones, with the treatments of their plans."""
        first = {each.name: graph for graph, each in reversed(self._graphs.items())}
        planned = {}
        for graph, each in self._graphs.items():
            if (info := infos.get(first[each.name])) is not None:
                self._handwritten.add(graph)
                planned[graph] = self(info if graph is first[each.name] else remap_grad_info(info, graph, info.graph))
        return planned

    def _is_kept(self, policy: MemoryPolicy, activation: Activation) -> bool:
        """Whether a policy keeps an activation: "everything" includes weights that the model gathers last."""
        is_last = policy == "everything" and activation.tensor in self._tail
        return is_last or is_kept_by_policy(policy, activation)

    def _treatments(self, planned: _PlannedGraph, activations: list[Activation]) -> dict[str, Treatment]:
        """Treatment of each activation by path: by the policy, or as the plan states."""
        if not isinstance(self.memory, MemoryPlan):
            return {a.path: "keep" if self._is_kept(self.memory, a) else "recompute" for a in activations}
        if activations and self.memory.models and self.name not in self.memory.models:
            raise ValueError(
                f"memory: the plan is of the models {[*self.memory.models]}, and {self.name!r} is none of them. Give a "
                "plan to the same models as those that it was made for, in the same order if their names are equal; or "
                "plan this program anew."
            )
        requested = planned.requested
        if requested is None:  # no gradient flowed through the graph where the plan was made
            return {a.path: "keep" for a in activations}
        paths = [a.path for a in activations]
        names = {a.name: a.path for a in activations} | {a.long_path: a.path for a in activations}  # of older plans
        names |= {path: path for path in paths}
        if missing := [a.path for a in requested.activations if a.path not in names]:
            raise ValueError(matches_nothing(f"memory, the plan of {requested.graph}", missing, paths))
        stated: dict[str, Treatment] = {names[a.path]: a.treatment for a in requested.activations}
        return {path: stated.get(path, "recompute") for path in paths}

    def _divide_calls(self, plan: MemoryPlan) -> None:
        """Create one graph for each group of calls in the plan."""
        stated: dict[str, list[GraphPlan]] = {}
        for graph_plan in plan.graphs:
            if graph_plan.model in ("", self.name):
                stated.setdefault(graph_plan.graph, []).append(graph_plan)
        names = [*self.names.values()]
        if not stated.keys() <= {*names}:
            raise ValueError(
                f"memory: the plan is of the graphs {[*stated]}, and {self.model.title} calls {names}. A plan fits the "
                "program that it was made for: build that with a policy, such as memory='everything', and take the "
                "plan that it returns."
            )
        graphs: dict[popxl.Graph, _PlannedGraph] = {}
        for graph, planned in self._graphs.items():
            groups = stated.get(planned.name, [])
            if len(groups) <= 1:
                graphs[graph] = replace(planned, requested=next(iter(groups), None))
                continue
            copies = divide_calls(self.model, graph, [group.calls for group in groups])
            for copy, group in zip(copies, groups, strict=True):
                graphs[copy] = _PlannedGraph(planned.name, group.calls, group)
        self._graphs = graphs


def chunks_for(memory: MemoryPlan | MemoryPolicy, logits: Iterable[Logits]) -> int:
    """Number of chunks of logits: as a plan states; or as a tool requests, which gets to know that it is open."""
    requested = current_request()
    if requested is not None and memory is requested.request.memory:
        requested.open_logits.extend(logits)
        return requested.request.logit_chunks
    return memory.logit_chunks if isinstance(memory, MemoryPlan) else 1


_named: WeakKeyDictionary[popxl.Ir, list[tuple[MemoryPlan | MemoryPolicy, str]]] = WeakKeyDictionary()
"""Plans and policies that were given to models of a program, with the plain names of these."""


def _model_name(model: popxl.Graph, memory: MemoryPlan | MemoryPolicy) -> str:
    """Name of a model; a number follows that of each but the first with an equal name and the same plan."""
    plain, named = _plain_name(model), _named.setdefault(model.ir, [])
    is_plan = isinstance(memory, MemoryPlan)
    number = 1 + sum(name == plain and (m is memory or (is_plan and m == memory)) for m, name in named)
    named.append((memory, plain))
    return plain if number == 1 else f"{plain}#{number}"


def _plain_name(graph: popxl.Graph) -> str:
    """Name of a graph as its program states it."""
    return graph.name.partition("_subgraph")[0]


def _compile_for(plan: MemoryPlan, ir: popxl.Ir) -> None:
    """Compile a program as the plan was made for, where its options leave that open."""
    if plan.budget and not ir.options.memoryBudget:
        ir.options.memoryBudget = plan.budget
    if plan.called_graphs is not None:
        ir.options.plannedCalls = plan.called_graphs


def _tail_of(model: popxl.Graph) -> set[popxl.Tensor]:
    """Tensors that a model computes after its last call of a graph that gathers weights."""
    results: set[popxl.Tensor] = set()
    for op in reversed(model.ops):
        if gathers_weights(op):
            break
        results.update(op.outputs)
    return results


def _names(graphs: Iterable[popxl.Graph]) -> dict[popxl.Graph, str]:
    """Name of each graph, independent of other graphs in the program."""
    names: dict[popxl.Graph, str] = {}
    for graph in graphs:
        plain = _plain_name(graph)
        number = sum(name.partition("#")[0] == plain for name in names.values())
        names[graph] = f"{plain}#{number + 1}" if number else plain
    return names


def _planned_activations(treated: Iterable[tuple[Activation, Treatment]]) -> tuple[PlannedActivation, ...]:
    """Lines of a plan: activations with their treatments and operations."""
    planned = {a.tensor: (a, treatment) for a, treatment in treated}
    return tuple(
        PlannedActivation(
            path=a.path,
            treatment=treatment,
            line=a.line,
            bytes=a.nbytes,
            operations=sum(own_flops(op).total for op in _ops_behind(a.tensor, planned)),
        )
        for a, treatment in planned.values()
    )


def _ops_behind(t: popxl.Tensor, others: Container[popxl.Tensor]) -> Iterator[popxl.Op]:
    """The op that computes a tensor, and those before it as long as they are views."""
    *_, source = through_calls(t)
    op = source.producer
    if op is not None:
        yield op
        if op_work(op).is_view and op.inputs and op.inputs[0] not in others:
            yield from _ops_behind(op.inputs[0], others)


Memory = PlannedGradients | MemoryPlan | MemoryPolicy
"""Types of `memory` arguments: a plan, a policy, or either one prepared for a model."""
