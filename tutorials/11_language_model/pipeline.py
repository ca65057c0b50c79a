"""The training of gpt.py as a pipeline: two halves of the model on two devices, which
work on different texts."""

import numpy as np

import popxl
import popxl_addons as addons
from gpt import GPT, VOCABULARY, Config, optimizer_of
from popxl import ops


class Bottom(GPT):
    """From the characters to the middle. What a `build` does not use has no
    variables."""

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions(
            ops.arange(tokens.shape[1] - 1)
        )
        for block in list(self.blocks)[: self.config.layers // 2]:
            x = block(x)
        return x


class Top(GPT):
    """From the middle to the loss."""

    def build(self, x: popxl.Tensor, tokens: popxl.Tensor) -> popxl.Tensor:
        for block in list(self.blocks)[self.config.layers // 2 :]:
            x = block(x)
        return addons.cross_entropy(
            self.head(self.norm(x)).reshape((-1, VOCABULARY)), tokens[:, 1:].flatten()
        )


def pipelined(config: Config, micro_batches: int = 8) -> addons.TaskSession:
    """`gpt.training` as a pipeline, with the same names: a checkpoint of one goes on in
    the other."""
    np.random.seed(0)
    ir = popxl.Ir()
    ir.num_host_transfers = micro_batches
    with ir.main_graph, popxl.in_sequence():
        spec = popxl.TensorSpec(
            (config.batch // micro_batches, config.length + 1), popxl.int32
        )
        inputs, labels = (
            popxl.h2d_stream(spec.shape, spec.dtype, name)
            for name in ("inputs", "labels")
        )
        losses = popxl.d2h_stream((), popxl.float32, "losses")
        with popxl.ipu(0):
            facts0, bottom = Bottom(config).create_graph(spec)
            mean_facts0, bottom_grad = addons.autodiff_with_accumulation(
                bottom, bottom.args.tensors
            )
            low, low_means = facts0.init("gpt"), mean_facts0.init()
        with popxl.ipu(1):
            facts1, top = Top(config).create_graph(bottom.graph.outputs[0].spec, spec)
            mean_facts1, top_grad = addons.autodiff_with_accumulation(
                top, top.args.tensors, top.graph.outputs, top.graph.inputs[:1]
            )
            high, high_means = facts1.init("gpt"), mean_facts1.init()

        with addons.pipelined_execution(micro_batches) as pipeline:
            with pipeline.stage(0), popxl.ipu(0):
                first = bottom.bind(low).call_with_info(ops.host_load(inputs))
                x = first.outputs[0].copy_to_ipu(1)
            with pipeline.stage(1), popxl.ipu(1):
                second = top.bind(high).call_with_info(x, ops.host_load(labels))
                ops.host_store(losses, second.outputs[0])
                kept = top_grad.grad_graph_info.inputs_dict(second)
                (dx,) = top_grad.bind(high_means).call(popxl.constant(1.0), args=kept)
                dx = dx.copy_to_ipu(0)
            with pipeline.stage(2), popxl.ipu(0):
                kept = pipeline.stash_and_restore_activations(
                    first, bottom_grad.grad_graph_info
                )
                bottom_grad.bind(low_means).call(dx, args=kept)

        variables = addons.NamedTensors.from_dict({**low.to_dict(), **high.to_dict()})
        means = addons.NamedTensors.from_dict(
            {**low_means.accum.to_dict(), **high_means.accum.to_dict()}
        )
        state = optimizer_of(config)(
            addons.NamedTensors(gpt=variables), addons.NamedTensors(gpt=means)
        )
        for ipu, each in enumerate((low_means, high_means)):
            with popxl.ipu(ipu):
                ops.var_updates.accumulator_zero_(each.mean_accum_counter)
    state = addons.NamedTensors(model=variables, optimizer=state)
    return addons.TaskSession(
        [inputs, labels], [losses], state, ir=ir, device_desc="ipu_hw"
    )


def train(
    session: addons.TaskSession, config: Config, batches: list[np.ndarray]
) -> list[float]:
    """The loss of each step."""
    found = []
    for batch in batches:
        fed = batch.reshape(session.host_shape(session.inputs[0].shape))
        found.append(
            float(
                session.run(dict.fromkeys(session.inputs, fed))[
                    session.outputs[0]
                ].mean()
            )
        )
    return found
