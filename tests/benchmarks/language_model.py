"""The GPT of tutorial 11 beside the same in Flax NNX and Optax: lines, bytes, seconds to compile, seconds of a step.

    python tests/benchmarks/language_model.py [--rounds 5] [--layers 4] [--untimed]

Rounds are interleaved: each party compiles, and makes some steps, in turn. Lines are those with code. Bytes are what
the compiled step needs on the device: variables, what is fed and fetched, and temporaries, as XLA counts them. Flax is
not a dependency: without it, only ours is measured.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import time
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from popxl.utils import table_to_string
from runtime.plan import structure
from tests.benchmarks.harness import OURS, megabytes, progress, seconds

TUTORIAL = Path(__file__).resolve().parents[2] / "tutorials" / "11_language_model"
sys.path.insert(0, str(TUTORIAL))

FILES = {OURS: TUTORIAL / "gpt.py", "Flax": TUTORIAL / "gpt_in_flax.py"}
STEPS = 5
HEADER = ["", "lines", "bytes of a step", "of these state", "compile", "a step"]


def lines_of(path: Path) -> int:
    """How many lines of a program hold code, however long ones are wrapped: neither comments, nor docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return lines - sum(
        isinstance(node, documented) and ast.get_docstring(node) is not None for node in ast.walk(ast.parse(text))
    )


@dataclass(frozen=True)
class Party:
    """A training program.

    Attributes:
        compile: compiles its step anew, and gives what makes steps.
        needed: bytes that a step needs on the device, and how many of these are the model's and the optimiser's state.
        loss: of the first batch, with the weights that both start with.
    """

    compile: Callable[[], Callable[[], float]]
    needed: tuple[int, int]
    loss: float


def config_of(**sizes: int) -> Any:
    """The sizes of the tutorial's, but for some."""
    import gpt

    return replace(gpt.Config(), **sizes)


def ours(config: Any) -> tuple[Party, dict[str, np.ndarray]]:
    """And the weights that it starts with, by name."""
    import gpt

    session = gpt.training(gpt.Config(**vars(config)))
    names = session.state.model.to_dict()
    weights = {name: np.array(v.data) for name, v in names.items()}
    memory = session.memory()
    needed = memory.variables + memory.arguments + memory.outputs + memory.temporaries

    def compile() -> Callable[[], float]:
        structure.clear_cache()  # or what was compiled before would be found
        made = gpt.training(gpt.Config(**vars(config)))
        made.__enter__()
        return lambda: gpt.train(made, config, made.session_state.get("steps", 0) + 1)[0]

    with session:
        (loss,) = gpt.train(session, config, 1)
    return Party(compile, (needed, memory.variables), loss), weights


def in_flax(config: Any, weights: Mapping[str, np.ndarray]) -> Party:
    """It starts with these weights."""
    from flax import nnx

    import gpt_in_flax as gpt

    def made() -> Any:
        model, optimizer = gpt.training(gpt.Config(**vars(config)))
        state = nnx.to_flat_state(nnx.state(model))
        nnx.update(model, nnx.from_flat_state([(p, v.replace(_as_ours(weights, p, v))) for p, v in state]))
        return model, optimizer

    tokens = gpt.batch(config, 0)

    def compiled(state: Any) -> Any:
        jax.clear_caches()
        return nnx.jit(gpt.step.__wrapped__).lower(*state, tokens).compile()

    def compile() -> Callable[[], float]:
        state = made()
        step = compiled(state)
        return lambda: float(step(*state, tokens))

    state = made()
    program = compiled(state)
    found = program.compiled.memory_analysis()
    needed = (
        found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(state)))
    return Party(compile, (needed, held), float(program(*state, tokens)))


_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "out": "output"}


def _as_ours(weights: Mapping[str, np.ndarray], path: tuple[Any, ...], variable: Any) -> Any:
    """The weight of Flax's at this path: a part of a block is in its MLP, and heads have an axis of their own."""
    parts = [_NAMES.get(str(part), str(part)) for part in path]
    name = ".".join(["mlp." + part if part in ("up", "down") else part for part in parts])
    value = weights[name]
    if name == "positions.weight" or name == "tokens.weight":
        value = value[: variable.shape[0]]  # ours come in multiples of 16 rows
    return value.reshape(variable.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each party takes its turn")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--untimed", action="store_true", help="lines and bytes only")
    options = parser.parse_args()
    config = config_of(layers=options.layers)
    progress(OURS)
    first, weights = ours(config)
    parties = {OURS: first}
    if find_spec("flax") and find_spec("optax"):
        progress("Flax")
        parties["Flax"] = in_flax(config, weights)
        if abs(parties["Flax"].loss - first.loss) > 1e-3:
            raise SystemExit(f"They do not compute the same: {first.loss} and {parties['Flax'].loss}.")
    else:
        print("Flax is not installed (pip install flax optax orbax-checkpoint): only ours is measured.")
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in parties}
    for n in range(0 if options.untimed else options.rounds):
        for name, party in parties.items():
            progress(f"round {n + 1} of {options.rounds}: {name}")
            start = time.perf_counter()
            step = party.compile()
            step()
            times[name][0].append(time.perf_counter() - start)
            for _ in range(STEPS):
                start = time.perf_counter()
                step()
                times[name][1].append(time.perf_counter() - start)
    progress("")
    rows = [HEADER]
    for name, party in parties.items():
        measured = (seconds(float(np.median(found))) if found else "–" for found in times[name])
        rows.append([name, str(lines_of(FILES[name])), *map(megabytes, party.needed), *measured])
    print(table_to_string(rows))


if __name__ == "__main__":
    main()
