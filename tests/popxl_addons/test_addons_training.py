"""A step of training in one call: however a batch is divided, the same variables."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import UnnamedVariableWarning
from popxl_addons import optimizers
from popxl_addons.layers import Linear
from tests.tolerances import assert_near

X = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 4, (3, 8)).astype(np.int32)


class Classifier(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = addons.layers.Linear(4)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        logits = self.linear(x)
        return addons.cross_entropy(logits, labels), logits


def trained(replicas: int = 1, accumulate: int = 1, dtype: Any = popxl.float32, **how: Any) -> tuple[Any, ...]:
    """The losses of three steps, and the weights after them."""
    np.random.seed(3)
    size = 8 // replicas // accumulate
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream((size, 5), dtype, "x"), popxl.h2d_stream((size,), popxl.int32, "y")
        optimizer = partial(optimizers.adamw, lr=0.1, clip_norm=0.5)
        training = addons.train_step(Classifier(), x, y, optimizer=optimizer, accumulate=accumulate, **how)
        out = popxl.d2h_stream((), popxl.float32, "loss")
        ops.host_store(out, training.loss)
    losses = []
    with popxl.Session(ir, "ipu_hw") as session:
        for rows, labels in zip(X.astype(dtype.as_numpy()), Y, strict=True):
            feeds = {x: rows.reshape(session.host_shape(x)), y: labels.reshape(session.host_shape(y))}
            loss = session.run(feeds)[out]
            assert loss.shape == ((replicas,) if replicas > 1 else ())
            losses.append(float(loss.ravel()[0]))
        weight = session.get_tensor_data(training.variables.linear.weight).astype(np.float64)
    return losses, weight, training


def test_however_a_batch_is_divided() -> None:
    losses, weight, training = trained()
    assert losses[0] == pytest.approx(np.log(4), abs=0.1)
    assert set(training.state.keys_flat()) >= {"step", "linear.weight.first_moment"}
    for how in (
        {"accumulate": 4, "loss_scaling": 128.0},
        {"replicas": 2, "accumulate": 2},
    ):
        others, found, _ = trained(**how)  # type: ignore[arg-type]
        np.testing.assert_allclose(others, losses, rtol=1e-5)
        assert_near(found, weight, 1e-4)
    others, found, _ = trained(accumulate=2, dtype=popxl.bfloat16)
    np.testing.assert_allclose(others, losses, rtol=2e-2)
    np.testing.assert_allclose(found, weight, atol=2e-2)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_variables_in_pieces(optimizer: str) -> None:
    """As if they were whole: weights of 20 elements and biases of 4, on 3 replicas, with padding; norms are clipped."""
    rows, labels = X[:, :6], Y[:, :6]

    def after(replicas: int, **how: Any) -> tuple[list[float], dict[str, np.ndarray], Any]:
        np.random.seed(3)
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph:
            size = 6 // replicas
            x, y = popxl.h2d_stream((size, 5), popxl.float32, "x"), popxl.h2d_stream((size,), popxl.int32, "y")
            step = partial(getattr(optimizers, optimizer), lr=0.1, clip_norm=0.1)
            training = addons.train_step(Classifier(), x, y, optimizer=step, **how)
            out = addons.host_store(training.loss)
        losses = []
        with popxl.Session(ir, "ipu_hw") as session:
            for batch, label in zip(rows, labels, strict=True):
                fed = {x: batch.reshape(session.host_shape((size, 5))), y: label.reshape(session.host_shape((size,)))}
                losses.append(float(session.run(fed)[out].ravel()[0]))
            found = session.get_tensors_data(training.variables.tensors)
        return losses, {name: np.array(found[v]) for name, v in training.variables.to_dict().items()}, training

    losses, weights, _ = after(1)
    others, found, training = after(3, sharded=True)
    assert training.variables.linear.weight.piece.shape == (7,) and training.variables.linear.bias.piece.shape == (2,)
    if optimizer == "adamw":
        assert training.state.linear.weight.first_moment.piece.shape == (7,)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for name, weight in weights.items():
        assert_near(found[name], weight, 1e-4)
    narrow = addons.MixedPrecision(popxl.float16)  # pieces are cast, and then put together
    others, _, training = after(3, sharded=True, precision=narrow)
    assert training.state.loss_scaling.value.shape == ()
    np.testing.assert_allclose(others, losses, rtol=5e-3)


class InPieces(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_replica_sharded_variable_input("w", lambda: np.ones(5), x.dtype)
        return ops.mean(x @ addons.rts.gather_replica_sharded_tensor(w))


def test_what_is_refused() -> None:
    with popxl.Ir(replication=2).main_graph:
        x = popxl.h2d_stream((2, 5), popxl.float32)
        with pytest.raises(ValueError, match=r"\['w'\] are pieces within the graph.* use `sharded=True`"):
            addons.train_step(InPieces(), x, optimizer=optimizers.sgd)
        with pytest.raises(ValueError, match="`sharded` says how variables are made, and there are `variables`"):
            addons.train_step(InPieces(), x, optimizer=optimizers.sgd, sharded=True, variables=addons.NamedTensors())
    with popxl.Ir().main_graph:
        x, y = popxl.variable(X[0]), popxl.variable(Y[0])
        for accumulate in (0, 2):
            with pytest.raises(ValueError, match=f"train_step: `accumulate` is {accumulate}; expected 1 or more"):
                addons.train_step(Classifier(), x, y, optimizer=optimizers.sgd, accumulate=accumulate)
        for wrong, how in (("accumulate", {"accumulate": 2.0}), ("precision", {"precision": popxl.float16})):
            with pytest.raises(TypeError, match=f"train_step: `{wrong}` "):
                addons.train_step(Classifier(), x, y, optimizer=optimizers.sgd, **how)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="train_step: `module` must be a Module; got <function"):
            addons.train_step(lambda x: x, x, optimizer=optimizers.sgd)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"train_step: `inputs\[1\]` must be a HostToDeviceStream.*\(ndarray\)"):
            addons.train_step(Classifier(), x, Y[0], optimizer=optimizers.sgd)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="sgd: `loss_scaling` is 0.0; expected a positive number"):
            addons.train_step(Classifier(), x, y, optimizer=partial(optimizers.sgd, lr=0.1), loss_scaling=0.0)
        stream = popxl.h2d_stream((3, 5), popxl.float32)
        with pytest.raises(ValueError, match=r"`Linear.build` returns .*; expected the loss, a scalar"):
            addons.train_step(addons.layers.Linear(4), stream, optimizer=optimizers.sgd, accumulate=2)
        with pytest.raises(ValueError, match=r"nothing reads the variables \['unread'\].*out of `Unread.build`"):
            addons.train_step(Unread(), stream, optimizer=optimizers.sgd, accumulate=2)
        with (
            pytest.warns(UnnamedVariableWarning, match="Listed.create_graph"),
            pytest.raises(ValueError, match=r"inputs \['weight', 'bias'\] of the graph of `Listed`.*`Module.from_list"),
        ):
            addons.train_step(Listed(), stream, optimizer=optimizers.sgd)
        with pytest.raises(
            TypeError, match=r"`optimizer` must be a function .*; got 'sgd' \(str\)\. `optimizers.from_optax`"
        ):
            addons.train_step(Unread(), stream, optimizer="sgd")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="train_step: `loss_scaling` is 'dynamic'; expected a number"):
            addons.train_step(Unread(), stream, optimizer=optimizers.sgd, loss_scaling="dynamic")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"the variables \['w'\] are complex.*`ops.view_as_complex`"):
            addons.train_step(Complex(), stream, optimizer=optimizers.sgd, accumulate=2)
        assert stream.num_host_transfers == 1


class Listed(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [addons.layers.Linear(4)]

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ops.mean(x)


class Complex(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", lambda: np.ones(5), popxl.complex64)
        return ops.mean(ops.abs(ops.cast(x, w.dtype) @ w))


class Unread(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        self.add_variable_input("unread", lambda: np.ones(5), x.dtype)
        return ops.mean(x @ self.add_variable_input("w", lambda: np.ones(5), x.dtype))


class Looked(addons.Module):
    """Rows of a table, which is trained, by numbers, which are variables and not trained."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        table = self.add_variable_input("table", lambda: np.ones((4, 2)), popxl.float32)
        rows = self.add_variable_input("rows", lambda: np.array([2, 0, 2]), popxl.int32)
        return ops.mean(table[rows] * x)


