"""Ways to train the GPT that give the same numbers: each function here builds the program of one, and its session.

`accumulated`, `pipelined` and `phased` work on micro-batches, and take means of their gradients. How weights are
divided among replicas is told in `parallel`.
"""

# No deferred annotations in this file: `TensorByRef` is read from them.
from collections.abc import Callable, Mapping
from functools import partial

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.ops.call import CallSiteInfo
from popxl_addons import (
    InputStreams,
    Module,
    NamedTensors,
    NamedVariableFactories,
    OutputStreams,
    VariableFactory,
    autodiff_with_accumulation,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
    cross_entropy_with_grad,
    pipelined_execution,
    recompute_graph,
    seed_variable,
)
from popxl_addons.remote import load_remote_graph, named_variable_buffers, store_remote_graph
from tests.popxl_addons.gpt.model import GPT, Block, Config, Embedding, Head, OutlinedGPT, first_table
from tests.popxl_addons.gpt.parallel import tensor_parallel
from tests.popxl_addons.gpt.training import AdamW, Training, start_again, streams

# Whole batches ------------------------------------------------------------------------------------------------------


def plain(config: Config) -> Training:
    """The whole model in one graph, and its gradient."""
    return whole_batches(config, GPT(config))


def outlined(config: Config) -> Training:
    """Blocks are calls of one graph, and so are their gradients: the program holds a block once."""
    return whole_batches(config, OutlinedGPT(config))


def whole_batches(config: Config, model: Module) -> Training:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = streams(config, config.batch)
        _, seed = seed_variable(config.seed)
        facts, graph = model.create_graph(inputs.tokens.spec, seed)
        grad = addons.autodiff(graph, grads_required=graph.args.values_flat())
        variables = facts.init()

        tokens, labels = ops.host_load(inputs.tokens), ops.host_load(inputs.labels)
        info = graph.bind(variables).call_with_info(tokens, seed)
        loss, dlogits = cross_entropy_with_grad(info.outputs[0], labels.flatten())
        gradients = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        ops.host_store(outputs.loss, loss)
        optim = AdamW(config).update(variables, NamedTensors.pack(graph.args.keys_flat(), gradients))
        seed += 1
    return Training(config, ir, inputs, outputs, variables, optim, seed)


# Micro-batches ------------------------------------------------------------------------------------------------------


