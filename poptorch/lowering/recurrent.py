"""Recurrent layers: each layer, in each direction, is one op that scans over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.emission import emission
from poptorch.lowering.registry import lowers
from popxl import OpKind, ops
from popxl.ops.precision import rounded_once

Tensors = Sequence[popxl.Tensor]
State = tuple[Any, ...]


# One step: the state that follows, of what the input and the state before contribute to the gates ---------------------


def _lstm(from_input: Any, from_state: Any, state: State) -> State:
    i, f, g, o = jnp.split(from_input + from_state, 4, axis=-1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(from_input: Any, from_state: Any, state: State) -> State:
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = (jnp.split(t, 3, -1) for t in (from_input, from_state))
    update = jax.nn.sigmoid(update_x + update_h)
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    return ((1 - update) * new + update * state[0],)


def _rnn_tanh(from_input: Any, from_state: Any, state: State) -> State:
    return (jnp.tanh(from_input + from_state),)


def _rnn_relu(from_input: Any, from_state: Any, state: State) -> State:
    return (jax.nn.relu(from_input + from_state),)


_Step = Callable[[Any, Any, State], State]


# A layer: a loop over time -------------------------------------------------------------------------------------------


@jax.custom_vjp
def _product(state: Any, weights: Any, transposed: Any) -> Any:
    """`state @ weights.T`. Both passes read weights that lie in memory row by row, as they come.

    In a loop CPUs would turn them in every turn: for a batch of one, that takes eight times as long as the product.
    """
    return state @ transposed


def _product_and_rest(state: Any, weights: Any, transposed: Any) -> tuple[Any, tuple[Any, Any]]:
    return state @ transposed, (state, weights)


def _product_gradients(rest: tuple[Any, Any], gradient: Any) -> tuple[Any, Any, None]:
    state, weights = rest
    return (gradient @ weights).astype(state.dtype), (gradient.T @ state).astype(weights.dtype), None


_product.defvjp(_product_and_rest, _product_gradients)


def _layer(step: _Step, states: int) -> Callable[..., Any]:
    """A layer in one direction, as a function of its input `[time, batch, features]`, its state, and its weights."""

    def layer(x: Any, *given: Any, has_biases: bool, backwards: bool) -> Any:
        state, (w_ih, w_hh, *others) = given[:states], given[states:]
        b_ih, b_hh = others[:2] if has_biases else (0, 0)
        w_hr = others[-1] if len(others) in (1, 3) else None
        from_input = x @ w_ih.T + b_ih  # of all times at once
        turned, turned_hr = w_hh.T, None if w_hr is None else w_hr.T  # once, and not in every turn

        def turn(state: State, now: Any) -> tuple[State, Any]:
            following = step(now, _product(state[0], w_hh, turned) + b_hh, state)
            if w_hr is not None:
                following = (_product(following[0], w_hr, turned_hr), *following[1:])
            return following, following[0]

        last, out = lax.scan(turn, tuple(state), from_input, reverse=backwards)
        return (out, *last)

    return layer


def _kind(name: str, step: _Step, states: int) -> OpKind:
    return OpKind(
        name, rounded_once(_layer(step, states)), key=f"poptorch.{name}", result=("out", "h", "c")[: states + 1]
    )


_LAYERS = {
    "lstm": _kind("LSTM", _lstm, 2),
    "gru": _kind("GRU", _gru, 1),
    "rnn_tanh": _kind("RNNTanh", _rnn_tanh, 1),
    "rnn_relu": _kind("RNNRelu", _rnn_relu, 1),
}


# Layers upon each other -----------------------------------------------------------------------------------------------


def _stacked(name: str) -> Callable[..., Any]:
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
                x = ops.dropout(x, emission().seed(), dropout)
            outs = []
            for backwards in range(directions):
                number = layer * directions + backwards
                weights = params[number * count : (number + 1) * count]
                first = [state[number] for state in states]
                out, *end = kind(x, *first, *weights, has_biases=has_biases, backwards=bool(backwards))
                outs.append(out)
                last.append(end)
            x = ops.concat(outs, 2) if bidirectional else outs[0]
        ends = [ops.concat([ops.reshape(t, (1, *t.shape)) for t in each], 0) for each in zip(*last, strict=True)]
        return [ops.transpose(x, (1, 0, 2)) if batch_first else x, *ends]

    return lowering


def _cell(name: str) -> Callable[..., Any]:
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
        _, *ends = kind(x, *states, *weights, has_biases=b_ih is not None, backwards=False)
        return ends

    return lowering


for _name in _LAYERS:
    lowers(f"torch.{_name}")(_stacked(_name))
    lowers(f"torch.{_name}_cell")(_cell(_name))
