"""The printed schedules of the specification, letter by letter."""

from functools import partial

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops


class Linear(addons.Module):
    def __init__(self, out_features, bias=True):
        super().__init__()
        self.out_features = out_features
        self.bias = bias

    def build(self, x):
        w = self.add_variable_input("weight", partial(np.zeros, (x.shape[-1], self.out_features)), x.dtype)
        y = x @ w
        if self.bias:
            b = self.add_variable_input("bias", partial(np.zeros, y.shape[-1]), x.dtype)
            y = y + b
        return y


class Net(addons.Module):
    def __init__(self, cache=None):
        super().__init__(cache=cache)
        self.fc1 = Linear(512)
        self.fc2 = Linear(512)
        self.fc3 = Linear(512)
        self.fc4 = Linear(10)

    def build(self, x):
        x = x.reshape((-1, 28 * 28))
        x = ops.gelu(self.fc1(x))
        x = ops.gelu(self.fc2(x))
        x = ops.gelu(self.fc3(x))
        return self.fc4(x)


class NetOutlined(addons.Module):
    def __init__(self, cache=None):
        super().__init__(cache=cache)
        self.fc1 = Linear(512)
        self.fc4 = Linear(10)

    def build(self, x):
        x = x.reshape((-1, 28 * 28))
        x = ops.gelu(self.fc1(x))
        facts, subgraph = Linear(512).create_graph(x)
        fc2 = subgraph.bind(self.add_variable_inputs("fc2", facts))
        fc3 = subgraph.bind(self.add_variable_inputs("fc3", facts))
        (x,) = fc2.call(x)
        x = ops.gelu(x)
        (x,) = fc3.call(x)
        x = ops.gelu(x)
        return self.fc4(x)


class Shift(addons.Module):
    def build(self, x):
        s = self.add_variable_input("s", lambda: np.ones(2), popxl.float32)
        return x + s


class Two(addons.Module):
    def build(self, x):
        facts, g = Shift().create_graph(x)
        (y,) = g.bind(self.add_variable_inputs("a", facts)).call(x)
        (z,) = g.bind(self.add_variable_inputs("b", facts)).call(y)
        return z * 2.0


LINEAR = """\
Graph : Linear_subgraph(0)
  (%1, weight=%2, bias=%3) -> (%5) {
    MatMul.100 (%1 [(2, 4) float32], %2 [(4, 32) float32]) -> (%4 [(2, 32) float32])
    Add.101 (%4 [(2, 32) float32], %3 [(32,) float32]) -> (%5 [(2, 32) float32])
  }"""

NET_INPUTS = (
    "%1, fc1.weight=%2, fc1.bias=%3, fc2.weight=%4, fc2.bias=%5, fc3.weight=%6, fc3.bias=%7, fc4.weight=%8, fc4.bias=%9"
)

NET = f"""\
Graph : Net_subgraph(0)
  ({NET_INPUTS}) -> (%21) {{
    Reshape.100 (%1 [(28, 28) float32]) -> (%10 [(1, 784) float32])
    MatMul.101 (%10 [(1, 784) float32], %2 [(784, 512) float32]) -> (%11 [(1, 512) float32])
    Add.102 (%11 [(1, 512) float32], %3 [(512,) float32]) -> (%12 [(1, 512) float32])
    Gelu.103 (%12 [(1, 512) float32]) -> (%13 [(1, 512) float32])
    MatMul.104 (%13 [(1, 512) float32], %4 [(512, 512) float32]) -> (%14 [(1, 512) float32])
    Add.105 (%14 [(1, 512) float32], %5 [(512,) float32]) -> (%15 [(1, 512) float32])
    Gelu.106 (%15 [(1, 512) float32]) -> (%16 [(1, 512) float32])
    MatMul.107 (%16 [(1, 512) float32], %6 [(512, 512) float32]) -> (%17 [(1, 512) float32])
    Add.108 (%17 [(1, 512) float32], %7 [(512,) float32]) -> (%18 [(1, 512) float32])
    Gelu.109 (%18 [(1, 512) float32]) -> (%19 [(1, 512) float32])
    MatMul.110 (%19 [(1, 512) float32], %8 [(512, 10) float32]) -> (%20 [(1, 10) float32])
    Add.111 (%20 [(1, 10) float32], %9 [(10,) float32]) -> (%21 [(1, 10) float32])
  }}"""

