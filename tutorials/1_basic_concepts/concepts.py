"""A tour of PopXL's graphs, modules and named collections, in four stops.

    python tutorials/1_basic_concepts/concepts.py

Every stop builds something small and prints it; README.md beside this file tells the
story. The models are in model.py.
"""

import numpy as np

import popxl
import popxl_addons as addons
from model import Linear, Net, OutlinedNet
from popxl import ops

np.random.seed(42)


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


title("1. A module becomes a graph")

# An Ir is one whole program. Its main graph is what runs; every other graph runs
# because another graph calls it.
ir = popxl.Ir()
with ir.main_graph:
    # A graph is made for inputs of a certain shape and type. The variables of the
    # module are inputs as well, and for each of them there is a factory, which has not
    # made anything yet.
    facts, linear = Linear(3).create_graph(popxl.TensorSpec((2, 4), popxl.float32))
    print("variables to make:", facts.keys())
    print(linear.print_schedule())

    # Variables live in the main graph, so here is the place to make them. Binding the
    # graph to them leaves only x open.
    variables = facts.init()
    print("variables made:", variables)
    bound = linear.bind(variables)

    x_stream = popxl.h2d_stream((2, 4), popxl.float32, "x")
    x = ops.host_load(x_stream)
    (y,) = bound.call(x)
    y_stream = addons.host_store(y)

x_data = np.arange(8, dtype=np.float32).reshape(2, 4)
with popxl.Session(ir, "ipu_hw") as session:
    y_data = session.run({x_stream: x_data})[y_stream]
    weight, bias = (
        session.get_tensor_data(variable)
        for variable in (variables.weight, variables.bias)
    )
print("the same as NumPy:", np.allclose(y_data, x_data @ weight + bias, atol=1e-5))


title("2. One graph, two sets of variables")

# Each `init` of the factories makes new variables. The graph is there once, and the
# main graph calls it twice.
ir = popxl.Ir()
with ir.main_graph:
    facts, linear = Linear(4).create_graph(popxl.TensorSpec((2, 4), popxl.float32))
    first = linear.bind(facts.init("first"))
    second = linear.bind(facts.init("second"))

    x = ops.host_load(popxl.h2d_stream((2, 4), popxl.float32, "x"))
    (x,) = first.call(x)
    (x,) = second.call(x)
    addons.host_store(x)
print(ir.main_graph)


title("3. Nested or outlined")

# Nested modules are written out in full, wherever they are used. An outlined one is a
# graph of its own and leaves a call behind. Both networks have the same variables, so
# both graphs can be bound to one set of them.
ir = popxl.Ir()
with ir.main_graph:
    image_stream = popxl.h2d_stream((28, 28), popxl.float32, "image")
    image = ops.host_load(image_stream)

    facts, nested = Net().create_graph(image)
    print("variables:", *facts.to_dict())
    print(nested.print_schedule())

    outlined_facts, outlined = OutlinedNet().create_graph(image)
    print("\nvariables:", *outlined_facts.to_dict())
    print(outlined.print_schedule())

    variables = facts.init()
    scores = [graph.bind(variables).call(image)[0] for graph in (nested, outlined)]
    score_streams = [addons.host_store(score) for score in scores]

with popxl.Session(ir, "ipu_hw") as session:
    results = session.run({image_stream: np.random.rand(28, 28).astype(np.float32)})
print(
    "\nthe same scores:",
    np.allclose(*(results[stream] for stream in score_streams), atol=1e-5),
)


title("4. Trees of names")

# Factories, variables and inputs come in trees whose leaves have dotted names. All
# trees have the methods shown here.
with popxl.Ir().main_graph:
    facts, _ = Linear(3).create_graph(popxl.TensorSpec((2, 4), popxl.float32))
    layers = addons.NamedTensors()
    layers.insert("one", facts.init("one"))  # a tree may be inserted into a tree
    layers.insert("two", facts.init("two"))
    print(layers)

    print("\na branch:", layers.one)
    print("a leaf:", layers.one.bias, "is", layers["one.bias"])
    print("top level:", layers.keys())
    print("all leaves:", layers.keys_flat())

    weights = addons.NamedTensors.from_dict({"one": layers.one.weight})
    # takes names that are not there yet
    weights.update(addons.NamedTensors.from_dict({"two": layers.two.weight}))
    print("made from a dictionary:", weights.to_dict())

    names, tensors = layers.unpack()  # both sorted by name; `pack` is the way back
    print("unpacked:", names)
    print("packed again:", addons.NamedTensors.pack(names, tensors).keys())
    print("the tensors, sorted:", *(tensor.name for tensor in layers.tensors))

    # Two trees with equal names make a dictionary from the leaves of one to the leaves
    # of the other. The next program, mnist.py, copies its trained weights this way.
    for one, two in sorted(
        layers.one.to_mapping(layers.two).items(), key=lambda pair: pair[0].name
    ):
        print("from one to two:", one.name, "->", two.name)
