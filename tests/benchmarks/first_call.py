"""How long the first call of a PyTorch model takes, phase by phase; beside that of `torch.compile`.

    python -m tests.benchmarks.first_call                      # all models, as a table
    python -m tests.benchmarks.first_call --only bert --page docs/performance.md

Seconds of processors are counted, those of compilers that are started among them, so that the figures mean something on
a busy machine; the seconds that passed stand in parentheses. Each figure is of a process of its own, with empty caches,
from when all has been imported until there are results. Then another process does the same with what the first one has
kept. `--page` keeps what was measured beside the page, so a part can be measured anew, and writes the table into it.
Models of `torchvision` and `transformers` are left out where these are not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import poptorch
from popxl.utils import table_to_string
from tests.benchmarks.page import markdown, put
from tests.poptorch import models

ROOT = Path(__file__).resolve().parents[2]
OURS, COMPILED = "poptorch", "torch.compile"
WAYS = ("inference", "training")
BEGIN, END = "<!-- first calls: written by tests/benchmarks/first_call.py -->", "<!-- first calls: end -->"
PHASES = {
    "capture": ("poptorch.run.model_capture.capture",),
    "building": ("poptorch.run.program_compilation.Program",),
    "tracing": ("runtime.program.compiled.lower", "runtime.plan.segments.lower"),
}
"""What is done in the thread that calls, and the functions that do it; all else is XLA, and moving weights."""

Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


# Models ---------------------------------------------------------------------------------------------------------------


class LanguageModel(torch.nn.Module):
    """An LSTM that says which token comes next."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.lstm = torch.nn.LSTM(width, width, layers, batch_first=True)
        self.scores = torch.nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.lstm(self.embedding(x))[0])


def small(make: Callable[[], torch.nn.Module], *shape: int) -> Made:
    """A model of ours, which gives its scores and a loss."""
    return make(), (torch.randn(shape), torch.randint(4, shape[:1]))


def of_torchvision(name: str) -> Made:
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=10), (torch.randn(2, 3, 64, 64),)


def of_transformers(name: str, **sizes: int) -> Made:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}[name]
    return getattr(transformers, kind)(config), (torch.randint(config.vocab_size, (2, 32)),)


@dataclass(frozen=True)
class Model:
    """A model, small or large.

    Attributes:
        name: what the table calls it.
        make: makes it, and what it is called with.
        package: what has to be installed.
    """

    name: str
    make: Callable[[], Made]
    package: str = "torch"


BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100}
MODELS = (
    Model("MLP of 4 layers", partial(small, models.mlp, 4, 7)),
    Model("LeNet", partial(small, models.lenet, 4, 1, 12, 12)),
    Model("encoder of 2 layers", partial(small, models.Encoder, 4, 6, 8)),
    Model("LSTM of 2 layers", lambda: (LanguageModel(100, 64, 2), (torch.randint(100, (4, 64)),))),
    Model("mobilenet_v3_small", partial(of_torchvision, "mobilenet_v3_small"), "torchvision"),
    Model("resnet50", partial(of_torchvision, "resnet50"), "torchvision"),
    Model("swin_v2_t", partial(of_torchvision, "swin_v2_t"), "torchvision"),
    Model("BERT, 2 layers of width 32", partial(of_transformers, "Bert", **BERT), "transformers"),
    Model("GPT-2, 4 layers of width 64", partial(of_transformers, "GPT2", **GPT2), "transformers"),
    Model("BERT-base", partial(of_transformers, "Bert"), "transformers"),
)


class WithLoss(torch.nn.Module):
    """A model whose results are to become small, if it has no loss of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result = self.model(*inputs)
        if isinstance(result, tuple):
            return result[1]
        result = getattr(result, "logits", result)
        return poptorch.identity_loss(result.square().mean(), "none")


# One call -------------------------------------------------------------------------------------------------------------


def processor_seconds() -> float:
    """Those that this process has used, and those that it has started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@contextmanager
