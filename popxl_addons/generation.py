"""Text from a language model: a program that reads prompts, and one that goes on, many tokens a run.

Both have one cache, which is changed in place, and the weights of whoever has them: of a session that trains, say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import numpy as np

import popxl
from popxl import ops
from popxl_addons.layers import LanguageModel, undrawn_weights
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.sampling import sample_token
from popxl_addons.variable_factory import NamedVariableFactories

__all__ = ["Generator"]


class _Step(Module):
    """Each text read one token further: the one that was drawn last. What is drawn next is noted."""

    def __init__(self, model: LanguageModel, batch: int, room: int, tokens: int, end: int | None, **how: Any) -> None:
        super().__init__()
        self.model = model
        self.batch, self.room, self.tokens, self.end, self.how = batch, room, tokens, end, how

    def build(self, turn: popxl.Tensor, seed: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        def state(name: str, *shape: int) -> popxl.Tensor:
            return self.add_variable_input(name, partial(np.zeros, shape, np.int32), popxl.int32, by_ref=True)

        read, last = state("read", self.batch), state("last", self.batch)
        written = state("written", self.tokens, self.batch)
        logits = self.model(last.reshape((self.batch, 1)), read, self.room)
        seed, now = ops.split_random_seed(seed)
        draws = ops.random_uniform(now, (self.batch,))
        token = sample_token(logits.reshape((self.batch, logits.shape[-1])), draws, **self.how)
        if self.end is not None:
            token = ops.where(ops.equal(last, self.end), last, token)
        ops.dynamic_update_(written, turn, token.reshape((1, self.batch)), axes=[0], sizes=[1], no_overlap=True)
        ops.var_updates.copy_var_update_(last, token)
        ops.add_(read, 1)
        return turn + 1, seed


class Generator:
    """Text from a language model, for several prompts of different lengths at once.

    Two programs are compiled. One reads the prompts: keys and values of every place go into a cache. The other goes on
    from there, and draws `tokens` of them in each run. Weights and cache are on the device once.

    Args:
        model: the model.
        batch: how many texts there may be at once.
        prompt: how long a prompt may be.
        room: how long a text may get, with its prompt; by default the model's `context`.
        tokens: how many are drawn in a run.
        temperature, top_k, top_p: how they are drawn, as of `popxl_addons.ops.sample_token`.
        end: the token that ends a text, if one does.
        weights: a session, and the variables of the model in its program, by their names in the model: they are used
            where they are, and each run finds them as the session has left them. By default the generator has its own,
            which are zeros until weights are loaded.
        device_desc: where it runs, as of `popxl.Session`.

    Attributes:
        variables: those of the model: its own, or the ones that were given.
        writing, reading: the sessions of the two programs.

    Raises:
        ValueError: if `prompt` exceeds `room`, or `room` the model's context; for variables that are missing, and as
            `Session.use_variables_of` and `sample_token` do.

    Example:
        >>> from popxl_addons.layers import LanguageConfig, LanguageModel
        >>> model = LanguageModel(LanguageConfig(vocabulary=50, width=8, layers=1, heads=2, context=16))
        >>> with addons.Generator(model, batch=2, prompt=4, tokens=3, temperature=0) as generate:
        ...     texts = generate([[7, 1, 2], [30]], 5)
        >>> [len(text) for text in texts]
        [5, 5]
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        prompt: int,
        room: int | None = None,
        tokens: int = 16,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        end: int | None = None,
        weights: tuple[popxl.Session, NamedTensors] | None = None,
        device_desc: Any = "cpu",
    ) -> None:
        self.batch, self.prompt, self.tokens, self.end = batch, prompt, tokens, end
        self.vocabulary = model.config.vocabulary
        self.room = model.config.context if room is None else room
        if not 0 < prompt <= self.room or min(batch, tokens) < 1:
            raise ValueError(
                f"Generator: `batch`, `prompt` and `tokens` are {batch}, {prompt}, {tokens}; expected 1 or more, and "
                f"prompts that fit into the room of {self.room} places."
            )
        self._entered: list[ExitStack] = []
        step = _Step(model, batch, self.room, tokens, end, temperature=temperature, top_k=top_k, top_p=top_p)
        writing, reading = popxl.Ir(), popxl.Ir()
        with writing.main_graph, popxl.in_sequence(), undrawn_weights():
            self._seed = popxl.h2d_stream((2,), popxl.uint32, "seed")
            seed, turn = ops.host_load(self._seed), popxl.constant(0, popxl.uint32)
            facts, graph = step.create_graph(turn, seed)
            state, cache = _made(facts, is_known=weights is not None)
            ops.repeat(graph.graph, tokens, turn, seed, inputs_dict=_pairs(graph.args, _merged(state, cache)))
            self._written = popxl.d2h_stream((tokens, batch), popxl.int32, "written")
            ops.host_store(self._written, cache.written)
        with reading.main_graph, popxl.in_sequence(), undrawn_weights():
            self._prompts = popxl.h2d_stream((batch, prompt), popxl.int32, "prompts")
            text = ops.host_load(self._prompts)
            facts, graph = model.create_graph(text, room=self.room, logits=False)
            known, filled = _made(facts, is_known=True)
            graph.bind(_merged(known, filled)).call(text)
            self._starts = {}
            for name in ("read", "last"):
                filled.insert(name, popxl.variable(np.zeros(batch), popxl.int32, name))
                self._starts[name] = popxl.h2d_stream((batch,), popxl.int32, name)
                ops.var_updates.copy_var_update_(filled[name], ops.host_load(self._starts[name]))
        if weights is not None:
            theirs = weights[1].to_dict()
            if missing := [name for name in state.model.keys_flat() if name not in theirs]:
                raise ValueError(f"Generator: `weights` lacks variables of the model: {missing}.")
        self.writing, self.reading = popxl.Session(writing, device_desc), popxl.Session(reading, device_desc)
        owner = self.writing if weights is None else weights[0]
        self.variables: NamedTensors = state.model if weights is None else weights[1]
        if weights is not None:
            _share(self.writing, owner, _pairs(state.model, self.variables))
        _share(self.reading, owner, _pairs(known, self.variables))
        _share(self.reading, self.writing, _pairs(filled, cache.model) | _pairs(filled, cache))

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            entered.enter_context(self.writing)  # first: it has what the other uses
            entered.enter_context(self.reading)
            self._entered.append(entered.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def __call__(self, prompts: Sequence[Sequence[int]], count: int, seed: int = 0) -> list[list[int]]:
        """What follows each prompt: `count` tokens, or as many as there are up to the `end`, and that.

        Args:
            prompts: as many as `batch`, or fewer; each has at least one token, and at most `prompt`.
            count: how many tokens.
            seed: the same one draws the same tokens.

        Raises:
            TypeError: for tokens that are no integers.
            ValueError: for too many prompts, one that is too long or empty or has tokens that the model does not know,
                or texts that would outgrow their room.
        """
        texts: list[list[int]] = [[] for _ in prompts]
        for more in self.pieces(prompts, count, seed):
            for text, tokens in zip(texts, more, strict=True):
                text += tokens
        return texts

    def pieces(self, prompts: Sequence[Sequence[int]], count: int, seed: int = 0) -> Iterator[list[list[int]]]:
        """The same as it comes: for each run, what it adds to each text. A text that has ended gets nothing more."""
        self._check(prompts, count)
        return self._pieces(prompts, count, seed)

    def _pieces(self, prompts: Sequence[Sequence[int]], count: int, seed: int) -> Iterator[list[list[int]]]:
        rows = np.zeros((self.batch, self.prompt), np.int32)
        lengths = np.ones(self.batch, np.int32)
        for row, (i, prompt) in zip(rows, enumerate(prompts), strict=False):
            row[: len(prompt)], lengths[i] = prompt, len(prompt)
        last = rows[np.arange(self.batch), lengths - 1]  # the other program reads it, and says what comes next
        self.reading.run({self._prompts: rows, self._starts["read"]: lengths - 1, self._starts["last"]: last})
        ended = [False] * len(prompts)
        for run, first in enumerate(range(0, count, self.tokens)):
            if all(ended):
                return
            written = self.writing.run({self._seed: popxl.create_seeds(seed, run)})[self._written]
            columns = np.asarray(written)[: count - first].T.tolist()
            piece = []
            for i, column in zip(range(len(prompts)), columns, strict=False):
                size = column.index(self.end) + 1 if self.end in column else len(column)
                piece.append([] if ended[i] else column[:size])
                ended[i] = ended[i] or self.end in column
            yield piece

    def _check(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        if not 0 < len(prompts) <= self.batch:
            raise ValueError(f"Generator: there are {len(prompts)} prompts; expected 1 to {self.batch}, the `batch`.")
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) < 1 or max(lengths) > self.prompt:
            raise ValueError(f"Generator: the prompts have {lengths} tokens; expected 1 to {self.prompt} of each.")
        if odd := [token for prompt in prompts for token in prompt if not isinstance(token, int | np.integer)]:
            raise TypeError(f"Generator: the prompts have {odd[:3]}; expected numbers of tokens, which are integers.")
        if unknown := sorted({token for prompt in prompts for token in prompt if not 0 <= token < self.vocabulary}):
            raise ValueError(f"Generator: the prompts have tokens that the model does not know: {unknown}.")
        if count < 0:
            raise ValueError(f"Generator: `count` is {count}; expected a number of tokens.")
        if max(lengths) + count > self.room:
            raise ValueError(
                f"Generator: with {count} more tokens, a text would have {max(lengths) + count} places, and there is "
                f"`room` for {self.room}."
            )


def _made(facts: NamedVariableFactories, is_known: bool) -> tuple[NamedTensors, NamedTensors]:
    """The variables of a graph: weights, whose values may be known elsewhere; and what the graph changes."""
    weights, changed = ({n: f for n, f in facts.to_dict().items() if f.by_ref == by_ref} for by_ref in (False, True))
    made = NamedVariableFactories.from_dict(weights).init(empty=is_known)
    return made, NamedVariableFactories.from_dict(changed).init()


def _share(session: popxl.Session, owner: popxl.Session, variables: dict[Any, Any]) -> None:
    """Have variables in common, on the device and on the host: there, too, a large model is to be once."""
    session.use_variables_of(owner, variables)
    for mine, theirs in variables.items():
        mine.data = theirs.data


def _merged(one: NamedTensors, other: NamedTensors) -> NamedTensors:
    return NamedTensors.from_dict({**one.to_dict(), **other.to_dict()})


def _pairs(mine: NamedTensors, theirs: NamedTensors) -> dict[Any, Any]:
    there = theirs.to_dict()
    return {t: there[name] for name, t in mine.to_dict().items() if name in there}
