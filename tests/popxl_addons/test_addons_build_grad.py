"""Gradients written by hand: what they compute, how they meet the transform, and every way to get them wrong."""

import re
import warnings
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.errors import GradientError
from popxl_addons.module import create_grad_graph_info
from tests.tolerances import assert_near

SPEC = popxl.TensorSpec((5, 2), popxl.float32)


class Linear(addons.Module):
    def __init__(self, n=3, **kwargs):
        super().__init__(**kwargs)
        self.n = n

    def build(self, x):
        w = self.add_variable_input("w", partial(np.random.normal, size=(x.shape[-1], self.n)), x.dtype)
        b = self.add_variable_input("b", partial(np.zeros, self.n), x.dtype)
        return x @ w + b


class HandLinear(Linear):
    def build(self, x):
        y = super().build(x)
        self.aux["x"], self.aux["w"] = x, self._collected.args.w
        return y

    def build_grad(self, dy):
        x, w = self.aux["x"], self.aux["w"]
        self.var_grad["w"] = x.T @ dy
        self.var_grad["b"] = ops.sum(dy, axis=0)
        return dy @ w.T


class Square(addons.Module):
    """s * x**2, with the gradient multiplied by `mark`, so that one can see whose gradient it is."""

    def __init__(self, mark=1.0, **kwargs):
        super().__init__(**kwargs)
        self.mark = mark

    def build(self, x):
        s = self.add_variable_input("s", lambda: np.array(2.0), popxl.float32)
        self.aux["x"], self.aux["s"] = x, s
        self.aux["factor"] = 2.0
        return s * x * x

    def build_grad(self, dy):
        x, s = self.aux["x"], self.aux["s"]
        assert self.aux["x"] is x and "s" in self.aux and "y" not in self.aux
        assert self.aux["factor"] == 2.0
        self.var_grad["s"] = ops.sum(dy * x * x) * self.mark
        assert "s" in self.var_grad and self.var_grad["s"].shape == ()
        return dy * s * x * (2.0 * self.mark)


def module_of(build_grad, build=None):
    """A new module class around a `build_grad`, and a graph of it."""

    def affine(self, x):
        w = self.add_variable_input("w", lambda: np.ones((5, 2)), x.dtype)
        self.aux["x"], self.aux["w"] = x, w
        return x * w

    return type("Built", (addons.Module,), {"build": build or affine, "build_grad": build_grad})()


def good_grad(self, dy):
    self.var_grad["w"] = dy * self.aux["x"]
    return dy * self.aux["w"]


@pytest.fixture
def x(ir):
    return popxl.variable(np.random.normal(size=(5, 2)), popxl.float32, "x")


@pytest.fixture
def dy(ir):
    return popxl.variable(np.random.normal(size=(5, 2)), popxl.float32, "dy")


def gradients(graph, variables, x, dy, **kwargs):
    """Forward and backward call of a graph; returns outputs and gradients."""
    grad = graph.autodiff(**kwargs)
    info = graph.bind(variables).call_with_info(x)
    return info.outputs[0], grad.call(dy, args=grad.grad_graph_info.inputs_dict(info)), grad


def test_values(x, dy, evaluate):
    facts, graph = Square().create_graph(x)
    v = facts.init()
    y, (dx, ds), grad = gradients(graph, v, x, dy)
    out, dxs, dss, xs, seed = evaluate(y, dx, ds, x, dy)
    np.testing.assert_allclose(out, 2 * xs**2, rtol=1e-5)
    np.testing.assert_allclose(dxs, seed * 4 * xs, rtol=1e-5)
    np.testing.assert_allclose(dss, np.sum(seed * xs**2), rtol=1e-4)
    assert [t.name for t in grad.graph.inputs] == ["dy", "x", "s"]
    assert len(grad.graph.inputs) == len(graph.graph.outputs)
    assert len(grad.graph.outputs) == len(graph.graph.inputs)


def connections(expected):
    return {(e.fwd_tensor.name, e.fwd_tensor.dtype, e.fwd_tensor.shape, e.connection_type) for e in expected}