class MicroBatch(Module):
    """Forward and backward pass of one micro-batch. Its loss goes to the host, its gradients into means."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    @popxl.in_sequence()
    def build(self, inputs: InputStreams, outputs: OutputStreams, seed: popxl.TensorByRef) -> None:
        tokens, labels = ops.host_load(inputs.tokens), ops.host_load(inputs.labels)
        facts, graph = GPT(self.config).create_graph(tokens, seed)
        grad_facts, grad = autodiff_with_accumulation(graph, graph.args.values_flat())
        info = graph.bind(self.add_variable_inputs("fwd", facts)).call_with_info(tokens, seed)
        loss, dlogits = cross_entropy_with_grad(info.outputs[0], labels.flatten())
        means = grad.bind(self.add_variable_inputs("bwd", grad_facts))
        means.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        ops.host_store(outputs.loss, loss)
        seed += 1


def accumulated(config: Config) -> Training:
    """Micro-batches go through the model one after the other; the mean of their gradients makes the step."""
    ir = popxl.Ir()
    ir.num_host_transfers = config.micro_batches
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = streams(config, config.batch // config.micro_batches)
        _, seed = seed_variable(config.seed)
        facts, micro_batch = MicroBatch(config).create_graph(inputs, outputs, seed)
        variables = facts.init()
        ops.repeat(micro_batch.graph, config.micro_batches, seed, inputs_dict=micro_batch.bind(variables).args)
        optim = AdamW(config).update(variables.fwd, variables.bwd.accum)
        start_again(variables.bwd)
    return Training(config, ir, inputs, outputs, variables.fwd, optim, seed)


# Parts of the model, each a graph of its own ------------------------------------------------------------------------


class Part:
    """A part of the model as a graph, and its gradient graph.

    Args:
        module: what it is.
        tensors: what it is given.
        gradients: how many of the first of these get gradients.
        recompute: whether the gradient graph computes the part again, so that nothing inside of it has to be kept.
        accumulate: whether the gradient graph takes the gradients of variables into means, instead of returning them.
    """

    grad_facts: NamedVariableFactories

    def __init__(
        self,
        module: Module,
        *tensors: popxl.Tensor | popxl.TensorSpec,
        gradients: int,
        recompute: bool = False,
        accumulate: bool = True,
    ):
        self.facts, self.graph = module.create_graph(*tensors)
        for t in self.graph.graph.inputs:
            if t.name == "table":  # a variable, too, but of two parts
                self.graph.args.insert("table", t)
        required, variables = self.graph.graph.inputs[:gradients], self.graph.args.values_flat()
        if accumulate:
            self.grad_facts, self.grad = autodiff_with_accumulation(self.graph, variables, grads_required=required)
        else:
            self.grad = addons.autodiff(self.graph, grads_required=(*required, *variables))
        if recompute:
            self.grad = recompute_graph(self.grad)

    def backward(self, dy: popxl.Tensor, call: CallSiteInfo) -> tuple[list[popxl.Tensor], NamedTensors]:
        """Gradients of what a call was given, and of the variables, of a part that returns these."""
        results = self.grad.call(dy, args=self.grad.grad_graph_info.inputs_dict(call))
        names = self.graph.args.keys_flat()
        count = len(results) - len(names)
        return list(results[:count]), NamedTensors.pack(names, results[count:])


def recomputed(config: Config) -> Training:
    """The gradient of a layer computes the layer again, and its weights are updated as soon as there is a gradient.

    What is kept is what goes into each layer.
    """
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = streams(config, config.batch)
        _, seed = seed_variable(config.seed)
        rows = rows_of(inputs, config)
        table = VariableFactory(partial(first_table, config), popxl.float32, "table").create_tensor()
        embedding = Part(Embedding(config), inputs.tokens.spec, table, seed, gradients=0, accumulate=False)
        block = Part(Block(config), rows, seed, gradients=1, recompute=True, accumulate=False)
        head = Part(Head(), rows, table, gradients=1, accumulate=False)
        layers = [block.facts.init(f"layers.{i}") for i in range(config.layers)]
        ends = NamedTensors(table=table, norm=head.facts.init("head").norm)
        adamw = AdamW(config)

        first_seed, *seeds = ops.split_random_seed(seed, 1 + config.layers)
        seed += 1
        embedded = embedding.graph.call_with_info(ops.host_load(inputs.tokens), table, first_seed)
        x, calls = embedded.outputs[0], []
        for layer, layer_seed in zip(layers, seeds, strict=True):
            calls.append(block.graph.bind(layer).call_with_info(x, layer_seed))
            x = calls[-1].outputs[0]
        ended = head.graph.bind(ends).call_with_info(x)
        loss, dlogits = cross_entropy_with_grad(ended.outputs[0], ops.host_load(inputs.labels).flatten())
        ops.host_store(outputs.loss, loss)

        (dx,), gradients = head.backward(dlogits, ended)
        states = {}
        for i in reversed(range(config.layers)):
            (dx,), layer_gradients = block.backward(dx, calls[i])
            states[i] = adamw.update(layers[i], layer_gradients)
        _, more = embedding.backward(dx, embedded)
        state = adamw.update(ends, NamedTensors(table=gradients.table + more.table, norm=gradients.norm))
    return Training(
        config,
        ir,
        inputs,
        outputs,
        whole_model(ends, layers),
        whole_model(state, [states[i] for i in sorted(states)]),
        seed,
    )


def whole_model(ends: NamedTensors, layers: list[NamedTensors]) -> NamedTensors:
    """Variables of both ends, `table` and `norm`, and of the layers, under the names that they have in `GPT`."""
    numbered = {f"layers.{i}": layer for i, layer in enumerate(layers)}
    return NamedTensors.from_dict({"table": ends.table, "head.norm": ends.norm} | numbered)


def pipelined(config: Config) -> Training:
    """The layers are on two IPUs, half of them each. Four micro-batches are on their way at once."""
    ir = popxl.Ir()
    ir.num_host_transfers = config.micro_batches
    half = config.layers // 2
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = streams(config, config.batch // config.micro_batches)
        _, seed = seed_variable(config.seed)
        rows = rows_of(inputs, config)
        table = VariableFactory(partial(first_table, config), popxl.float32, "table").create_tensor()
        with popxl.ipu(0):
            embedding = Part(Embedding(config), inputs.tokens.spec, table, seed, gradients=0)
            lower = Part(Block(config), rows, seed, gradients=1)
        with popxl.ipu(1):
            upper = Part(Block(config), rows, seed, gradients=1)
            head = Part(Head(), rows, table, gradients=1)
        parts = [lower] * half + [upper] * (config.layers - half)
        layers = [part.facts.init(f"layers.{i}") for i, part in enumerate(parts)]
        layer_means = [part.grad_facts.init(f"means.layers.{i}") for i, part in enumerate(parts)]
        head_variables = head.facts.init("head")
        head_means, embedding_means = head.grad_facts.init("means.head"), embedding.grad_facts.init("means.embedding")
        calls = {}

        def forward(i: int, x: popxl.Tensor) -> popxl.Tensor:
            calls[i] = parts[i].graph.bind(layers[i]).call_with_info(x, seeds[i])
            return calls[i].outputs[0]

        def backward(i: int, dx: popxl.Tensor) -> popxl.Tensor:
            activations = p.stash_and_restore_activations(calls[i], parts[i].grad)
            (dx,) = parts[i].grad.bind(layer_means[i]).call(dx, args=activations)
            return dx

        with pipelined_execution(config.micro_batches) as p:
            with p.stage(0), popxl.ipu(0):
                own_seed, *seeds = ops.split_random_seed(seed, 1 + config.layers)
                seed += 1
                call = embedding.graph.call_with_info(ops.host_load(inputs.tokens), table, own_seed)
                x = call.outputs[0]
                for i in range(half):
                    x = forward(i, x)
                x = x.copy_to_ipu(1)
                seeds[half:] = [s.copy_to_ipu(1) for s in seeds[half:]]
            with p.stage(1), popxl.ipu(1):
                for i in range(half, config.layers):
                    x = forward(i, x)
            with p.stage(2), popxl.ipu(1):
                info = head.graph.bind(head_variables).call_with_info(x, table)
                loss, dlogits = cross_entropy_with_grad(info.outputs[0], ops.host_load(inputs.labels).flatten())
                ops.host_store(outputs.loss, loss)
                (dx,) = head.grad.bind(head_means).call(dlogits, args=head.grad.grad_graph_info.inputs_dict(info))
                for i in reversed(range(half, config.layers)):
                    dx = backward(i, dx)
                dx = dx.copy_to_ipu(0)
            with p.stage(3), popxl.ipu(0):
                for i in reversed(range(half)):
                    dx = backward(i, dx)
                activations = p.stash_and_restore_activations(call, embedding.grad)
                embedding.grad.bind(embedding_means).call(dx, args=activations)

        ends = NamedTensors(table=embedding_means.accum.table + head_means.accum.table, norm=head_means.accum.norm)
        means = whole_model(ends, [of_layer.accum for of_layer in layer_means])
        variables = whole_model(NamedTensors(table=table, norm=head_variables.norm), layers)
        optim = AdamW(config).update(variables, means)
        for accumulators in (embedding_means, head_means, *layer_means):
            start_again(accumulators)
    return Training(config, ir, inputs, outputs, variables, optim, seed)


def rows_of(inputs: InputStreams, config: Config) -> popxl.TensorSpec:
    """What blocks take and give."""
    return popxl.TensorSpec((inputs.tokens.spec.shape[0] * config.sequence, config.width), popxl.float32)


class HeadStep(Module):
    """Forward pass, loss and backward pass of the head, at once."""

    @popxl.in_sequence()
    def build(self, x: popxl.Tensor, labels: popxl.Tensor, table: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        head = Part(Head(), x, table, gradients=1)
        info = head.graph.bind(self.add_variable_inputs("fwd", head.facts)).call_with_info(x, table)
        loss, dlogits = cross_entropy_with_grad(info.outputs[0], labels.flatten())
        means = head.grad.bind(self.add_variable_inputs("bwd", head.grad_facts))
        (dx,) = means.call(dlogits, args=head.grad.grad_graph_info.inputs_dict(info))
        return dx, loss


class Stored:
    """Variables in remote memory, and what AdamW has for them: those of layers that are alike, in a slot for each."""

    def __init__(self, config: Config, facts: NamedVariableFactories, names: list[str]):
        adamw = AdamW(config)
        made = {name: adamw.create_graph(spec_of(factory)) for name, factory in facts.to_dict().items()}
        self.optimisers = {name: step for name, (_, step) in made.items()}
        optim = NamedVariableFactories.from_dict({name: state for name, (state, _) in made.items()})
        facts = NamedVariableFactories(fwd=facts, optim=optim)
        buffers = named_variable_buffers(facts, entries=len(names), shard_over_dict=False)
        self.load_weights, self.weight_names = load_remote_graph(buffers.fwd)
        self.load_all, self.all_names = load_remote_graph(buffers)
        self.store_all = store_remote_graph(buffers)
        self.variables = [facts.init_remote(buffers, slot, name) for slot, name in enumerate(names)]

    def weights(self, slot: int) -> NamedTensors:
        """Copies on the device."""
        return NamedTensors.pack(self.weight_names, self.load_weights.call(slot))

    def update(self, slot: int, gradients: NamedTensors) -> None:
        """The step of the optimiser for one slot."""
        loaded = NamedTensors.pack(self.all_names, self.load_all.call(slot))
        for name, v in loaded.fwd.to_dict().items():
            self.optimisers[name].bind(loaded.optim[name]).call(v, gradients[name])
        self.store_all.bind(loaded).call(slot)


def phased(config: Config) -> Training:
    """Weights are in remote memory and come for one layer at a time, through which all micro-batches go.

    What goes into a layer is in remote memory, too, and so is its gradient.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = steps = config.micro_batches
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = streams(config, config.batch // config.micro_batches)
        _, seed = seed_variable(config.seed)
        rows = rows_of(inputs, config)
        table = VariableFactory(partial(first_table, config), popxl.float32, "table")

        # Row i of these holds what goes into layer i, and its gradient. The head comes after the last layer.
        values = batch_serial_buffer(rows, steps, config.layers + 1)
        slopes = batch_serial_buffer(rows, steps, config.layers + 1)

        embedding = Part(Embedding(config), inputs.tokens.spec, spec_of(table), seed, gradients=0)
        (tokens, _, embedding_seed), (x, *_) = embedding.graph.graph.inputs, embedding.graph.graph.outputs
        embed, embed_back = batch_serialise_fwd_and_grad(
            embedding.graph,
            embedding.grad,
            embedding.graph.args,
            steps,
            load_handles={tokens: inputs.tokens, embedding.grad.graph.inputs[0]: (slopes, 0)},
            store_streams={},
            store_buffers={x: (values, 0)},
            seed_input=embedding_seed,
            io_mode="compute",
        )

        block = Part(Block(config), rows, seed, gradients=1, recompute=True)
        (x, block_seed, *_), (y, *_) = block.graph.graph.inputs, block.graph.graph.outputs
        (dy, *_), (dx,) = block.grad.graph.inputs, block.grad.graph.outputs
        forward, backward = batch_serialise_fwd_and_grad(
            block.graph,
            block.grad,
            block.graph.args,
            steps,
            load_handles={x: (values, 0), dy: (slopes, 1)},
            store_streams={},
            store_buffers={y: (values, 1), dx: (slopes, 0)},
            seed_input=block_seed,
            rows=config.layers,
            io_mode="compute",
        )

        head_facts, head = HeadStep().create_graph(rows, inputs.labels.spec, spec_of(table))
        x, labels, head_table = head.graph.inputs[:3]
        dx, loss = head.graph.outputs
        head.args.insert("fwd.table", head_table, overwrite=True)
        head = batch_serialise(
            head,
            steps,
            load_handles={x: (values, config.layers), labels: inputs.labels},
            store_streams={loss: outputs.loss},
            store_buffers={dx: (slopes, config.layers)},
            io_mode="compute",
        )

        layers = Stored(config, block.facts, [f"layers.{i}" for i in range(config.layers)])
        ends = Stored(config, NamedVariableFactories(table=table, norm=head_facts.fwd.norm), ["ends"])

        # A step.
        first_seed, *seeds = ops.split_random_seed(seed, 1 + config.layers)
        seed += 1
        embed.graph.bind(ends.weights(0)).call(0, first_seed)
        for i in range(config.layers):
            forward.graph.bind(layers.weights(i)).call(i, seeds[i])

        head_means = head_facts.bwd.init_zero()
        head.graph.bind(NamedTensors(fwd=ends.weights(0), bwd=head_means)).call(0)

        for i in reversed(range(config.layers)):
            means = block.grad_facts.init_zero()
            backward.graph.bind(joined(layers.weights(i), means)).call(i)
            layers.update(i, means.accum)

        means = embedding.grad_facts.init_zero()
        embed_back.graph.bind(joined(ends.weights(0), means)).call(0)
        ends.update(0, NamedTensors(table=means.accum.table + head_means.accum.table, norm=head_means.accum.norm))

    def named(kind: str) -> NamedTensors:
        return whole_model(ends.variables[0][kind], [variables[kind] for variables in layers.variables])

    return Training(config, ir, inputs, outputs, named("fwd"), named("optim"), seed)


def spec_of(factory: VariableFactory) -> popxl.TensorSpec:
    return popxl.TensorSpec(factory.shape, factory.dtype)


def joined(*trees: NamedTensors) -> NamedTensors:
    """One tree of several."""
    return NamedTensors.from_dict({name: t for tree in trees for name, t in tree.to_dict().items()})


VARIANTS: Mapping[str, Callable[[Config], Training]] = {
    "plain": plain,
    "outlined": outlined,
    "recomputed": recomputed,
    "accumulated": accumulated,
    "tensor parallel": tensor_parallel,
    "phased": phased,
    "pipelined": pipelined,
}
"""By name; the first is what the others are compared with."""
