"""Recurrent layers: one op per layer and direction, a scan over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.emission import next_seed
from poptorch.lowering.registry import lowers
from popxl import OpKind, ops
from popxl.extend.kernels import products, widen

Tensors = Sequence[popxl.Tensor]
State = tuple[Any, ...]


# One step: the next state, from the contributions of the input and the previous state to the gates --------------------


def _lstm(from_input: Any, from_state: Any, state: State) -> State:
    i, f, g, o = jnp.split(from_input + from_state, 4, axis=-1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(from_input: Any, from_state: Any, state: State) -> State:
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = (jnp.split(t, 3, -1) for t in (from_input, from_state))
    update = jax.nn.sigmoid(update_x + update_h)
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    return ((1 - update) * new + update * state[0],)


_Step = Callable[[Any, Any, State], State]


# A layer: a loop over time -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operands:
    """Operands of a layer besides its input `[time, batch, features]`: initial state and weights.

    `w_ih` is multiplied with the input, `w_hh` with the state, and `w_hr` makes an output of the state of an LSTM with
    projections.
    """

    state: State
    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    w_hr: Any

    @staticmethod
    def from_inputs(given: Sequence[Any], states: int, has_biases: bool) -> _Operands:
        w_ih, w_hh, *others = given[states:]
        b_ih, b_hh = map(widen, others[:2]) if has_biases else (None, None)
        state = tuple(map(widen, given[:states]))
        return _Operands(state, w_ih, w_hh, b_ih, b_hh, others[-1] if len(others) in (1, 3) else None)

    def from_input(self, x: Any) -> Any:
        """Input contribution to the gates, for all time steps at once."""
        return _plus(products.times(x, products.factor(self.w_ih).T), self.b_ih)


def _layer(step: _Step, states: int) -> Callable[..., Any]:
    """A layer in one direction: output, last state, and residuals per time step for `_backward`: state contributions to
    the gates, state components other than the output, and unprojected outputs.

    Weights are transposed before the loop: CPUs would do so in every iteration.
    """

    def layer(x: Any, *given: Any, has_biases: bool, backwards: bool) -> Any:
        operands = _Operands.from_inputs(given, states, has_biases)
        w_hh, w_hr = (None if w is None else products.factor(w).T for w in (operands.w_hh, operands.w_hr))

        def scan_step(state: State, now: Any) -> tuple[State, Any]:
            from_state = _plus(products.times(state[0], w_hh), operands.b_hh)
            out, *others = step(now, from_state, state)
            projected = out if w_hr is None else products.times(out, w_hr)
            return (projected, *others), (projected, from_state, *others, *([] if w_hr is None else [out]))

        last, (out, *kept) = lax.scan(scan_step, operands.state, operands.from_input(x), reverse=backwards)
        return (out, *last, *kept)

    return layer


def _backward(step: _Step, states: int) -> Callable[..., Any]:
    """Gradients of all layer operands, from those operands, residuals per time step, and gradients of some results
    (`given`, by position).

    Only the gradients of the state go back through time. Those of the weights are products over all times at once,
    after the loop, which would otherwise read and write them in every iteration.
    """

    def backward(*arrays: Any, operands: int, given: tuple[int, ...], has_biases: bool, backwards: bool) -> Any:
        x, *rest = arrays[:operands]
        of = _Operands.from_inputs(rest, states, has_biases)
        x, w_ih, w_hh = map(products.factor, (x, of.w_ih, of.w_hh))
        w_hr = None if of.w_hr is None else products.factor(of.w_hr)
        results = 1 + 2 * states + (of.w_hr is not None)
        out, from_state, *kept = map(widen, arrays[operands : operands + results - states])
        gs = dict(zip(given, map(widen, arrays[operands + results - states :]), strict=True))
        g_last = tuple(gs.get(1 + i, jnp.zeros_like(first)) for i, first in enumerate(of.state))
        g_each = tuple(gs.get(i) for i in (0, *range(1 + states, results)))
        over_time = (out, *kept[: states - 1])
        before = tuple(_shifted(t, first, backwards) for t, first in zip(over_time, of.state, strict=True))

        def scan_step_backward(g_state: State, now: Any) -> tuple[State, Any]:
            (*at_step, before), (g_out, g_from_state, *g_kept) = now
            g_out = _plus(g_state[0], g_out)
            g_step = g_out if w_hr is None else _plus(products.times(g_out, w_hr), g_kept[-1])
            g_others = map(_plus, g_state[1:], g_kept)
            _, pull = jax.vjp(step, *at_step, before)
            g_input, g_product, g_before = pull((g_step, *g_others))
            g_product = _plus(g_product, g_from_state)
            return (g_before[0] + products.times(g_product, w_hh), *g_before[1:]), (g_input, g_product, g_out)

        each = ((of.from_input(x), from_state, before), g_each)
        g_first, (g_input, g_product, g_out) = lax.scan(scan_step_backward, g_last, each, reverse=not backwards)

        def of_weights(g: Any, rows: Any) -> Any:
            return products.weights_gradient(g.astype(x.dtype), rows.astype(x.dtype))

        gradients = [products.times(g_input, w_ih), *g_first, of_weights(g_input, x), of_weights(g_product, before[0])]
        if has_biases:
            gradients += [g.sum(range(g.ndim - 1)) for g in (g_input, g_product)]
        if w_hr is not None:
            gradients.append(of_weights(g_out, kept[-1]))
        return tuple(g.astype(array.dtype) for g, array in zip(gradients, arrays, strict=False))

    return backward


def _plus(a: Any, b: Any) -> Any:
    """Sum with an optional second term."""
    return a if b is None else a + b


def _shifted(t: Any, first: Any, backwards: bool) -> Any:
    """Values preceding each time step: `first`, then the previous step's values."""
    parts = (t[1:], first[None]) if backwards else (first[None], t[:-1])
    return jnp.concatenate(parts)