NET_OUTLINED = f"""\
Graph : NetOutlined_subgraph(0)
  ({NET_INPUTS}) -> (%19) {{
    Reshape.100 (%1 [(28, 28) float32]) -> (%10 [(1, 784) float32])
    MatMul.101 (%10 [(1, 784) float32], %2 [(784, 512) float32]) -> (%11 [(1, 512) float32])
    Add.102 (%11 [(1, 512) float32], %3 [(512,) float32]) -> (%12 [(1, 512) float32])
    Gelu.103 (%12 [(1, 512) float32]) -> (%13 [(1, 512) float32])
    Call.106(Linear_subgraph(1)) (%13 [(1, 512) float32], %4 [(512, 512) float32], %5 [(512,) float32]) \
-> (%14 [(1, 512) float32])
    Gelu.107 (%14 [(1, 512) float32]) -> (%15 [(1, 512) float32])
    Call.108(Linear_subgraph(1)) (%15 [(1, 512) float32], %6 [(512, 512) float32], %7 [(512,) float32]) \
-> (%16 [(1, 512) float32])
    Gelu.109 (%16 [(1, 512) float32]) -> (%17 [(1, 512) float32])
    MatMul.110 (%17 [(1, 512) float32], %8 [(512, 10) float32]) -> (%18 [(1, 10) float32])
    Add.111 (%18 [(1, 10) float32], %9 [(10,) float32]) -> (%19 [(1, 10) float32])
  }}"""

TWO = """\
Graph : Two_subgraph(0)
  (%1, a.s=%2, b.s=%3) -> (%7) {
    Call.101(Shift_subgraph(1)) (%1 [(2,) float32], %2 [(2,) float32]) -> (%4 [(2,) float32])
    Call.102(Shift_subgraph(1)) (%4 [(2,) float32], %3 [(2,) float32]) -> (%5 [(2,) float32])
    Mul.103 (%5 [(2,) float32], %6 [() float32]) -> (%7 [(2,) float32])
  }"""


def test_linear(ir):
    facts, graph = Linear(32).create_graph(popxl.TensorSpec((2, 4), popxl.float32))
    assert graph.print_schedule() == LINEAR
    assert list(facts.to_dict()) == ["weight", "bias"]
    assert repr(facts.init()) == (
        "NamedTensors({\n"
        "bias: Variable[bias popxl.dtypes.float32 (32,)],\n"
        "weight: Variable[weight popxl.dtypes.float32 (4, 32)],\n"
        "})"
    )


def test_net(ir):
    facts, graph = Net().create_graph(popxl.TensorSpec((28, 28), popxl.float32))
    assert graph.print_schedule() == NET
    names = [f"fc{i}.{name}" for i in range(1, 5) for name in ("weight", "bias")]
    assert str(facts.to_dict().keys()) == f"dict_keys({names})"


def test_outlined_net(ir):
    facts, graph = NetOutlined().create_graph(popxl.TensorSpec((28, 28), popxl.float32))
    assert graph.print_schedule() == NET_OUTLINED
    names = [f"fc{i}.{name}" for i in (1, 4, 2, 3) for name in ("weight", "bias")]
    assert str(facts.to_dict().keys()) == f"dict_keys({names})"


def test_two_call_sites_and_a_constant(ir):
    assert Two().create_graph(popxl.TensorSpec((2,), popxl.float32))[1].print_schedule() == TWO


def test_ids_go_on_in_the_same_ir(ir):
    graphs = [Shift().create_graph(popxl.TensorSpec((2,), popxl.float32))[1] for _ in range(2)]
    assert "Add.100 " in graphs[0].print_schedule() and "Add.101 " in graphs[1].print_schedule()


def test_empty_and_main_graphs(ir):
    empty = addons.GraphWithNamedArgs(ir.create_empty_graph("e"))
    assert empty.print_schedule() == "Graph : e_subgraph(0)\n  () -> () {\n    \n  }"
    assert addons.GraphWithNamedArgs(ir.main_graph).print_schedule().startswith("Graph : \n")
