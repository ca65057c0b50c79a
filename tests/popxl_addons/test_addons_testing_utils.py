"""Modules run on arrays in a line, and ops counted."""

import numpy as np
import pytest

import popart._internal.ir as popart_ir
import popxl
import popxl_addons as addons
from popxl_addons.testing_utils import TensorInput, ops_of_type, run_module


class Affine(addons.Module):
    def __init__(self, features):
        super().__init__()
        self.features = features

    def build(self, x, shift=None, factor=1.0):
        w = self.add_variable_input("w", lambda: np.full((x.shape[-1], self.features), 2.0), x.dtype)
        y = x @ w * factor
        return (y, x) if shift is None else (y + shift, shift)


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_run_module():
    y, x = run_module(Affine(4), TensorInput(X))
    np.testing.assert_allclose(y, X @ np.full((3, 4), 2.0))
    np.testing.assert_array_equal(x, X)
    assert y.dtype == np.float32 and y.flags.owndata


@pytest.mark.parametrize("as_function", [True, False])
def test_weights(as_function):
    new = np.random.rand(3, 4).astype(np.float32)
    seen = []

    def weights(variables):
        assert isinstance(variables, addons.NamedTensors)
        seen.append(variables)
        return {variables.w: new}

    if as_function:
        y, _ = run_module(Affine(4), TensorInput(X), weights=weights)
        np.testing.assert_allclose(y, X @ new, rtol=1e-6)
    else:
        run_module(Affine(4), TensorInput(X), weights={})
    assert len(seen) == as_function


def test_other_arguments_and_keywords_in_any_order():
    shift = np.arange(4, dtype=np.float32)
    for arguments in (
        dict(shift=TensorInput(shift), factor=3.0, x=TensorInput(X)),
        dict(factor=3.0, x=TensorInput(X), shift=TensorInput(shift)),
    ):
        y, same = run_module(Affine(4), **arguments)
        np.testing.assert_allclose(y, X @ np.full((3, 4), 6.0) + shift)
        np.testing.assert_array_equal(same, shift)


def test_dtype_and_lists():
    class Sum(addons.Module):
        def build(self, xs, y):
            return xs[0] + xs[1] + y

    (total,) = run_module(Sum(), [TensorInput(X, popxl.float16), TensorInput(X + 1, popxl.float16)], 1.0)
    assert total.dtype == np.float16
    np.testing.assert_allclose(total, 2 * X + 2)


def test_weights_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="float64; expected float32"):
        run_module(Affine(4), TensorInput(X), weights=lambda v: {v.w: np.zeros((3, 4))})


def test_ops_of_type(ir):
    x = popxl.variable(X)
    y = x @ x.T + 1.0
    _ = y @ y
    own = popxl.OpKind("Own", lambda t: t + 1)
    own(y)
    assert [ops_of_type(ir.main_graph.ops, name) for name in ("MatMul", "Add", "Sub", "Own")] == [2, 1, 0, 1]
    assert ops_of_type(ir.main_graph.ops, own) == 1
    assert ops_of_type(ir.main_graph.ops, popxl.OpKind.named("MatMul")) == 2
    classes = popart_ir.op
    assert ops_of_type(ir.main_graph._pb_graph.getOps(), classes.MatMulOp) == 2
    assert ops_of_type(ir.main_graph.ops, classes.SubtractOp) == 0
    with pytest.raises(TypeError, match="expected the name of an op type"):
        ops_of_type(ir.main_graph.ops, 3)