@pytest.mark.parametrize("method", ["auto", "build_grad", "autodiff"])
def test_the_same_as_autodiff(ir, evaluate, method):
    x = popxl.variable(np.random.normal(size=(5, 2)), popxl.float32, "x")
    dy = popxl.variable(np.random.normal(size=(5, 3)), popxl.float32, "dy")
    by_hand_facts, by_hand = HandLinear().create_graph(x)
    _, plain = Linear().create_graph(x)
    v = by_hand_facts.init()
    y1, grads1, grad1 = gradients(by_hand, v, x, dy, method=method)
    y2, grads2, grad2 = gradients(plain, v, x, dy)
    values = evaluate(y1, *grads1, y2, *grads2)
    for mine, theirs in zip(values[:4], values[4:], strict=True):
        assert_near(mine, theirs, 1e-5)
    info1, info2 = grad1.grad_graph_info, grad2.grad_graph_info
    assert connections(info1.expected_inputs) == connections(info2.expected_inputs)
    assert connections(info1.expected_outputs) == connections(info2.expected_outputs)
    for info in (info1, info2):
        assert [t.spec for t in info.graph.inputs] == [t.spec for t in info.inputs]
        assert [t.spec for t in info.graph.outputs] == [t.spec for t in info.outputs]


def test_outputs_follow_grads_required(x, dy, evaluate):
    facts, graph = Square().create_graph(x)
    s, given = graph.args.s, graph.graph.inputs[0]
    v = facts.init()
    _, (ds, dx), grad = gradients(graph, v, x, dy, grads_required=[s, given])
    assert grad.grad_graph_info.outputs == (s, given)
    dss, dxs, xs, seed = evaluate(ds, dx, x, dy)
    np.testing.assert_allclose(dss, np.sum(seed * xs**2), rtol=1e-4)
    np.testing.assert_allclose(dxs, seed * 4 * xs, rtol=1e-5)


def test_a_subset_of_the_gradients(ir):
    def only_w(self, dy):
        self.var_grad["w"] = dy * self.aux["x"]

    _, graph = module_of(only_w).create_graph(SPEC)
    grad = graph.autodiff(grads_required=[graph.args.w])
    assert [t.name for t in grad.grad_graph_info.outputs] == ["w"]
    assert len(graph.graph.outputs) == 3  # every stashed tensor, whether it was read or not

    _, graph = module_of(good_grad).create_graph(SPEC)
    grad = graph.autodiff(grads_required=graph.graph.inputs[:1])
    assert [t.name for t in grad.grad_graph_info.outputs] == ["x"]  # the gradient of w was superfluous


def test_one_of_several_outputs_provided(x, dy, evaluate):
    def build(self, x):
        return x * 2.0, x * 3.0

    _, graph = module_of(lambda self, dsecond: dsecond * 3.0, build).create_graph(x)
    grad = graph.autodiff(grads_provided=graph.graph.outputs[1:])
    (dx,) = grad.call(dy)
    dxs, seed = evaluate(dx, dy)
    np.testing.assert_allclose(dxs, 3 * seed, rtol=1e-6)


def test_one_tensor_as_the_gradient_of_two_inputs(x, dy, evaluate):
    class Add(addons.Module):
        def build(self, a, b):
            return a + b

        def build_grad(self, dy):
            return dy, dy

    _, graph = Add().create_graph(x, x)
    grad = graph.autodiff()
    info = graph.call_with_info(x, dy)
    site = grad.call_with_info(dy, args=grad.grad_graph_info.inputs_dict(info))
    by_parent = grad.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(info, site)
    assert set(by_parent) == {x, dy}
    first, second, seed = evaluate(by_parent[x], by_parent[dy], dy)
    np.testing.assert_array_equal(first, seed)
    np.testing.assert_array_equal(second, seed)


def test_differentiating_after_the_call(x, dy, evaluate):
    facts, graph = Square().create_graph(x)
    info = graph.bind(facts.init()).call_with_info(x)
    (y,) = info.outputs
    grad = graph.autodiff()
    dx, _ = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
    dxs, xs, seed = evaluate(dx, x, dy)
    np.testing.assert_allclose(dxs, seed * 4 * xs, rtol=1e-5)