def counted(found: dict[str, float]) -> Iterator[None]:
    """Have the phases of a compilation counted: seconds of the thread that they run in."""

    def counting(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                found[phase] += time.thread_time() - begin

        return call

    found |= dict.fromkeys(PHASES, 0.0)
    with ExitStack() as stack:
        for phase, names in PHASES.items():
            for name in names:
                module, _, attribute = name.rpartition(".")
                function = getattr(importlib.import_module(module), attribute)
                stack.enter_context(patch(name, counting(phase, function)))
        yield


def first_call(model: Model, way: str, party: str, folder: str) -> dict[str, float]:
    """What the first call takes, with the caches in a folder."""
    torch.manual_seed(0)
    module, inputs = model.make()
    module = WithLoss(module) if way == "training" else module
    module.train(way == "training")
    call = ours(module, way, folder) if party == OURS else in_torch(module, way)
    found: dict[str, float] = {}
    with counted(found) if party == OURS else ExitStack():
        used, begin = processor_seconds(), time.perf_counter()
        call(*inputs)
        found |= {"cpu": processor_seconds() - used, "wall": time.perf_counter() - begin}
    return found


def ours(module: torch.nn.Module, way: str, folder: str) -> Callable[..., Any]:
    """A wrapped model. A call for training makes a step of the optimiser."""
    options = poptorch.Options().enableExecutableCaching(folder).showCompilationProgressBar(False)
    if way == "inference":
        return poptorch.inferenceModel(module, options)
    return poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), 0.01))


def in_torch(module: torch.nn.Module, way: str) -> Callable[..., Any]:
    """The same by PyTorch, compiled."""
    forward = torch.compile(module)
    if way == "inference":

        def infer(*inputs: torch.Tensor) -> Any:
            with torch.no_grad():
                return forward(*inputs)

        return infer
    optimizer = torch.optim.SGD(module.parameters(), 0.01)

    def step(*inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        forward(*inputs).backward()
        optimizer.step()

    return step


def in_processes(model: Model, way: str, party: str) -> dict[str, Any]:
    """What the first call takes in a process, and in another one after it."""
    with tempfile.TemporaryDirectory() as folder:
        # One process of PyTorch's compiles, as those that it keeps running would not be counted.
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "tests.benchmarks.first_call", "--one", model.name, way, party, folder]
        runs = []
        for _ in range(2):
            done = subprocess.run(command, cwd=ROOT, env=os.environ | caches, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}; what it says stands above.")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {"first": runs[0], "again": runs[1]}


# The table ------------------------------------------------------------------------------------------------------------

HEADER = ["model", "", "capture", "building", "tracing", "XLA and weights", "in all", "second process",
          "`torch.compile`", "second process"]  # fmt: skip


def cells(name: str, way: str, measured: dict[str, Any]) -> list[str]:
    """A line of the table."""

    def shown(run: dict[str, float] | None) -> str:
        return "" if run is None else f"{run['cpu']:.1f} ({run['wall']:.1f})"

    first = measured[OURS]["first"]
    phases = [first[phase] for phase in PHASES]
    theirs = measured.get(COMPILED, {})
    parts = [f"{seconds:.1f}" for seconds in (*phases, first["cpu"] - sum(phases))]
    return [
        name,
        way,
        *parts,
        shown(first),
        shown(measured[OURS]["again"]),
        *map(shown, map(theirs.get, ("first", "again"))),
    ]


def lines(kept: dict[str, Any]) -> list[list[str]]:
    """The lines of the table, of what has been measured."""
    found = ((model.name, way, kept.get(f"{model.name}, {way}")) for model in MODELS for way in WAYS)
    return [cells(name, way, measured) for name, way, measured in found if measured is not None]


def write(page: Path, kept: dict[str, Any]) -> None:
    """Write the table into a page."""
    put(page, BEGIN, END, [markdown([HEADER, *lines(kept)])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="models in whose names this pattern is found")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the table into this page")
    parser.add_argument("--alone", action="store_true", help="leave torch.compile out")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, way, party, folder = arguments.one
        (model,) = (model for model in MODELS if model.name == name)
        print(json.dumps(first_call(model, way, party, folder)))
        return
    file = arguments.page.with_suffix("") / "first-calls.json" if arguments.page else None
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {}
    for model in MODELS:
        if not re.search(arguments.only, model.name) or importlib.util.find_spec(model.package) is None:
            continue
        for way in arguments.ways:
            parties = [OURS] if arguments.alone else [OURS, COMPILED]
            measured = {party: in_processes(model, way, party) for party in parties}
            kept[f"{model.name}, {way}"] = kept.get(f"{model.name}, {way}", {}) | measured
            print(" · ".join(cells(model.name, way, measured)), file=sys.stderr, flush=True)
            if file is not None:
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
                write(arguments.page, kept)
    print(table_to_string([HEADER, *lines(kept)]))


if __name__ == "__main__":
    main()
