"""The examples in docstrings run, and print what they show.

An example stands in the main graph of a small program that is new for each docstring, and its ops are in sequence; one
that makes an Ir of its own stands in no graph. It uses what its module has, and the names of the program: they mean the
same in all docstrings, and are said here alone.
"""

import ast
import contextlib
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popart
import popdist
import popxl
import runtime
from popxl import ops
from popxl.base import log

PACKAGES = {"jax": jax, "jnp": jnp, "np": np, "ops": ops, "popart": popart, "popxl": popxl, "runtime": runtime}

VARIABLES = {  # variables of the main graph, by what they have in common
    "x y a b c h dx": ((2, 4), popxl.float32),  # 2 examples of 4 features
    "weight bias running_mean running_var": ((4,), popxl.float32),  # one number for each feature
    "w": ((4, 3), popxl.float32),  # a matrix from 4 features to 3
    "gradient first_moment second_moment mean gradient_sum sum_of_squares": (
        (4, 3),
        popxl.float32,
    ),  # what belongs to w
    "dy": ((2, 3), popxl.float32),  # the gradient of x @ w
    "qkv": ((2, 12), popxl.float32),
    "logits probs": ((2, 10), popxl.float32),  # of 10 classes
    "table table_gradient": ((10, 4), popxl.float32),  # 10 rows
    "ids owner lengths": ((5,), popxl.int32),  # which 5 of them; which of the 3 `owners` has which; how long they are
    "rows": ((5, 4), popxl.float32),
    "i": ((1,), popxl.uint32),
    "row": ((1, 4), popxl.float32),
    "tables": ((2, 10, 4), popxl.float32),
    "ids_of_tables": ((2, 5), popxl.int32),
    "rows_of_tables": ((2, 5, 4), popxl.float32),
    "indices": ((2, 3), popxl.int32),
    "values": ((2, 3), popxl.float32),
    "images": ((2, 4, 8, 8), popxl.float32),  # 4 channels
    "filters": ((5, 4, 3, 3), popxl.float32),
    "features": ((2, 5, 8, 8), popxl.float32),  # what the filters make of the images
    "signal": ((2, 3, 16), popxl.float32),
    "signal_filters": ((5, 3, 3), popxl.float32),
    "boxes": ((3, 4), popxl.float32),
    "image_of_box": ((3,), popxl.int32),
    "mask either": ((2, 4), popxl.bool),
    "flag": ((), popxl.bool),
    "z": ((2, 4), popxl.complex64),
    "pairs": ((2, 4, 2), popxl.float32),  # the real and the imaginary part of each
    "seed": ((2,), popxl.uint32),
    "step": ((), popxl.int32),  # its number
    "layer": ((), popxl.uint32),
    "count": ((), popxl.float32),
}


def program() -> dict[str, Any]:
    """The names that examples may use, from a new program, whose main graph is `main`."""
    ir = popxl.Ir()
    with ir.main_graph as main:
        image_stream = popxl.h2d_stream((2, 4), popxl.float32, "images")
        label_stream = popxl.h2d_stream((2,), popxl.int32, "labels")
        loss_stream = popxl.d2h_stream((), popxl.float32, "loss")
        labels = ops.host_load(label_stream, "labels")
        loss = ops.nll_loss(ops.softmax(ops.host_load(image_stream), axis=-1), labels)
        ops.host_store(loss_stream, loss)
        names = {
            name: popxl.variable(np.zeros(shape), dtype, "pictures" if name == "images" else name)  # a stream's name
            for several, (shape, dtype) in VARIABLES.items()
            for name in several.split()
        }
        x, w = names["x"], names["w"]
        for name in ("x", "w", "images", "filters", "features"):  # x8, w8 ...: the same in float8
            names[f"{name}8"] = ops.pow2scale_cast_to_fp8(names[name], popxl.constant(0), popxl.float8_143)
        fed = np.zeros((2, 4), np.float32), np.zeros(2, np.int32)
        return names | {
            "ir": ir,
            "main": main,
            "graph": ir.create_graph(lambda x, w: x @ w, x, w),
            "image_stream": image_stream,
            "label_stream": label_stream,
            "loss_stream": loss_stream,
            "labels": labels,
            "loss": loss,
            "batches": [fed, fed],
            "inputs": dict(zip((image_stream, label_stream), fed, strict=True)),  # for one run
            "buffer": popxl.remote_buffer(w.shape, w.dtype, entries=3),  # one entry for each layer
            "learning_rate": 0.1,
            "micro_batches": 4,
            "owners": 3,
        }


def modules() -> Iterator[ModuleType]:
    """Of the packages that have no tests of their own for their examples."""
    yield from (popart, popdist, popxl, runtime)
    for package in (popxl, runtime):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                yield importlib.import_module(module.name)


def docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The docstrings of a module, of what says that it is from there, and of the members of its classes, by name."""
    yield module.__name__, module.__doc__ or ""
    holders: list[Any] = [module]
    for holder in holders:
        for value in list(vars(holder).values()):
            value = getattr(value, "fget", None) or getattr(value, "__func__", value)  # of properties, of class methods
            name = getattr(value, "__qualname__", "")
            if inspect.isclass(holder):  # what is in a class is from there, whichever module the class says it is of
                known = name.startswith(f"{holder.__qualname__}.")
            else:
                known = getattr(value, "__module__", None) == module.__name__
            if known and name:
                yield f"{module.__name__}.{value.__qualname__}", value.__doc__ or ""
                if inspect.isclass(value) and value not in holders:
                    holders.append(value)


EXAMPLES = {name: (module, text) for module in modules() for name, text in docstrings(module) if ">>>" in text}


class Checker(doctest.OutputChecker):
    """What is shown has to be printed; where nothing is shown, anything may be."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def compiles_elsewhere(text: str) -> bool:
    """Whether an example compiles for a machine that is not here."""
    return re.search(r"Target\(|\"(tpu|gpu) ", text) is not None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.targets] * compiles_elsewhere(text))
        for name, (_, text) in EXAMPLES.items()
    ],
)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, text = EXAMPLES[name]
    if "popxl.export(" in text:
        pytest.importorskip("flatbuffers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "_chosen", {})  # `setLevel` holds until the process ends
    names = PACKAGES | vars(module) | program()
    test = doctest.DocTestParser().get_doctest(text, names, name, inspect.getsourcefile(module), 0)
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        if "popxl.Ir(" not in text:
            stack.enter_context(names["main"])
            stack.enter_context(popxl.in_sequence())
        result = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)


def test_no_example_is_forgotten() -> None:
    run = {inspect.cleandoc(text) for _, text in EXAMPLES.values()}  # Python 3.13 does so when it compiles
    for module in modules():
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)) if ">>>" in source else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                assert ">>>" not in text or text in run, module.__name__