def test_a_variable_of_an_inlined_child(x, dy, evaluate):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(2)

        def build(self, x):
            y = self.linear(x)
            self.aux["x"] = x
            return y

        def build_grad(self, dy):
            self.var_grad["linear.w"] = self.aux["x"].T @ dy
            self.var_grad["linear.b"] = ops.sum(dy, axis=0)
            return dy * 0.0

    facts, graph = Net().create_graph(x)
    _, (_, dw, db), _ = gradients(graph, facts.init(), x, dy)
    dws, dbs, xs, seed = evaluate(dw, db, x, dy)
    assert_near(dws, xs.T @ seed, 1e-4)
    assert_near(dbs, seed.sum(0), 1e-4)


# In other modules


class Nested(addons.Module):
    """Calls a module with a hand-written gradient, directly or through further modules."""

    def __init__(self, *between):
        super().__init__()
        self.inner = between[0](*between[1:]) if between else Square(mark=10.0)
        self.as_graph = not between or not isinstance(self.inner, Inlined)

    def build(self, x):
        if not self.as_graph:
            return self.inner(x)
        (y,) = self.call_module(self.inner, "called")(x)
        return y


class Inlined(Nested):
    """The same, to be inlined by its owner."""


@pytest.mark.parametrize("between", [(), (Inlined,), (Nested,), (Nested, Inlined), (Inlined, Nested)])
@pytest.mark.parametrize("transform", [addons.autodiff, addons.GraphWithNamedArgs.autodiff])
def test_the_transform_uses_recorded_gradients(x, dy, evaluate, between, transform):
    facts, graph = Nested(*between).create_graph(x)
    known = graph.called_graphs_grad_info
    assert len(known) == 1

    graph.called_graphs_grad_info = {}
    with pytest.raises(Exception, match="marked as unsafe to autodiff"):
        transform(graph)
    graph.called_graphs_grad_info = known

    grad = transform(graph)
    v = facts.init()
    info = graph.bind(v).call_with_info(x)
    dx, ds = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
    dxs, dss, xs, seed = evaluate(dx, ds, x, dy)
    np.testing.assert_allclose(dxs, 10 * seed * 4 * xs, rtol=1e-5)
    np.testing.assert_allclose(dss, 10 * np.sum(seed * xs**2), rtol=1e-4)


def test_the_module_of_a_graph_can_still_be_differentiated_by_the_transform(x, dy, evaluate):
    facts, graph = Square(mark=10.0).create_graph(x)
    grad = addons.autodiff(graph)
    info = graph.bind(facts.init()).call_with_info(x)
    dx, _ = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
    dxs, xs, seed = evaluate(dx, x, dy)
    np.testing.assert_allclose(dxs, seed * 4 * xs, rtol=1e-5)


def test_call_module_does_not_differentiate_unless_asked(ir):
    class Outer(addons.Module):
        def __init__(self, module, autodiff):
            super().__init__()
            self.call = self.call_module(module, "m", autodiff)

        def build(self, x):
            (y,) = self.call(x)
            return y

    for module, autodiff, recorded in (
        (Square(), "auto", 1),
        (Square(), "build_grad", 1),
        (Square(), "autodiff", 1),
        (Square(), "none", 0),
        (Linear(), "auto", 0),
        (Linear(), "autodiff", 1),
        (Linear(), "none", 0),
    ):
        _, graph = Outer(module, autodiff).create_graph(SPEC)
        assert len(graph.called_graphs_grad_info) == recorded
    with pytest.raises(Exception, match="`from_module` is specified"):
        Outer(Linear(), "build_grad").create_graph(SPEC)


def test_a_loss_that_computes_its_gradient_going_forward(x, evaluate):
    class Loss(addons.Module):
        def build(self, logits, labels):
            loss, dx = addons.cross_entropy_with_grad(logits, labels)
            self.aux["dx"] = dx
            return loss

        def build_grad(self, dloss):
            return self.aux["dx"]

    class Model(addons.Module):
        def build(self, x, labels):
            (loss,) = self.call_module(Loss(), grads_required=lambda g: g.graph.inputs[:1])(x * 2.0, labels)
            return loss

    labels = popxl.constant([0, 1, 1, 0, 1], popxl.int32)
    _, graph = Model().create_graph(x, labels)
    grad = addons.autodiff(graph, grads_required=graph.graph.inputs[:1])
    info = graph.call_with_info(x, labels)
    (dx,) = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(info))
    dxs, xs = evaluate(dx, x)
    p = np.exp(2 * xs) / np.exp(2 * xs).sum(-1, keepdims=True)
    assert_near(dxs, 2 * (p - np.eye(2)[[0, 1, 1, 0, 1]]) / 5, 1e-4)


