"""`ModelGraph`: the forward graph of a captured model, and its gradient graph in training."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cached_property

import popxl
from poptorch.base.logging_ import logger
from poptorch.capture.logit_chunks import logits_of, with_logit_chunks
from poptorch.capture.model import Captured
from poptorch.capture.outlining import outlined
from poptorch.capture.trace import Node, Value
from poptorch.errors import createPoptorchError
from poptorch.lowering import Emission
from poptorch.lowering.emission import spec_of
from poptorch.options import Options
from poptorch.program.recomputation import Recomputation
from popxl import ops
from popxl.extend.graphs import leading_to, reading_ipus
from popxl.extend.memory import current_request
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import activation_inputs
from popxl_addons.transforms.planned_gradients import PlannedGradients, chunks_for
from popxl_addons.transforms.recomputation import recompute_activations

Tensors = dict[str, popxl.Tensor]
"""Tensors of a graph by key: names of parameters and buffers; those of inputs after a slash; others after two."""

RANDOM, INDEX, VALUES, LARGEST, SLOT = "//random", "//turn", "//values", "//largest", "//number"

GRADIENT, UPDATED = "Gradient___", "UpdatedVar___"
"""Prefixes of names of gradients and of updated parameters."""


class ModelGraph:
    """Forward graph of a model, and in training its gradient graph.

    Args:
        requested: names of further tensors that it returns.
        trained: names of the optimiser's parameters, in training.

    Attributes:
        graph: the forward graph.
        inputs: inputs of the graph, by key of `Tensors`.
        emission: tensors of the graph by value.
        anchored: outputs that were requested by name.
        names: names of tensors that can be requested.
        gradient: the gradient graph of the loss; `None` if nothing is trained.
        trained: parameters with a gradient, as inputs of the graph.

    Raises:
        poptorch.Error: if something cannot be lowered, and for unknown names.
    """

    def __init__(
        self,
        ir: popxl.Ir,
        captured: Captured,
        leaves: Sequence[str],
        outputs: list[Value],
        requested: Sequence[str],
        loss: Value | None,
        trained: Sequence[str] | None,
        options: Options,
        name: str,
    ) -> None:
        self.loss, self._options = loss, options
        self.trained: Tensors = {}
        within = self._requested_within(captured, leaves, requested)
        nodes = captured.trace.without_unused(outputs)
        if not within:  # logits may be among what is requested
            nodes = with_logit_chunks(nodes, outputs, self._logit_chunks(nodes, outputs))
        nodes = self._prepared_nodes(nodes, outputs, trained is not None, within)
        used = {id(value) for node in nodes for value in node.inputs} | set(map(id, outputs))
        self.graph = ir.create_empty_graph(name)
        self.inputs: Tensors = {}
        self.emission = Emission(
            lambda: self.input(RANDOM, popxl.TensorSpec((2,), popxl.uint32)), any(node.placement.unit for node in nodes)
        )
        self.anchored: Tensors = {}
        inputs = {f"/{leaf}": value for leaf, value in zip(leaves, captured.inputs, strict=True)}
        slots = {f"{SLOT}{number}": value for number, value in enumerate(captured.slots)}
        with self.graph:
            for key, value in (inputs | captured.state | slots).items():
                if id(value) in used and id(value) not in self.emission.tensors:
                    self.emission.bind([value], [self.input(key, spec_of(value))])
            self.emission.write(nodes)
            for value in dict.fromkeys(outputs):
                t = self.emission.tensor(value)
                if t in self.graph.inputs or t in self.graph.outputs:
                    t = ops.identity(t)
                    self.emission.bind([value], [t])
                popxl.graph_output(t)
            self._anchor(requested)
        self.gradient = self._differentiate(trained)
        self._name_trained(requested)

    def input(self, key: str, spec: popxl.TensorSpec) -> popxl.Tensor:
        """Get or create a graph input."""
        if key not in self.inputs:
            with self.graph:
                self.inputs[key] = popxl.graph_input(spec.shape, spec.dtype, key.lstrip("/"))
        return self.inputs[key]

    def _logit_chunks(self, nodes: Sequence[Node], outputs: Sequence[Value]) -> int:
        """Number of chunks of logits that the memory plan states, or a tool requests."""
        plan, requested = self._options.Training.memory_plan, current_request()
        if requested is not None and requested.replaces(plan):
            plan = requested.request.memory
        return 1 if plan is None else chunks_for(plan, logits_of(nodes, outputs))

    def _prepared_nodes(
        self, nodes: list[Node], outputs: list[Value], is_trained: bool, requested: Sequence[str]
    ) -> list[Node]:
        """The nodes, recomputed and outlined as the options say; not recomputed if any of them is requested by name."""
        recomputation = Recomputation(self._options, nodes) if is_trained else None
        if recomputation is not None and requested:
            recomputation.leave_out(nodes, requested)
            recomputation = None
        if recomputation is not None:
            nodes = recomputation.before_outlining(nodes)
        if self._options._Popart.options.get("enableOutlining", True):
            nodes = outlined(nodes, outputs)
        return nodes if recomputation is None else recomputation.after_outlining(nodes, outputs)

    @staticmethod
    def _requested_within(captured: Captured, leaves: Sequence[str], requested: Sequence[str]) -> list[str]:
        """Names of requested tensors computed by ops inside the model."""
        others = {"loss", *captured.state, *map(_name_of, leaves)}
        return [name for name in requested if name not in others and not name.startswith((GRADIENT, UPDATED))]

    def _anchor(self, requested: Sequence[str]) -> None:
        """Add graph outputs for model tensors requested by name."""
        named = {_name_of(key): t for key, t in self.inputs.items() if not key.startswith("//")}
        if self.loss is not None:
            named["loss"] = self.emission.tensor(self.loss)
        named |= {t.name: t for op in self.graph.ops for t in op.outputs if t.name not in named}
        self.names = tuple(named)
        for name in requested:
            if name in named:
                t = named[name]
                if t in self.graph.inputs:
                    t = ops.identity(t)
                if t not in self.graph.outputs:
                    popxl.graph_output(t)
                self.anchored[name] = t

    def _differentiate(self, names: Sequence[str] | None) -> GradGraphInfo | None:
        """Gradient graph of the loss by all trainable parameters; `None` without any."""
        if names is None or self.loss is None:
            return None
        loss = self.emission.tensor(self.loss)
        reached = leading_to(self.graph, [loss])
        trained = [self.inputs.get(name) for name in names]
        required = [t for t in trained if t in reached]
        if names and not required:
            logger.warning(
                "Nothing is trained: the loss does not depend on any parameter that the optimizer has, or no gradient "
                "flows to them (`torch.no_grad`, `detach`)."
            )
        if not required:
            return None
        planned = self._planned()
        transform = self._recomputed if planned is None else planned
        gradient = popxl.transforms.autodiff(self.graph, [loss], required, called_graphs_transform=transform)
        gradient = gradient if planned is None else planned(gradient)
        outputs = set(gradient.outputs)
        self.trained = {name: t for name in names if (t := self.inputs.get(name)) is not None and t in outputs}
        return gradient

    def _planned(self) -> PlannedGradients | None:
        """Transform that applies the memory plan of the options, or else the one that a tool requests."""
        plan, requested = self._options.Training.memory_plan, current_request()
        has_checkpoints = bool(self.emission.recomputed)
        if plan is not None and has_checkpoints:
            raise createPoptorchError(
                "setMemoryPlan: the model has checkpoints, or options that recompute (`autoRecomputation`, a "
                "pipeline), which say what the backward pass keeps. Leave out one of both."
            )
        if requested is not None and not has_checkpoints:
            plan = requested.memory_of(plan)
        if plan is None:
            return None
        planned = PlannedGradients(self.graph, plan)
        planned.warn_if_nothing_is_saved()
        return planned

    def _recomputed(self, gradient: GradGraphInfo) -> GradGraphInfo:
        """Rewrite the gradient of a called graph to recompute activations of recomputed regions."""
        kept = self.emission.recomputed.get(gradient.forward_graph)
        return gradient if kept is None else recompute_activations(gradient, kept, ())[0]

    def _name_trained(self, requested: Sequence[str]) -> None:
        """Add names of gradients and updated parameters to `names`, and check that all requested names exist."""
        self.names += tuple(prefix + name for prefix in (GRADIENT, UPDATED) for name in self.trained)
        for name in requested:
            if name not in self.names:
                near = difflib.get_close_matches(name, self.names)
                raise createPoptorchError(
                    f"anchorTensor: there is no tensor {name!r} in the program"
                    + (f"; there is {', '.join(near)}." if near else ".")
                    + " `getTensorNames()` lists all."
                )

    @cached_property
    def ipus(self) -> Mapping[str, int]:
        """IPU that reads each input first, by key of the input."""
        readers = reading_ipus(self.graph)
        ipus = {key: next(iter(readers.get(t, ())), None) for key, t in self.inputs.items()}
        return {key: ipu for key, ipu in ipus.items() if ipu is not None}

    @cached_property
    def read_by_gradient(self) -> frozenset[popxl.Tensor]:
        """Tensors of the forward graph that the gradient graph reads."""
        return frozenset() if self.gradient is None else frozenset(activation_inputs(self.gradient).values())

    @cached_property
    def half_gradients(self) -> frozenset[str]:
        """Names of parameters with float16 gradients."""
        if self.gradient is None:
            return frozenset()
        made_of = {
            op.outputs[0]: op.inputs[0] for op in self.gradient.graph.ops if len(op.inputs) == len(op.outputs) == 1
        }
        outputs = dict(zip(self.gradient.outputs, self.gradient.graph.outputs, strict=True))

        def is_half(t: popxl.Tensor) -> bool:
            while t.dtype != popxl.float16 and t in made_of:  # possibly cast at the end
                t = made_of[t]
            return t.dtype == popxl.float16

        return frozenset(name for name, t in self.trained.items() if is_half(outputs[t]))


def _name_of(key: str) -> str:
    """Public name of a model input: own names for parameters and buffers, `"input..."` otherwise."""
    name = key.removeprefix("/")
    return name if key == name or name.startswith("input") else f"input/{name}"