def _kind(name: str, step: _Step, states: int) -> OpKind:
    """Declare a layer in one direction as an op, whose gradient is another op."""
    backward = OpKind(f"{name}Grad", _backward(step, states), key=f"poptorch.{name}Grad")

    def gradient(forward: Any, gs: tuple[popxl.Tensor | None, ...]) -> dict[int, popxl.Tensor]:
        op = forward.op
        received = tuple(i for i, g in enumerate(gs) if g is not None)
        saved = (op.outputs[0], *op.outputs[1 + states :])
        read_values = [forward.read(t) for t in (*op.inputs, *saved)]
        gradients = backward(
            *read_values, *(gs[i] for i in received), operands=len(op.inputs), given=received, **op.attributes
        )
        return {i: g for i, g in enumerate(gradients) if forward.wants(i)}

    return OpKind(
        name,
        _layer(step, states),
        gradient=gradient,
        key=f"poptorch.{name}",
        result=("out", *("h", "c")[:states], "from_state", *("c_each",)[: states - 1], "unprojected"),
    )


_LAYERS = {
    "lstm": _kind("LSTM", _lstm, 2),
    "gru": _kind("GRU", _gru, 1),
    "rnn_tanh": _kind("RNNTanh", lambda from_input, from_state, state: (jnp.tanh(from_input + from_state),), 1),
    "rnn_relu": _kind("RNNRelu", lambda from_input, from_state, state: (jax.nn.relu(from_input + from_state),), 1),
}


# Layers upon each other -----------------------------------------------------------------------------------------------


def _stacked(name: str) -> Callable[..., Any]:
    """Lowering of a recurrent function: layers upon each other, in one direction or two."""
    kind = _LAYERS[name]

    def lowering(
        input: popxl.Tensor,
        hx: popxl.Tensor | Tensors,
        params: Tensors,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Tensors:
        directions = 2 if bidirectional else 1
        count = len(params) // (num_layers * directions)
        states = hx if isinstance(hx, tuple | list) else (hx,)
        x = ops.transpose(input, (1, 0, 2)) if batch_first else input
        last: list[Tensors] = []
        for layer in range(num_layers):
            if layer and train and dropout:
                x = ops.dropout(x, next_seed(), dropout)
            outs = []
            for backwards in range(directions):
                number = layer * directions + backwards
                weights = params[number * count : (number + 1) * count]
                first = [state[number] for state in states]
                out, *rest = kind(x, *first, *weights, has_biases=has_biases, backwards=bool(backwards))
                outs.append(out)
                last.append(rest[: len(states)])
            x = ops.concat(outs, 2) if bidirectional else outs[0]
        ends = [ops.concat([ops.reshape(t, (1, *t.shape)) for t in each], 0) for each in zip(*last, strict=True)]
        return [ops.transpose(x, (1, 0, 2)) if batch_first else x, *ends]

    return lowering


def _cell(name: str) -> Callable[..., Any]:
    """Lowering of a recurrent cell: a layer with a single time step."""
    kind = _LAYERS[name]

    def lowering(
        input: popxl.Tensor,
        hx: popxl.Tensor | Tensors,
        w_ih: popxl.Tensor,
        w_hh: popxl.Tensor,
        b_ih: popxl.Tensor | None = None,
        b_hh: popxl.Tensor | None = None,
    ) -> Tensors:
        states = hx if isinstance(hx, tuple | list) else (hx,)
        weights = [t for t in (w_ih, w_hh, b_ih, b_hh) if t is not None]
        x = ops.reshape(input, (1, *input.shape))
        _, *rest = kind(x, *states, *weights, has_biases=b_ih is not None, backwards=False)
        return rest[: len(states)]

    return lowering


for _name in _LAYERS:
    lowers(f"torch.{_name}")(_stacked(_name))
    lowers(f"torch.{_name}_cell")(_cell(_name))
