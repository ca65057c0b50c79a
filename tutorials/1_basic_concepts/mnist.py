"""Trains a network of four linear layers on handwritten digits, and tests it on others.

    python tutorials/1_basic_concepts/mnist.py

There are two programs, each an Ir with a session of its own: one that trains, one that
only looks forward. After training the weights move from the first to the second by
their names. README.md beside this file tells the story, concepts.py shows the parts one
at a time, and model.py holds the network.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
from model import Net
from popxl import ops

# digits.py is shared by the tutorials
sys.path.append(str(Path(__file__).resolve().parent.parent))
from digits import SIZE, Batches, load


class Program(NamedTuple):
    """A session with the handles that the host needs: what to feed, what to read, and
    the variables by name."""

    session: popxl.Session
    inputs: list[popxl.HostToDeviceStream]
    output: popxl.DeviceToHostStream
    variables: addons.NamedTensors

    def run(self, *arrays: np.ndarray) -> np.ndarray:
        """One run of the program: one array for each input, in order; the result is its
        output."""
        return self.session.run(dict(zip(self.inputs, arrays, strict=True)))[
            self.output
        ]


def training_program(batch_size: int, learning_rate: float, device: str) -> Program:
    """Takes images and labels, improves the variables by one step of gradient descent,
    gives the loss."""
    ir = popxl.Ir()
    with ir.main_graph:
        image_stream = popxl.h2d_stream(
            (batch_size, SIZE, SIZE), popxl.float32, "images"
        )
        label_stream = popxl.h2d_stream((batch_size,), popxl.int32, "labels")
        images = ops.host_load(image_stream, "images")
        labels = ops.host_load(label_stream, "labels")

        # Two graphs: the network, and its gradient with respect to the variables.
        facts, forward = Net().create_graph(images)
        backward = addons.autodiff(forward, grads_required=forward.args.tensors)
        variables = facts.init()

        # The call of the network says which of its values the gradient needs.
        forward_call = forward.bind(variables).call_with_info(images)
        scores = forward_call.outputs[0]
        loss, d_scores = addons.cross_entropy_with_grad(scores, labels)
        activations = backward.grad_graph_info.inputs_dict(forward_call)
        backward_call = backward.call_with_info(d_scores, args=activations)

        # Both calls together say which gradient belongs to which variable.
        gradients = backward.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(
            forward_call, backward_call
        )
        for variable in variables.tensors:
            ops.scaled_add_(variable, gradients[variable], b=-learning_rate)

        loss_stream = addons.host_store(loss)
    return Program(
        popxl.Session(ir, device), [image_stream, label_stream], loss_stream, variables
    )


def test_program(batch_size: int, device: str) -> Program:
    """Takes images, gives ten scores for each."""
    ir = popxl.Ir()
    with ir.main_graph:
        image_stream = popxl.h2d_stream(
            (batch_size, SIZE, SIZE), popxl.float32, "images"
        )
        images = ops.host_load(image_stream, "images")
        facts, network = Net().create_graph(images)
        variables = facts.init()
        (scores,) = network.bind(variables).call(images)
        score_stream = addons.host_store(scores)
    return Program(popxl.Session(ir, device), [image_stream], score_stream, variables)


def train(program: Program, batches: Batches, epochs: int) -> None:
    """Shows every batch to the training program, `epochs` times over."""
    with program.session, tqdm(total=epochs * len(batches)) as bar:
        for epoch in range(1, epochs + 1):
            for images, labels in batches:
                loss = program.run(images, labels)
                bar.set_description(
                    f"Epoch {epoch}/{epochs}, loss {loss:.4f}", refresh=False
                )
                bar.update()


def copy_variables(source: Program, target: Program) -> None:
    """Gives the variables of `target` the values of those in `source` that have the
    same names."""
    values = source.session.get_tensors_data(source.variables.tensors)
    partners = source.variables.to_mapping(target.variables)
    target.session.write_variables_data(
        {theirs: values[ours] for ours, theirs in partners.items()}
    )


def accuracy(program: Program, batches: Batches) -> float:
    """The share of digits, in percent, whose highest score is that of their label."""
    with program.session:
        hits = [
            program.run(images).argmax(axis=-1) == labels
            for images, labels in tqdm(batches, "Testing")
        ]
    return 100 * float(np.mean(hits))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="where the four files of MNIST are (default: small built-in set)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=15,
        help="how often to show the training digits (%(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        help="digits for one step of training (%(default)s)",
    )
    parser.add_argument(
        "--test-batch-size",
        type=int,
        default=40,
        help="digits for one run of testing (%(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=0.05,
        help="length of a training step (%(default)s)",
    )
    parser.add_argument(
        "--device",
        default="ipu_hw",
        help="where to run; ipu_hw is the best there is (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=42,
        help="of the first weights and the order (%(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one epoch with a few batches, to see that it runs",
    )
    return parser.parse_args()


def main() -> None:
    args = options()
    np.random.seed(args.seed)  # the modules draw their first weights from here

    try:
        training_digits, test_digits = load(args.data)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"mnist.py: {error}")
    if args.quick:
        args.epochs = 1
        training_digits = training_digits.head(20 * args.batch_size)
        test_digits = test_digits.head(2 * args.test_batch_size)
    print(
        f"{len(training_digits)} digits to train with, {len(test_digits)} held back to "
        "test with"
    )

    training = training_program(args.batch_size, args.learning_rate, args.device)
    train(
        training, Batches(training_digits, args.batch_size, seed=args.seed), args.epochs
    )

    testing = test_program(args.test_batch_size, args.device)
    copy_variables(training, testing)
    result = accuracy(
        testing, Batches(test_digits, args.test_batch_size, shuffle=False)
    )
    print(f"Accuracy on test set: {result:.2f}%")


if __name__ == "__main__":
    main()
