"""What PyTorch models cost on TPUs and GPUs by `poptorch`, beside the same by `torch.export` and torchax.

    python -m tests.targets.exported [--only "BERT|LeNet"] [--targets "tpu v5e" "gpu h100"]

The models are those of `tests.benchmarks.first_call`, in inference. torchax is to be installed, and for some of them
torchvision and transformers. Nothing is run.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverloadPacket, _OpNamespace

import poptorch
from tests.benchmarks.first_call import MODELS, Model
from tests.targets.compared import TARGETS, Case, Costs, header, line, of_jax, of_ours

HEAD = """\
## PyTorch models

Written by `python -m tests.targets.exported`, with torchax 0.0.13, likewise: inference of models of
`tests.benchmarks.first_call`, by `poptorch`, and by `torch.export` and torchax, at JAX's "highest" precision.

Most of them are tiny, and move a kilobyte or two for each kernel. On a v5e the loss of the MLP makes XLA pad the table
of its label lookup, to 8 kB. The encoder on H100 slices its heads from one transposed array, of which XLA counts all at
each of three slices. The LSTM is a loop here; torchax unrolls its steps, which takes longer to compile. torchax does
not support GPT-2 ("Cannot view a tensor with shape torch.Size([2, 32, 64])"). On an H100 BERT-base moves 1.02 × the
bytes, on a v5e 0.73 ×.
"""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within the block, PyTorch has whatever op of its own is asked for.

    torchax 0.0.13 has tables of ops by name; PyTorch 2.13 has dropped some of them, which no model here calls.
    """

    def stands_in(owner: type) -> Any:
        plain = owner.__getattr__  # type: ignore[attr-defined]

        def found(self: Any, name: str) -> Any:
            try:
                return plain(self, name)
            except AttributeError:
                if name.startswith("__") or (owner is _OpNamespace and self.name != "aten"):
                    raise
                return MagicMock(name=name)

        return patch.object(owner, "__getattr__", found)

    with ExitStack() as stack:
        for owner in (OpOverloadPacket, _OpNamespace):
            stack.enter_context(stands_in(owner))
        yield


def made(model: Model) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model, with the same weights whenever it is made, and its inputs."""
    torch.manual_seed(0)
    module, inputs = model.make()
    if hasattr(module, "config"):  # of transformers: caches are no tensors, which torchax wants
        module.config.use_cache = False
    return module.eval(), inputs


def case(model: Model) -> Case:
    """A model by `poptorch`, and as a function of JAX."""

    def session() -> Any:
        module, inputs = made(model)
        compiled = poptorch.inferenceModel(module)
        compiled.compile(*inputs)
        return compiled._executable.session

    module, inputs = made(model)
    with torch.no_grad():
        exported = torch.export.export(module, inputs)
        with stand_ins():
            from torchax.export import exported_program_to_jax

            weights, function = exported_program_to_jax(exported)
    arrays = tuple(jnp.asarray(t.numpy()) for t in inputs)
    return Case(session, function, lambda: (weights, arrays), donated=())


def rows(model: Model, target: str) -> Iterator[tuple[str, Costs]]:
    """Ours, and torchax's at the precision that float32 has here."""
    both = case(model)
    yield "poptorch", of_ours(both, target)
    with jax.default_matmul_precision("highest"):
        yield "torchax", of_jax(both, target)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.targets.exported", description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="models in whose names this pattern is found")
    parser.add_argument("--targets", nargs="+", default=[*TARGETS])
    options = parser.parse_args()
    if importlib.util.find_spec("torchax") is None:
        parser.error("torchax is not installed; expected `pip install torchax`, which takes it from PyPI.")
    print(HEAD, *header(), sep="\n")
    for target in options.targets:
        for model in MODELS:
            if re.search(options.only, model.name) and importlib.util.find_spec(model.package) is not None:
                for party, costs in rows(model, target):
                    print(line(model.name, target, party, costs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
