"""Inputs and outputs of a gradient graph, in terms of its forward graph."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NoReturn

from popxl.base.arguments import check_type
from popxl.core.tensor import Tensor
from popxl.graph import Graph
from popxl.ops.call import CallSiteInfo


class ExpectedConnectionType(Enum):
    """Meaning of an input or output of a gradient graph."""

    Fwd = "Fwd"
    """A tensor of the forward graph."""
    FwdGrad = "FwdGrad"
    """The gradient of a tensor of the forward graph."""


class ExpectedConnection:
    """One input or output of a gradient graph."""

    _fwd_tensor: Tensor
    _connection_type: ExpectedConnectionType

    def __init__(self) -> None:
        raise TypeError("ExpectedConnections are made by `popxl.transforms.autodiff`.")

    @property
    def is_activation(self) -> bool:
        """Whether a connection refers to a tensor itself, not to its gradient."""
        return self.connection_type is ExpectedConnectionType.Fwd

    @classmethod
    def _make(cls, fwd_tensor: Tensor, connection_type: ExpectedConnectionType) -> ExpectedConnection:
        connection = object.__new__(cls)
        connection._fwd_tensor = fwd_tensor
        connection._connection_type = connection_type
        return connection

    @property
    def fwd_tensor(self) -> Tensor:
        """The tensor of the forward graph that is meant."""
        return self._fwd_tensor

    @property
    def connection_type(self) -> ExpectedConnectionType:
        """Kind of connection: forward tensor or gradient."""
        return self._connection_type

    def __repr__(self) -> str:
        return f"({self.connection_type}, {self.fwd_tensor})"


class GradGraphInfo:
    """A gradient graph, with connections to calls of its forward graph.

    Example:
        >>> info = popxl.transforms.autodiff(graph)
        >>> site = ops.call_with_info(graph, x, w)
        >>> dx, dw = ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site))
    """

    _graph: Graph
    _forward_graph: Graph
    _expected_inputs: list[ExpectedConnection]
    _expected_outputs: list[ExpectedConnection]

    def __init__(self) -> None:
        raise TypeError("GradGraphInfos are made by `popxl.transforms.autodiff`.")

    @property
    def graph(self) -> Graph:
        """The gradient graph."""
        return self._graph

    @property
    def forward_graph(self) -> Graph:
        """The graph that was differentiated."""
        return self._forward_graph

    @property
    def expected_inputs(self) -> tuple[ExpectedConnection, ...]:
        """Meaning of each input of the gradient graph, in order; provided gradients come first."""
        return tuple(self._expected_inputs)

    @property
    def expected_outputs(self) -> tuple[ExpectedConnection, ...]:
        """Meaning of each output of the gradient graph, in order."""
        return tuple(self._expected_outputs)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of the forward graph that the inputs stand for."""
        return tuple(expected.fwd_tensor for expected in self._expected_inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors of the forward graph whose gradients the outputs are."""
        return tuple(expected.fwd_tensor for expected in self._expected_outputs)

    def inputs_dict(self, fwd_call_info: CallSiteInfo) -> dict[Tensor, Tensor]:
        """The activations of one forward call, by the inputs of the gradient graph that need them.

        Raises:
            TypeError: if it is not a call of the forward graph.
            ValueError: if the call neither takes nor returns one of them.
        """
        if getattr(fwd_call_info, "called_graph", None) is not self.forward_graph:
            raise TypeError(
                f"inputs_dict: expected a call of {self.forward_graph.title}, as `ops.call_with_info` returns it; got "
                f"{fwd_call_info!r}. A repeat calls a wrapper graph; take the activations inside of it."
            )
        parents = fwd_call_info.parents()
        wanted = {
            t: expected.fwd_tensor
            for t, expected in zip(self.graph.inputs, self._expected_inputs, strict=False)
            if expected.is_activation
        }
        if unknown := [t for t in wanted.values() if t not in parents]:
            raise ValueError(
                f"inputs_dict: this call of {self.forward_graph.title} neither takes nor returns "
                f"{', '.join(map(repr, unknown))}. Make them outputs of the graph before it is called."
            )
        return {t: parents[activation] for t, activation in wanted.items()}

    def fwd_graph_ins_to_grad_parent_outs(self, grad_call_info: CallSiteInfo) -> dict[Tensor, Tensor]:
        """The gradients of one gradient call, by the tensors of the forward graph.

        Raises:
            TypeError: if it is not a call, or one of the forward graph.
        """
        check_type(grad_call_info, CallSiteInfo, "`grad_call_info`", "what `ops.call_with_info` returns")
        if grad_call_info.called_graph is self.forward_graph:
            raise TypeError(
                f"`grad_call_info` is a call of {self.forward_graph.title}, which was differentiated; expected one of "
                f"its gradient graph, {self.graph.title}."
            )
        return _Gradients(
            {expected.fwd_tensor: grad_call_info.parent_output(i) for i, expected in enumerate(self._expected_outputs)}
        )

    def fwd_parent_ins_to_grad_parent_outs(
        self, fwd_call_info: CallSiteInfo, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """The gradients of one gradient call, by the tensors that the forward call was given.

        A tensor that was bound to two inputs of the forward call keeps one gradient only; then use
        `fwd_graph_ins_to_grad_parent_outs` and add them.

        Raises:
            TypeError: if one of them is not a call, or the second is a call of the forward graph.
            ValueError: if a gradient is of a tensor that is neither input nor output of the forward graph.
        """
        check_type(fwd_call_info, CallSiteInfo, "`fwd_call_info`", "what `ops.call_with_info` returns")
        gradients = self.fwd_graph_ins_to_grad_parent_outs(grad_call_info)
        parents = fwd_call_info.parents()
        for t in gradients:
            if t not in parents:
                raise ValueError(f"{t!r} is neither an input nor an output of {self.forward_graph.title}.")
        return _Gradients({parents[t]: gradient for t, gradient in gradients.items()})

    def __repr__(self) -> str:
        lines = [f"  graph={self.graph.id}"]
        for name, connections in (("inputs", self._expected_inputs), ("outputs", self._expected_outputs)):
            lines += [f"  expected_{name}=[", *(f"    {c!r}" for c in connections), "  ]"]
        return "\n".join(["GradGraphInfo[", *lines, "]"])


class _Gradients(dict[Tensor, Tensor]):
    """Gradients by tensor."""

    def __missing__(self, t: object) -> NoReturn:
        known = ", ".join(of.name for of in self) or "nothing"
        raise KeyError(
            f"There is no gradient of {t!r}; there are those of {known}. A gradient is computed of the tensors in "
            "`grads_required` of `autodiff`, which are tensors of the forward graph; here they are looked up as they "
            "are bound there."
        )


def make_grad_graph_info(
    forward_graph: Graph,
    grad_graph: Graph,
    expected_inputs: Iterable[tuple[Tensor, ExpectedConnectionType]],
    expected_outputs: Iterable[Tensor],
) -> GradGraphInfo:
    """The information of a gradient graph that was written by hand.

    Args:
        forward_graph: the graph that `grad_graph` is the gradient of.
        grad_graph: the gradient graph.
        expected_inputs: for each input of the gradient graph, a tensor of the forward graph, and whether the input is
            that tensor or its gradient.
        expected_outputs: for each output of the gradient graph, the tensor of the forward graph that it is the gradient
            of.
    """
    grad_graph.gradient_of = forward_graph
    info = object.__new__(GradGraphInfo)
    info._forward_graph = forward_graph
    info._graph = grad_graph
    info._expected_inputs = [ExpectedConnection._make(t, kind) for t, kind in expected_inputs]
    info._expected_outputs = [ExpectedConnection._make(t, ExpectedConnectionType.FwdGrad) for t in expected_outputs]
    return info
