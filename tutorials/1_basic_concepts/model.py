"""The models of this tutorial: a linear layer, a network that nests it, and the same
network with a shared graph.

`build` is the mathematics of a module. It runs while a graph is made, never while the
program runs: what it says with tensors is recorded as ops. A variable is declared where
it is used, by its name and by a function that makes its first value; the graph gets an
input for it, and the value itself is made later, in the main graph.
"""

from functools import partial

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops


class Linear(addons.Module):
    """`x @ weight + bias`, from (..., n) to (..., features)."""

    def __init__(self, features: int):
        super().__init__()
        self.features = features

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        n = x.shape[-1]
        # keeps the size of what passes through
        random = partial(np.random.normal, 0, n**-0.5, (n, self.features))
        weight = self.add_variable_input("weight", random, x.dtype)
        bias = self.add_variable_input(
            "bias", partial(np.zeros, self.features), x.dtype
        )
        return x @ weight + bias


class Net(addons.Module):
    """Four linear layers with gelu between them, from images (..., 28, 28) to ten
    scores for each.

    The layers are nested: calling `self.fc2` writes the ops of its `build` into the
    graph of the network.
    """

    def __init__(self):
        super().__init__()
        self.fc1 = Linear(512)
        self.fc2 = Linear(512)
        self.fc3 = Linear(512)
        self.fc4 = Linear(10)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x.reshape((-1, 28 * 28))
        for layer in (self.fc1, self.fc2, self.fc3):
            x = ops.gelu(layer(x))
        return self.fc4(x)


class OutlinedNet(addons.Module):
    """`Net` once more, with one graph for the two layers in the middle, called twice.

    `fc2` and `fc3` do the same with different variables. So the layer is made a graph
    of its own, once, and each of its two calls gets a set of inputs under its own name.
    """

    def __init__(self):
        super().__init__()
        self.fc1 = Linear(512)
        self.fc4 = Linear(10)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x.reshape((-1, 28 * 28))
        x = ops.gelu(self.fc1(x))
        facts, layer = Linear(512).create_graph(x)
        for name in ("fc2", "fc3"):
            inputs = self.add_variable_inputs(name, facts)
            (x,) = layer.bind(inputs).call(x)
            x = ops.gelu(x)
        return self.fc4(x)