def test_inlining_is_an_error_a_warning_or_fine(ir):
    class Outer(addons.Module):
        def __init__(self, mode):
            super().__init__()
            self.square = Square(grad_inlining_error=mode)

        def build(self, x):
            return self.square(x)

    with pytest.raises(GradientError, match="`build_grad` has been implemented"):
        Outer("error").create_graph(SPEC)
    with pytest.warns(UserWarning, match="`build_grad` has been implemented"):
        Outer("warning").create_graph(SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, graph = Outer("none").create_graph(SPEC)
    assert len(addons.autodiff(graph).graph.outputs) == 2


# Mistakes


def test_errors_leave_the_graph_as_it_was(x):
    """Wrong arguments, again and again on one graph, and then the right ones."""
    facts, graph = module_of(good_grad).create_graph(x)
    _, stranger = Linear().create_graph(x)
    outputs, aux = graph.graph.outputs, dict(graph.aux)
    (inp, w), (out,) = graph.graph.inputs, outputs
    for wrong, message in (
        ({"grads_provided": [stranger.graph.outputs[0]]}, "`grads_provided` is not a output of `fwd_graph`"),
        ({"grads_provided": [inp]}, "`grads_provided` is not a output of `fwd_graph`"),
        ({"grads_required": [stranger.graph.inputs[0]]}, "`grads_required` is not a input of `fwd_graph`"),
        ({"grads_required": [out]}, "`grads_required` is not a input of `fwd_graph`"),
        ({"grads_provided": [out, out]}, "more than once"),
        ({"grads_required": [w, inp, w]}, "more than once"),
        ({"grads_provided": []}, "do not match the signature"),
    ):
        with pytest.raises(ValueError, match=message):
            graph.autodiff(**wrong)
        assert graph.graph.outputs == outputs and graph.aux == aux and not graph.autodiff_applied
    graph.autodiff()
    assert len(graph.graph.outputs) == 3
    with pytest.raises(GradientError, match="Autodiff has already been applied to the graph"):
        graph.autodiff()


def no_w(self, dy):
    return dy


def no_x(self, dy):
    self.var_grad["w"] = dy


def too_many(self, dy):
    self.var_grad["w"] = dy
    return dy, dy


def wrong_shape(self, dy):
    self.var_grad["w"] = dy
    return dy[0]


def wrong_variable_shape(self, dy):
    self.var_grad["w"] = dy[0]
    return dy


def not_a_tensor(self, dy):
    self.var_grad["w"] = 1.0
    return dy


def not_a_variable(self, dy):
    self.var_grad["v"] = dy
    return dy


def returns_a_number(self, dy):
    self.var_grad["w"] = dy
    return 1.0


def unset(self, dy):
    return self.var_grad["w"]


def unknown_aux(self, dy):
    return self.aux["nope"]


@pytest.mark.parametrize(
    "build_grad, error, message",
    [
        (no_w, Exception, r"Not all variable gradients have been specified .*\['w'\]"),
        (no_x, Exception, "Not all forward graph inputs have been specified as outputs in the grad graph."),
        (too_many, Exception, "Too many outputs in the grad graph."),
        (wrong_shape, ValueError, "Shape or meta-shape of output Tensor at position 0"),
        (wrong_variable_shape, ValueError, "Shape or meta-shape of Tensor does not match variable."),
        (not_a_tensor, TypeError, "Not a tensor"),
        (not_a_variable, KeyError, "Not a variable"),
        (returns_a_number, ValueError, "returned 1.0"),
        (unset, KeyError, "has no 'w' yet"),
        (unknown_aux, KeyError, r"no 'nope'; `build` stashed \['x', 'w'\]"),
    ],
)
def test_incomplete_or_wrong_gradients(ir, build_grad, error, message):
    _, graph = module_of(build_grad).create_graph(SPEC)
    for _ in range(2):
        with pytest.raises(error, match=message):
            graph.autodiff()
    assert len(graph.graph.outputs) == 1 and not graph.autodiff_applied
    assert len(ir.graphs) == 2


@pytest.mark.parametrize(
    "build_grad",
    [lambda self, *dys: dys, lambda self, dy, **options: dy, lambda self, dy, *, scale=1.0: dy],
)
def test_the_signature_is_plain(ir, build_grad):
    _, graph = module_of(build_grad).create_graph(SPEC)
    with pytest.raises(TypeError, match="must only have a fixed number of positional parameters as inputs."):
        graph.autodiff()


def test_aux_and_var_grad_are_for_build_grad(ir):
    def build(self, x):
        self.aux["x"] = x
        assert "x" in self.aux
        for use in (
            lambda: self.aux["x"],
            lambda: self.var_grad["x"],
            lambda: self.var_grad.__setitem__("x", x),
        ):
            with pytest.raises(GradientError, match=" within the `build_graph` method"):
                use()
        return x

    module = module_of(lambda self, dy: dy, build)
    _, graph = module.create_graph(SPEC)
    for _ in range(2):
        assert "x" not in module.aux and "x" not in module.var_grad
        with pytest.raises(GradientError, match="You can only get items within the `build_graph` method"):
            module.aux["x"]
        with pytest.raises(GradientError, match=" within the `build_graph` method"):
            module.var_grad["x"]
        if not graph.autodiff_applied:
            graph.autodiff()


def test_too_many_gradients_provided(ir):
    _, graph = module_of(lambda self, da: da, lambda self, x: (x * 2.0, x * 3.0)).create_graph(SPEC)
    with pytest.raises(ValueError, match="do not match the signature"):
        graph.autodiff()
    assert len(graph.graph.outputs) == 2
    assert len(graph.autodiff(grads_provided=graph.graph.outputs[:1]).graph.inputs) == 1


def test_one_tensor_stashed_twice_and_an_output_stashed(x, dy, evaluate):
    def build(self, x):
        y = x * x
        self.aux["y"], self.aux["x"], self.aux["again"] = y, x, x
        return y

    def build_grad(self, dy):
        return dy * (self.aux["x"] + self.aux["again"]) + 0.0 * self.aux["y"]

    _, graph = module_of(build_grad, build).create_graph(x)
    grad = graph.autodiff()
    assert len(grad.graph.inputs) == len(graph.graph.outputs) == 4
    info = graph.call_with_info(x)
    (dx,) = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
    dxs, xs, seed = evaluate(dx, x, dy)
    np.testing.assert_allclose(dxs, 2 * xs * seed, rtol=1e-6)


def test_gradients_of_sharded_variables():
    class Sharded(addons.Module):
        def __init__(self, gradient):
            super().__init__()
            self.gradient = gradient

        def build(self, x):
            s = self.add_replica_sharded_variable_input("s", lambda: np.ones((4, 6)), popxl.float32)
            self.aux["s"] = s
            return x * s

        def build_grad(self, dy):
            self.var_grad["s"] = self.gradient(self.aux["s"], dy)
            return dy * self.aux["s"]

    with popxl.Ir(replication=4).main_graph:
        spec = popxl.TensorSpec((6,), popxl.float32, (4, 6))
        _, graph = Sharded(lambda s, dy: dy * s).create_graph(spec)
        assert graph.autodiff().graph.outputs[1].meta_shape == (4, 6)
        _, graph = Sharded(lambda s, dy: popxl.constant(np.ones(6), popxl.float32)).create_graph(spec)
        with pytest.raises(
            ValueError, match=r"Shape or meta-shape of Tensor does not match .* \(meta-shape \(4, 6\)\)"
        ):
            graph.autodiff()


def test_aux_of_another_graph(ir):
    outer = popxl.constant(1.0)

    def build(self, x):
        self.aux["outer"] = outer
        return x

    _, graph = module_of(lambda self, dy: dy, build).create_graph(SPEC)
    with pytest.raises(ValueError, match="not in the graph"):
        graph.autodiff()


def test_modules_without_a_hand_written_gradient(ir):
    module = Linear()
    assert not module.implements_grad_graph and HandLinear().implements_grad_graph
    _, graph = module.create_graph(SPEC)
    with pytest.raises(NotImplementedError):
        module.build_grad()
    with pytest.raises(GradientError, match="no `build_grad`"):
        module.create_grad_graph(graph)
    for wrapper in (graph, addons.GraphWithNamedArgs(graph.graph)):
        with pytest.raises(Exception, match="`from_module` is specified"):
            wrapper.autodiff(method="build_grad")


def test_create_grad_graph_info(ir, evaluate):
    spec = popxl.TensorSpec((3,), popxl.float32)
    fwd = ir.create_graph(lambda x: x * x, spec)
    grad = ir.create_graph(lambda dy, x: dy * x * 2.0, spec, spec)
    (x,), (y,), (dy, x_in), (dx,) = fwd.inputs, fwd.outputs, grad.inputs, grad.outputs
    info = create_grad_graph_info(ir, fwd, grad, {dy: y, x_in: x}, {dx: x}, [x])
    assert [(e.fwd_tensor, e.connection_type.value) for e in info.expected_inputs] == [(y, "FwdGrad"), (x, "Fwd")]
    assert info.outputs == (x,)
    v = popxl.variable([1.0, 2.0, 3.0])
    site = ops.call_with_info(fwd, v)
    back = addons.GraphWithNamedArgs.from_grad_graph(info)
    (result,) = back.call(popxl.constant(np.ones(3), popxl.float32), args=info.inputs_dict(site))
    np.testing.assert_allclose(evaluate(result)[0], [2, 4, 6])
    with pytest.raises(ValueError, match="must both be graphs of `ir`"):
        create_grad_graph_info(popxl.Ir(), fwd, grad, {}, {}, [])


class Doubled(addons.Module):
    """Calls a graph of `Scale` whose gradient it gives: ten times the right one, so that numbers say what was used."""

    def __init__(self, gives=0):
        super().__init__()
        self.gives = gives

    def build(self, x):
        graphs = [popxl.gir().create_graph(lambda t: t * 2.0, x.spec) for _ in range(2)]
        backward = popxl.gir().create_graph(lambda g: g * 20.0, x.spec)
        (g,), (dt,), forward = backward.inputs, backward.outputs, graphs[self.gives]
        info = create_grad_graph_info(
            popxl.gir(), forward, backward, {g: forward.outputs[0]}, {dt: forward.inputs[0]}, []
        )
        self.called_graphs_grad_info.add(forward, info)
        (y,) = ops.call(graphs[0], x)
        return y


class AroundOf(addons.Module):
    """Calls a module that is no attribute, so that nothing knows what it gave."""

    def build(self, x):
        return Doubled()(x) + x


@pytest.mark.parametrize(
    ("case", "gradient", "message"),
    [
        ("used", 20.0, None),
        (
            "of another graph",
            2.0,
            r"does not call that graph, it calls `.*lambda.*`\. Each `create_graph` makes another",
        ),
        ("of no attribute", 3.0, "assign the module that knows it to an attribute"),
        ("of the plain graph", 2.0, "differentiate the graph that `Module.create_graph` returned rather than its"),
    ],
)
def test_a_gradient_that_is_given_and_not_used(case, gradient, message, x, dy, evaluate):
    module = {"of another graph": Doubled(1), "of no attribute": AroundOf()}.get(case, Doubled())
    _, graph = module.create_graph(x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if case == "of the plain graph":
            grad = addons.GraphWithNamedArgs.from_grad_graph(popxl.transforms.autodiff(graph.graph))
        else:
            grad = graph.autodiff()
    (dx,) = grad.call(dy)
    dxs, seed = evaluate(dx, dy)
    np.testing.assert_allclose(dxs, gradient * seed, rtol=1e-6)
    assert [each.category for each in told] == [popxl.errors.UnusedGradientWarning] * (message is not None)
    for each in told:
        assert each.filename == __file__
        assert re.search(message, str(each.message))