def test_integers_are_not_trained() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.h2d_stream((3, 2), popxl.float32, "x")
        training = addons.train_step(Looked(), x, optimizer=partial(optimizers.sgd, lr=1.0), accumulate=2)
    with popxl.Session(ir, "cpu") as session:
        session.run({x: np.arange(12, dtype=np.float32).reshape(2, 3, 2)})
        found = training.variables
        table, rows = (np.array(session.get_tensor_data(t)) for t in (found.table, found.rows))
    means = np.arange(12).reshape(2, 3, 2).mean(0) / 6
    np.testing.assert_allclose(table, [1 - means[1], [1, 1], 1 - means[0] - means[2], [1, 1]], rtol=1e-6)
    assert rows.tolist() == [2, 0, 2] and "rows" not in str(training.state.keys_flat())


def test_collectives_of_layers_share_a_line_under_the_path_of_their_variables() -> None:
    class Layers(addons.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            self.layers = addons.Module()
            facts, graph = Linear(3, bias=False).create_graph(x)
            for number in range(12):
                (x,) = graph.bind(self.layers.add_variable_inputs(number, facts)).call(x)
            return ops.mean(x)

    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        addons.train_step(Layers(), popxl.h2d_stream((2, 3), popxl.float32), optimizer=partial(optimizers.sgd, lr=0.1))
    sent = ir.communication()
    assert sent.collectives[3].tensor == "Gradient___layers.3.weight"
    rows = [line.split()[1:9] for line in str(sent).splitlines() if "line" not in line and " of 2" in line]
    assert rows == [
        ["Gradient___layers.*.weight", "36", "B", "of", "2", "12", *rows[0][6:]],
        ["mean_out", "4", "B", "of", "2", "1", *rows[1][6:]],
    ]
