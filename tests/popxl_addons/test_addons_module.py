"""Modules: graphs with named state, inlined, outlined, nested, in lists and from a cache."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import UnnamedVariableWarning
from popxl_addons.variable_factory import VariableFactory


class Affine(addons.Module):
    def __init__(self, n, **kwargs):
        super().__init__(**kwargs)
        self.n = n

    def build(self, x):
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], self.n)), x.dtype)
        b = self.add_variable_input("b", partial(np.full, self.n, 0.5), x.dtype)
        return x @ w + b


class Pair(addons.Module):
    """Two inlined layers."""

    def __init__(self):
        super().__init__()
        self.first = Affine(3)
        self.second = Affine(4)

    def build(self, x):
        return self.second(self.first(x))


SPEC = popxl.TensorSpec((5, 2), popxl.float32)


@pytest.fixture
def x(ir):
    return popxl.variable(np.random.normal(size=(5, 2)), popxl.float32, "x")


def test_factories_and_placeholders_have_the_same_names(ir):
    facts, graph = Affine(3).create_graph(SPEC)
    assert facts.keys() == graph.args.keys() == ["w", "b"]
    assert [t.name for t in graph.graph.inputs] == ["x", "w", "b"]
    assert (graph.args.w.shape, graph.args.b.shape) == ((2, 3), (3,))
    assert graph.graph.name == "Affine_subgraph(0)"
    assert len(ir.graphs) == 2


def test_create_init_bind_call(x, evaluate):
    facts, graph = Affine(3).create_graph(x)
    v, v2 = facts.init(), facts.init()
    (y,), (y2,) = graph.bind(v).call(x), graph.bind(v2).call(x)
    assert len(x.ir.graphs) == 2
    xs, w, b, out, w2, out2 = evaluate(x, v.w, v.b, y, v2.w, y2)
    np.testing.assert_allclose(out, xs @ w + b, rtol=1e-5)
    np.testing.assert_allclose(out2, xs @ w2 + b, rtol=1e-5)
    assert not np.allclose(out, out2)


def test_graph_names_drop_locals_and_count_outer_modules_first(ir):
    class Outer(addons.Module):
        def build(self, x):
            _, self.inner_graph = Affine(3).create_graph(x)
            return x

    outer = Outer()
    _, graph = outer.create_graph(SPEC)
    assert graph.graph.name == "test_graph_names_drop_locals_and_count_outer_modules_first.Outer_subgraph(0)"
    assert outer.inner_graph.graph.name == "Affine_subgraph(1)"


def test_arguments_become_inputs_as_in_popxl(ir):
    class Args(addons.Module):
        def build(self, x, ts, ref: popxl.TensorByRef, number, *rest, flag=None, k=None):
            self.seen = (number, flag, type(ts))
            return x

    module = Args()
    spec = popxl.TensorSpec((), popxl.float32)
    _, graph = module.create_graph(spec, [spec, spec], spec, 3, spec, k=spec)
    assert [t.name for t in graph.graph.inputs] == ["x", "ts_0", "ts_1", "ref", "rest_0", "k"]
    assert [t.by_ref for t in graph.graph.inputs] == [False, False, False, True, False, False]
    assert module.seen == (3, None, list)
    with pytest.raises(ValueError, match="do not match the signature"):
        Affine(3).create_graph()
    with pytest.raises(TypeError):
        module.create_graph(spec, [spec, 1], spec, 3)


def test_a_baked_number_and_a_tensor_in_its_place(ir):
    class Scale(addons.Module):
        def build(self, x, lr):
            return x * lr

    _, baked = Scale().create_graph(SPEC, lr=1e-3)
    _, given = Scale().create_graph(SPEC, lr=popxl.TensorSpec((), popxl.float32))
    assert [len(g.graph.inputs) for g in (baked, given)] == [1, 2]


def test_what_build_may_return(ir):
    class Returns(addons.Module):
        def build(self, x, what):
            return what(x)

    for what, outputs in ((lambda x: None, 0), (lambda x: x, 1), (lambda x: (x, x + 1.0), 2)):
        assert len(Returns().create_graph(SPEC, what)[1].graph.outputs) == outputs
    with pytest.raises(ValueError):
        Returns().create_graph(SPEC, lambda x: 3)
    with pytest.raises(NotImplementedError):
        addons.Module().create_graph()
    assert Returns()(1, lambda x: None) is None


def test_create_graph_needs_a_graph():
    with pytest.raises(RuntimeError):
        Affine(3).create_graph(SPEC)


def test_inlined_submodules(ir):
    facts, graph = Pair().create_graph(SPEC)
    assert len(ir.graphs) == 2
    assert facts.keys_flat() == ["first.w", "first.b", "second.w", "second.b"]
    assert [t.name for t in graph.graph.inputs] == ["x", "first/w", "first/b", "second/w", "second/b"]
    assert graph.args.first.w in graph.graph
    assert graph.args.second.w.shape == (3, 4)


def test_name_scopes(ir):
    module = Affine(3)
    module.set_name_scope("outer")
    _, graph = module.create_graph(SPEC)
    assert [t.name for t in graph.graph.inputs] == ["x", "outer/w", "outer/b"]
    assert graph.graph.outputs[0].name.startswith("outer/")

    class Again(Affine):
        def build(self, x):
            return super().build(x)

    again = Again(3)
    again.set_name_scope("s")
    assert [t.name for t in again.create_graph(SPEC)[1].graph.inputs] == ["x", "s/s/w", "s/s/b"]


def test_a_decorated_build_keeps_its_signature(ir):
    class Decorated(addons.Module):
        @popxl.in_sequence()
        def build(self, x: popxl.TensorByRef):
            x += 1.0

    _, graph = Decorated().create_graph(SPEC)
    assert graph.graph.inputs[0].by_ref


def test_factories_are_ordered_by_registration_and_inputs_by_execution(ir):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Affine(3), Affine(4)

        def build(self, x):
            x = self.first(x)
            facts, graph = Affine(3).create_graph(x)
            for name in ("mid1", "mid2"):
                (x,) = graph.bind(self.add_variable_inputs(name, facts)).call(x)
            return self.last(x)

    facts, graph = Net().create_graph(SPEC)
    assert facts.keys() == graph.args.keys() == ["first", "last", "mid1", "mid2"]
    names = {tensor: name for name, tensor in graph.args.to_dict().items()}
    assert [names.get(t, "x").split(".")[0] for t in graph.graph.inputs][::2] == ["x", "first", "mid1", "mid2", "last"]
    assert len(ir.graphs) == 3


def test_submodules_assigned_in_build_and_a_second_build(ir):
    class Net(addons.Module):
        def build(self, x):
            self.fc = Affine(3)
            self.layers = addons.Module.from_list([Affine(3)])
            return self.layers[0](self.fc(x))

    net = Net()
    for _ in range(2):
        facts, graph = net.create_graph(SPEC)
        assert facts.keys_flat() == ["fc.w", "fc.b", "layers.0.w", "layers.0.b"]


def test_modules_can_be_built_again(ir):
    class Stack(addons.Module):
        def __init__(self):
            super().__init__()
            self.head = Affine(4)

        def build(self, x):
            facts, layer = Affine(2).create_graph(x)
            for i in range(3):
                (x,) = layer.bind(self.add_variable_inputs(i, facts)).call(x)
            return self.call_module(self.head, "tail")(x)

    stack = Stack()
    names = [f"{i}.{name}" for i in range(3) for name in "wb"] + ["tail.w", "tail.b"]
    for _ in range(2):
        facts, graph = stack.create_graph(SPEC)
        assert facts.keys_flat() == graph.args.keys_flat() == names


def test_a_failed_build_leaves_no_trace(ir):
    class Fails(Affine):
        fail = True

        def build(self, x):
            y = super().build(x)
            if self.fail:
                raise ZeroDivisionError
            return y

    module = Fails(3)
    with pytest.raises(ZeroDivisionError):
        module.create_graph(SPEC)
    module.fail = False
    assert module.create_graph(SPEC)[0].keys() == ["w", "b"]


def test_results_do_not_depend_on_the_module_any_more(ir):
    module = Pair()
    facts, graph = module.create_graph(SPEC)
    module.create_graph(popxl.TensorSpec((5, 7), popxl.float32))
    assert graph.args.first.w.shape == (2, 3)
    assert facts.first.w.shape == (2, 3)


def test_a_namespace(ir):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.fwd = addons.Module()

        def build(self, x):
            facts, graph = Affine(2).create_graph(x)
            (x,) = graph.bind(self.fwd.add_variable_inputs("mlm", facts)).call(x)
            self.add_variable_input("fwd.offset", lambda: np.zeros(()), popxl.float32, overwrite=True)
            self.fwd.add_variable_input("late", lambda: np.zeros(()), popxl.float32)
            return x

    facts, graph = Net().create_graph(SPEC)
    assert facts.keys_flat() == graph.args.keys_flat() == ["fwd.mlm.w", "fwd.mlm.b", "fwd.offset", "fwd.late"]


def test_names_added_below_others(ir):
    class Net(addons.Module):
        def build(self, x):
            facts, graph = Affine(2).create_graph(x)
            inputs = self.add_variable_inputs("fwd.linear", facts)
            offset = self.add_variable_input("fwd.offset", lambda: np.zeros(()), popxl.float32, overwrite=True)
            assert offset.name == "fwd.offset"
            self.add_variable_inputs("layer.2.0", facts)
            self.add_variable_inputs("layer.2.1", facts, overwrite=True)
            assert self.add_variable_inputs("none", addons.NamedVariableFactories()).len() == 0
            (y,) = graph.bind(inputs).call(x)
            return y + offset

    facts, graph = Net().create_graph(SPEC)
    assert facts.fwd.keys() == ["linear", "offset"]
    assert facts.layer[2][1].w.shape == (2, 2)
    assert facts.none.len() == 0


def test_name_conflicts(ir):
    class Net(addons.Module):
        def __init__(self, add):
            super().__init__()
            self.fc = Affine(3)
            self.add = add

        def build(self, x):
            facts, _ = Affine(2).create_graph(x)
            self.add_variable_input("a", lambda: np.zeros(()), popxl.float32)
            with pytest.raises(ValueError, match="already exists|negative"):
                self.add(self, facts)
            return x

    data = partial(np.zeros, ())
    for add in (
        lambda m, facts: m.add_variable_input("a", data, popxl.float32),
        lambda m, facts: m.add_variable_input("fc.x", data, popxl.float32),
        lambda m, facts: m.add_variable_inputs("fc", facts),
        lambda m, facts: m.add_variable_inputs(-1, facts),
        lambda m, facts: m.add_variable_factory(VariableFactory(data, popxl.float32, "a")),
        lambda m, facts: setattr(m, "fc", Affine(3)),
        lambda m, facts: setattr(m, "a", Affine(3)),
    ):
        _, graph = Net(add).create_graph(SPEC)
        assert [t.name for t in graph.graph.inputs] == ["x", "a"]  # no stray placeholder


def test_attributes_that_become_modules(ir):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.fc = None
            self.fc = Affine(3)

        def build(self, x):
            return self.fc(x)

    assert Net().create_graph(SPEC)[0].keys_flat() == ["fc.w", "fc.b"]


def test_add_variable_inputs_wants_factories(ir):
    class Net(addons.Module):
        def build(self, x):
            self.add_variable_inputs("v", addons.NamedTensors())

    with pytest.raises(TypeError, match="expected the NamedVariableFactories"):
        Net().create_graph(SPEC)


def test_a_registered_child_creates_its_own_graph(ir):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.linear = Affine(3)

        def build(self, x):
            facts, graph = self.linear.create_graph(x.spec)
            return graph.bind(self.add_variable_inputs("fwd", facts)).call(x)

    facts, graph = Net().create_graph(SPEC)
    assert facts.keys_flat() == ["fwd.w", "fwd.b"]
    assert [t.name for t in graph.graph.inputs] == ["x", "w", "b"]
    assert [t.name for t in graph.graph.called_graphs[0].inputs] == ["x", "linear/w", "linear/b"]


@pytest.mark.parametrize("inlined_first", [True, False])
def test_a_child_is_inlined_and_creates_its_own_graph(ir, inlined_first):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.linear = Affine(2)

        def outlined(self, x):
            facts, graph = self.linear.create_graph(x.spec)
            (x,) = graph.bind(self.add_variable_inputs("fwd", facts)).call(x)
            return x

        def build(self, x):
            return self.outlined(self.linear(x)) if inlined_first else self.linear(self.outlined(x))

    net = Net()
    for _ in range(2):
        facts, graph = net.create_graph(SPEC)
        assert facts.keys_flat() == graph.args.keys_flat() == ["linear.w", "linear.b", "fwd.w", "fwd.b"]
        own, added = ["linear/w", "linear/b"], ["w", "b"]
        assert [t.name for t in graph.graph.inputs] == ["x", *(own + added if inlined_first else added + own)]


def test_modules_that_a_build_assigns_forget_what_they_collect(ir):
    class Net(addons.Module):
        def __init__(self):
            super().__init__()
            self.parts = [Affine(2), Affine(2)]

        def build(self, x):
            self.layers = addons.Module.from_list(self.parts)
            for layer in self.layers:
                x = layer(x)
            return x

    net = Net()
    for _ in range(2):
        assert net.create_graph(SPEC)[0].keys_flat() == ["layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b"]


def test_forgetting_to_call_the_base_constructor(ir):
    class Plain(addons.Module):
        def __init__(self):
            self.factor = 2.0

        def build(self, x):
            return x * self.factor

    graph = addons.GraphCache().create_graph(Plain(), SPEC)
    assert len(graph.inputs) == 1
    assert ir.create_graph(Plain(), SPEC).outputs
    for use in (
        lambda m: m.create_graph(SPEC),
        lambda m: m.add_variable_input("w", lambda: np.zeros(2), popxl.float32),
        lambda m: setattr(m, "fc", Affine(3)),
        lambda m: setattr(Pair(), "fc", m),
    ):
        with pytest.raises(AttributeError, match=r"Plain: call `super\(\).__init__\(\)` first"):
            use(Plain())


def test_lists(x, evaluate):
    class Chain(addons.Module):
        def __init__(self, n):
            super().__init__()
            self.layers = addons.Module.from_list([Affine(2) for _ in range(n)])

        def build(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    chain = Chain(3)
    assert chain.layers[1] is chain.layers.get(1) is chain.layers["1"] is list(chain.layers)[1]
    facts, graph = chain.create_graph(x)
    assert len(x.ir.graphs) == 2
    assert [t.name for t in graph.graph.inputs][1:3] == ["0/w", "0/b"]
    assert graph.args.layers[1].w.shape == (2, 2)
    assert [sub.keys() for sub in facts.layers.values()] == [["w", "b"]] * 3
    v = facts.init()
    (y,) = graph.bind(v).call(x)
    out, expected, *weights = evaluate(y, x, *(v.layers[i].w for i in range(3)))
    for w in weights:
        expected = expected @ w + 0.5
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_variables_of_modules_that_are_no_attributes(x):
    """Neither the modules of a Python list, nor one that is called where it is made."""

    class Parts(addons.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.last = [Affine(2)], Affine(2)

        def build(self, x):
            facts, outlined = Affine(2).create_graph(x)  # has a graph of its own, and gets names here
            (x,) = outlined.bind(self.add_variable_inputs("first", facts)).call(x)
            return self.last(Affine(2)(self.layers[0](x)))

    with pytest.warns(
        UnnamedVariableWarning, match=r"Parts.create_graph: .* w__t\d+, b__t\d+, w__t\d+, b__t\d+\. Those"
    ):
        facts, graph = Parts().create_graph(x)
    assert facts.keys_flat() == graph.args.keys_flat() == ["last.w", "last.b", "first.w", "first.b"]


def test_only_lists_can_be_iterated(ir):
    with pytest.raises(AttributeError, match="iteration not supported"):
        list(Affine(3))
    modules = addons.Module.from_list([Affine(3)])
    for missing in (1, -1, "name"):
        with pytest.raises(AttributeError):
            modules[missing]
        with pytest.raises(AttributeError):
            modules.get(missing)


def test_lists_of_placeholders(ir):
    class Net(addons.Module):
        def build(self, x, factory):
            self.weights = addons.Module.from_variable_factories([factory] * 3)
            return self.weights[0] + self.weights[1] + self.weights[2] + x

    net = Net()
    factory = VariableFactory(lambda: np.ones((5, 2)), popxl.float32, "w")
    facts, graph = net.create_graph(SPEC, factory)
    assert facts.keys_flat() == ["weights.0", "weights.1", "weights.2"]
    assert [graph.args.weights[i] for i in range(3)] == list(graph.graph.inputs[1:])
    assert facts.weights[0] is facts.weights[2] is factory
    assert len(ir.graphs) == 2
    with pytest.raises(AttributeError, match="iteration not supported"):
        list(net.weights)


def test_lists_of_placeholders_of_another_float_dtype(ir):
    class Net(addons.Module):
        def build(self, x, factory):
            self.weights = addons.Module.from_variable_factories([factory] * 2)
            return x @ self.weights[0] @ self.weights[1]

    facts, graph = Net().create_graph(SPEC, VariableFactory(lambda: np.eye(SPEC.shape[1]), popxl.float16, "w"))
    (y,) = graph.bind(facts.init()).call(popxl.constant(np.ones(SPEC.shape), SPEC.dtype))
    assert (y.shape, y.dtype) == (SPEC.shape, SPEC.dtype)


def test_sharded_inputs():
    class Net(addons.Module):
        def build(self, x):
            self.add_replica_sharded_variable_input("s", lambda: np.zeros((4, 6)), popxl.float32)
            self.add_replica_sharded_variable_input("half", lambda: np.zeros((4, 6)), popxl.float32, shard_over=2)
            return x

    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        facts, graph = Net().create_graph(SPEC)
        assert (graph.args.s.shape, graph.args.s.meta_shape) == ((6,), (4, 6))
        assert graph.args.half.shape == (12,)
        assert facts.init().s.shape == (4, 6)


def test_call_module(x, evaluate):
    class Outer(addons.Module):
        def build(self, x):
            call = self.call_module(Affine(3), name="inner")
            outputs = call(x)
            assert isinstance(outputs, tuple)
            assert call.n_outputs_pre_autodiff == 1 and call.var_factories.keys() == ["w", "b"]
            assert call.graph.graph.name.startswith("Affine_subgraph")
            (z,) = self.call_module(Affine(4))(outputs[0])
            return z

    facts, graph = Outer().create_graph(x)
    assert facts.keys_flat() == ["inner.w", "inner.b", "Affine.w", "Affine.b"]
    assert len(x.ir.graphs) == 4
    v = facts.init()
    (y,) = graph.bind(v).call(x)
    out, xs, w1, w2 = evaluate(y, x, v.inner.w, v.Affine.w)
    np.testing.assert_allclose(out, (xs @ w1 + 0.5) @ w2 + 0.5, rtol=1e-4)


def test_call_module_errors(ir):
    class Twice(addons.Module):
        def build(self, x):
            self.call_module(Affine(2))(x)
            with pytest.raises(ValueError, match="'Affine' already exists"):
                self.call_module(Affine(2))(x)
            with pytest.raises(ValueError, match="`autodiff` is 'yes'"):
                self.call_module(Affine(2), autodiff="yes")
            return x

    Twice().create_graph(SPEC)


def test_a_module_without_variables_can_be_called_as_a_graph(ir):
    class Double(addons.Module):
        def build(self, x, by=2.0):
            return x * by

    class Outer(addons.Module):
        def build(self, x):
            (y,) = self.call_module(Double(), "d")(x, by=3.0)
            return y

    facts, _ = Outer().create_graph(SPEC)
    assert facts.keys() == ["d"] and facts.keys_flat() == []


class Optimiser(addons.Module):
    def build(self, v: popxl.TensorByRef, g, lr):
        m = self.add_variable_input("m", partial(np.zeros, v.shape), v.dtype, by_ref=True)
        m += g
        ops.scaled_add_(v, m, b=-lr)


def test_cache(x):
    opt = Optimiser(cache=True)
    y = popxl.variable(np.ones((5, 2)), popxl.float32)
    f1, g1 = opt.create_graph(x, x.spec, lr=0.1)
    f2, g2 = opt.create_graph(y, y.spec, lr=0.1)
    f3, g3 = opt.create_graph(y, y.spec, lr=0.2)
    assert g2.graph is g1.graph and g3.graph is not g1.graph
    assert f2 is not f1 and f2.m is f1.m and f3.m is not f1.m
    assert g2.args.m == g1.args.m
    f1.pop("m")
    assert opt.create_graph(x, x.spec, lr=0.1)[0].keys() == ["m"]


def test_a_cache_compares_by_value():
    class Optimiser(addons.Module):
        def build(self, v: popxl.TensorByRef, group=None, dtype=popxl.float32, betas=(0.9,), names=None):
            self.add_variable_input("m", partial(np.zeros, v.shape), dtype, replica_grouping=group)

    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        opt, spec = Optimiser(cache=True), popxl.TensorSpec((2,), popxl.float32)
        pairs = ir.replica_grouping(group_size=2)

        def graph(*args, **kwargs):
            return opt.create_graph(spec, *args, **kwargs)[1].graph

        assert graph(pairs) is graph(ir.replica_grouping_from_assignments([0, 0, 1, 1]))
        assert graph(pairs) is not graph(ir.replica_grouping(stride=2, group_size=2))
        assert graph(betas=[0.9, 0.99]) is graph(betas=[0.9, 0.99]) is not graph(betas=[0.9, 0.98])
        assert graph(names={"w": {"groups": [pairs]}}) is graph(
            names={"w": {"groups": [pairs.transpose().transpose()]}}
        )
        assert graph(dtype=popxl.float16) is not graph(dtype=popxl.float32)
        with pytest.raises(TypeError, match="ndarray is unhashable"):
            graph(names=np.zeros(2))


def test_no_cache(x):
    opt = Optimiser(cache=None)
    graphs = [opt.create_graph(x, x.spec, lr=0.1)[1].graph for _ in range(2)]
    assert graphs[0] is not graphs[1]


@pytest.mark.usefixtures("only_new_objects")
def test_a_cache_belongs_to_one_ir_and_does_not_keep_it():
    opt = Optimiser(cache=True)

    def build():
        ir = popxl.Ir()
        with ir.main_graph:
            opt.create_graph(SPEC, SPEC, lr=0.1)
        assert len(ir.graphs) == 2
        return weakref.ref(ir)

    refs = [build(), build()]
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_constructor_errors():
    class WithGrad(addons.Module):
        def build_grad(self, dy):
            return dy

    with pytest.raises(ValueError, match="You cannot use graph caching if you have implemented `build_grad`."):
        WithGrad(cache=True)
    with pytest.raises(ValueError, match="grad_inlining_error should be one of"):
        addons.Module(grad_inlining_error="maybe")


def test_a_step_of_training(x, evaluate):
    """The program at the head of the specification."""

    class Gain(addons.Module):
        def build(self, x):
            g = self.add_variable_input("gain", lambda: np.full(x.shape, 3.0), x.dtype)
            return g * x

    facts, graph = Gain().create_graph(x)
    grad = addons.autodiff(graph)
    variables = facts.init()
    info = graph.bind(variables).call_with_info(x)
    (y, *_) = info.outputs
    dx, dg = grad.call(popxl.constant(np.ones((5, 2)), popxl.float32), args=grad.grad_graph_info.inputs_dict(info))
    gain = ops.scaled_add_(variables.gain, dg, b=-0.1)
    out, xs, after, gx = evaluate(y, x, gain, dx)
    np.testing.assert_allclose(out, 3 * xs, rtol=1e-6)
    np.testing.assert_allclose(after, 3 - 0.1 * xs, rtol=1e-6)
    np.testing.assert_allclose(gx, np.full((5, 2), 3.0))
