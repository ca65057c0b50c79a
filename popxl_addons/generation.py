"""Text generation with a language model: a program that reads prompts, and one that continues them, many tokens a run.

Both share one cache, which is changed in place, and the weights of their owner, for example of a training session.

The state of each text, such as its length, is on the host, and fed to each run. So a request may join while others
continue: a third program reads its prompt into the free rows of the cache, and no program changes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np

import popxl
from popxl import ops
from popxl.extend.arguments import integer, integer_or_integers, integers
from popxl_addons.dot_tree import to_mapping
from popxl_addons.layers import LanguageModel, uninitialized_weights
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.sampling import sample_token, uniform_at
from popxl_addons.variable_factory import NamedVariableFactories

__all__ = ["Generator", "Request"]


class _DecodeStep(Module):
    """One decoding step: every text reads its last token and samples the next, which is written to `written`."""

    def __init__(self, model: LanguageModel, batch: int, max_length: int, tokens: int, **sampling: Any) -> None:
        super().__init__()
        self.model = model
        self.batch, self.max_length, self.tokens, self.sampling = batch, max_length, tokens, sampling

    def build(
        self, turn: popxl.Tensor, read: popxl.Tensor, last: popxl.Tensor, seeds: popxl.Tensor
    ) -> tuple[popxl.Tensor, ...]:
        shape = (self.tokens, self.batch)
        written = self.add_variable_input("written", partial(np.zeros, shape, np.int32), popxl.int32, by_ref=True)
        logits = self.model(last.reshape((self.batch, 1)), read, self.max_length)
        draws = uniform_at(seeds, read)
        token = sample_token(logits.reshape((self.batch, logits.shape[-1])), draws, **self.sampling)
        ops.dynamic_update_(written, turn, token.reshape((1, self.batch)), axes=[0], sizes=[1], no_overlap=True)
        # A text that has ended continues until the run ends, and a free slot always does. Neither may exceed the
        # maximum length: results of a model beyond it are undefined.
        return turn + 1, ops.minimum(read + 1, self.max_length - 1), token


@dataclass(eq=False)
class Request:
    """A text under generation, returned by `Generator.submit`.

    Attributes:
        prompt: tokens that the text starts with.
        count: number of tokens to generate.
        seed: seed of the draws, uint32 of shape (2,).
        tokens: tokens generated so far.
        is_done: whether generation has ended.
    """

    prompt: list[int]
    count: int
    seed: np.ndarray
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        self.is_done = self.count == 0

    def cancel(self) -> None:
        """Stop generation, and free the slot."""
        self.is_done = True

    def _take(self, column: list[int], ends: frozenset[int]) -> list[int]:
        """Take own tokens from a run; nothing after cancellation."""
        if self.is_done:
            return []
        accepted = column[: self.count - len(self.tokens)]
        end = next((i for i, token in enumerate(accepted) if token in ends), None)
        if end is not None:
            accepted = accepted[: end + 1]
        self.tokens += accepted
        if end is not None or len(self.tokens) == self.count:
            self.is_done = True  # and never back to False: it may be cancelled just now
        return accepted


@dataclass(frozen=True)
class _Reader:
    """A prompt-reading (prefill) program, with its input streams."""

    session: popxl.Session
    streams: list[popxl.HostToDeviceStream]

    def run(self, *values: Any) -> None:
        self.session.run(dict(zip(self.streams, values, strict=True)))


class Generator:
    """Text from a language model, for several prompts of different lengths at once.

    Two programs are compiled. One reads the prompts: keys and values of every position go into a cache. The other
    continues from there, and draws `tokens` tokens in each run. Weights and cache are on the device once.

    Requests may also come and go while others are generated: `submit` them, and `step` until none are left. The draws
    of a request depend on its prompt and its seed only, not on other requests. Other threads may `submit` and cancel
    meanwhile; steps of several threads wait for each other.

    Args:
        model: the model.
        batch: number of texts at once, at most.
        prompt: length of a prompt, at most.
        room: length of a text with its prompt, at most; by default the model's `context`.
        tokens: number of tokens drawn in a run.
        temperature, top_k, top_p: sampling parameters, as for `popxl_addons.ops.sample_token`.
        end: token that ends a text, or several such tokens, if there are any.
        weights: a session, and the variables of the model in its program, by their names in the model: they are shared,
            and each run reads their current values in the session. By default the generator has its own, which are
            zeros until weights are loaded.
        device_desc: device, as for `popxl.Session`.

    Attributes:
        variables: variables of the model: new ones, or the given ones.
        writing, reading: the sessions of the two programs.
        joining: session of a third program, which reads one prompt while other texts continue. It is compiled on first
            use or access.

    Raises:
        TypeError: for sizes or an `end` that are not integers, and a `model` or `weights` of an invalid type.
        ValueError: if `prompt` exceeds `room`, or `room` the model's context; for an `end` out of the vocabulary; for
            missing variables, and as for `Session.use_variables_of` and `sample_token`.

    Example:
        >>> from popxl_addons.layers import LanguageConfig, LanguageModel
        >>> model = LanguageModel(LanguageConfig(vocabulary=50, width=8, layers=1, heads=2, context=16))
        >>> with addons.Generator(model, batch=2, prompt=4, tokens=3, temperature=0) as generate:
        ...     texts = generate([[7, 1, 2], [30]], 5)
        >>> [len(text) for text in texts]
        [5, 5]

        >>> with addons.Generator(model, batch=2, prompt=4, tokens=3, temperature=0) as generator:
        ...     requests = [generator.submit(prompt, count) for prompt, count in [([7, 1, 2], 5), ([30], 9), ([4], 2)]]
        ...     while pieces := generator.step():
        ...         print([len(tokens) for tokens in pieces.values()])
        [3, 3]
        [2, 3]
        [2, 3]
        >>> [len(request.tokens) for request in requests], requests[0].tokens == texts[0]
        ([5, 9, 2], True)
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
        end: int | Sequence[int] | None = None,
        weights: tuple[popxl.Session, NamedTensors] | None = None,
        device_desc: Any = "cpu",
    ) -> None:
        if not all(hasattr(getattr(model, "config", None), name) for name in ("vocabulary", "context")):
            raise TypeError(f"Generator: `model` must be a LanguageModel; got {model!r}.")
        self._model, self._device_desc = model, device_desc
        self.vocabulary = model.config.vocabulary
        self._set_sizes(batch, prompt, room, tokens)
        self.ends = self._checked_ends(end)
        if not (weights is None or _is_session_and_variables(weights)):
            raise TypeError(
                f"Generator: `weights` must be a session and the variables of the model in its program, "
                f"`(session, variables)`; got {type(weights).__name__}."
            )
        self._stepping = threading.RLock()
        self._entered: list[ExitStack] = []
        self._waiting: list[Request] = []
        self._slots: list[Request | None] = [None] * self.batch
        self._single_prefill: _Reader | None = None
        step = _DecodeStep(model, self.batch, self.room, self.tokens, temperature=temperature, top_k=top_k, top_p=top_p)
        writing, own_variables = self._decode_program(step, is_known=weights is not None)
        if weights is not None:
            given_names = weights[1].to_dict()
            if missing := [name for name in own_variables.keys_flat() if name not in given_names]:
                raise ValueError(f"Generator: `weights` lacks variables of the model: {missing}.")
        self.writing = popxl.Session(writing, device_desc)
        self._owner = self.writing if weights is None else weights[0]
        self.variables: NamedTensors = own_variables if weights is None else weights[1]
        if weights is not None:
            _share(self.writing, self._owner, to_mapping(own_variables, self.variables))
        self._batch_prefill = self._prefill_program(self.batch)
        self.reading = self._batch_prefill.session

    def _set_sizes(self, batch: int, prompt: int, room: int | None, tokens: int) -> None:
        self.batch, self.prompt, self.tokens = (
            integer(value, f"Generator: `{name}`")
            for name, value in (("batch", batch), ("prompt", prompt), ("tokens", tokens))
        )
        context = self._model.config.context
        self.room = context if room is None else integer(room, "Generator: `room`")
        if self.room > context:
            raise ValueError(f"Generator: `room` is {self.room}; expected at most {context}, the model's `context`.")
        if not 0 < self.prompt <= self.room or min(self.batch, self.tokens) < 1:
            raise ValueError(
                f"Generator: `batch`, `prompt` and `tokens` are {self.batch}, {self.prompt}, {self.tokens}; expected 1 "
                f"or more, and prompts that fit into the room of {self.room} places."
            )

    def _checked_ends(self, end: int | Sequence[int] | None) -> frozenset[int]:
        ends = () if end is None else integer_or_integers(end, "Generator: `end`")
        tokens = frozenset([ends] if isinstance(ends, int) else ends)
        if unknown := sorted(token for token in tokens if not 0 <= token < self.vocabulary):
            raise ValueError(
                f"Generator: `end` has {unknown}; expected tokens of the model, from 0 to {self.vocabulary - 1}."
            )
        return tokens

    def _decode_program(self, step: _DecodeStep, is_known: bool) -> tuple[popxl.Ir, NamedTensors]:
        """Build the decode program, with its model variables."""
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence(), uninitialized_weights():
            self._lengths, self._last = (
                popxl.h2d_stream((self.batch,), popxl.int32, name) for name in ("read", "last")
            )
            self._seeds = popxl.h2d_stream((self.batch, 2), popxl.uint32, "seeds")
            iteration = popxl.constant(0, popxl.uint32)
            operands = [iteration, *(ops.host_load(stream) for stream in (self._lengths, self._last, self._seeds))]
            facts, graph = step.create_graph(*operands)
            state, cache = _create_variables(facts, is_known)
            bound = to_mapping(graph.args, _merged(state, cache))
            ops.repeat(graph.graph, self.tokens, *operands, inputs_dict=bound)
            self._tokens_out = popxl.d2h_stream((self.tokens, self.batch), popxl.int32, "written")
            ops.host_store(self._tokens_out, cache.written)
        self._cache: NamedTensors = cache.model
        return ir, state.model

    def _prefill_program(self, texts: int) -> _Reader:
        """Prefill program, for all texts or for one slot."""
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence(), uninitialized_weights():
            streams = [popxl.h2d_stream((texts, self.prompt), popxl.int32, "prompts")]
            if texts != self.batch:
                streams.append(popxl.h2d_stream((), popxl.int32, "slot"))
            text, *slot = (ops.host_load(stream) for stream in streams)
            slot_arguments = {"slot": slot[0], "slots": self.batch} if slot else {}
            facts, graph = self._model.create_graph(text, room=self.room, logits=False, **slot_arguments)
            weights, cache_variables = _create_variables(facts, is_known=True)
            graph.bind(_merged(weights, cache_variables)).call(text, *slot)
        session = popxl.Session(ir, self._device_desc)
        _share(session, self._owner, to_mapping(weights, self.variables))
        _share(session, self.writing, to_mapping(cache_variables, self._cache))
        return _Reader(session, streams)

    @property
    def joining(self) -> popxl.Session:
        return self._single_text_prefill().session

    def _single_text_prefill(self) -> _Reader:
        if self._single_prefill is None:
            self._single_prefill = self._batch_prefill if self.batch == 1 else self._prefill_program(1)
            if self._entered:
                self._entered[0].enter_context(self._single_prefill.session)
        return self._single_prefill

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            entered.enter_context(self.writing)  # first: it owns the variables that the others use
            entered.enter_context(self.reading)
            if self._single_prefill is not None:
                entered.enter_context(self._single_prefill.session)
            self._entered.append(entered.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        entered = self._entered.pop()
        if not self._entered:
            for request in [*self._waiting, *filter(None, self._slots)]:
                request.cancel()
        entered.__exit__(*exception)

    def __call__(self, prompts: Sequence[Sequence[int]], count: int, seed: int = 0) -> list[list[int]]:
        """Generate continuations: `count` tokens per prompt, or fewer up to and including `end`.

        Args:
            prompts: at most `batch` prompts of 1 to `prompt` tokens each.
            count: number of tokens to generate.
            seed: seed of the draws. The first text is the one that `submit` draws with this seed.

        Raises:
            TypeError: for tokens, a count or a seed that are not integers.
            ValueError: for too many prompts, one that is too long or empty or has tokens out of the vocabulary, or
                texts that would exceed their room; and outside of the generator's ``with`` block.
        """
        requests = self._requests(prompts, count, seed)
        for _ in self._generate_chunks(requests):
            pass
        return [request.tokens for request in requests]

    def pieces(self, prompts: Sequence[Sequence[int]], count: int, seed: int = 0) -> Iterator[list[list[int]]]:
        """Stream generated tokens: new tokens per text after each run; empty after a text's end."""
        return self._generate_chunks(self._requests(prompts, count, seed))

    def submit(self, prompt: Sequence[int], count: int, seed: int = 0) -> Request:
        """Queue a text. Generation starts at a `step`, after one of `batch` slots becomes free.

        Args:
            prompt: at least one token, and at most `prompt`.
            count: number of tokens to generate; fewer if the `end` comes before.
            seed: the same one draws the same tokens for a prompt, whatever else is written.

        Returns:
            The request, which gathers its `tokens`. One that is no longer wanted can be cancelled; leaving the ``with``
            block of the generator cancels all.

        Raises:
            TypeError, ValueError: as for calling the generator.
        """
        (request,) = self._requests([prompt], count, seed)
        self._waiting.append(request)
        return request

    def step(self) -> dict[Request, list[int]]:
        """Admit waiting requests to free slots in order, then decode one run for all texts.

        Returns:
            The tokens that this run has added to each text; empty if there is none left.
        """
        if not self._entered:
            raise ValueError("Generator: it holds no device now. Use it inside `with generator:`.")
        with self._stepping:
            self._admit()
            active = {
                slot: request for slot, request in enumerate(self._slots) if request is not None and not request.is_done
            }
            if not active:
                return {}
            lengths, last_tokens = (np.zeros(self.batch, np.int32) for _ in range(2))
            seeds = np.zeros((self.batch, 2), np.uint32)
            for slot, request in active.items():
                text = request.prompt + request.tokens
                lengths[slot], last_tokens[slot], seeds[slot] = len(text) - 1, text[-1], request.seed
            outputs = self.writing.run({self._lengths: lengths, self._last: last_tokens, self._seeds: seeds})
            columns = np.asarray(outputs[self._tokens_out]).T.tolist()
            return {request: request._take(columns[slot], self.ends) for slot, request in active.items()}

    def _admit(self) -> None:
        """Prefill prompts of waiting requests into free slots, together if all slots are free."""
        for request in [request for request in self._waiting if request.is_done]:
            self._waiting.remove(request)  # in place: another thread may submit meanwhile
        free = [slot for slot, request in enumerate(self._slots) if request is None or request.is_done]
        entering = dict(zip(free, self._waiting, strict=False))
        if not entering:
            return
        rows = np.zeros((self.batch, self.prompt), np.int32)
        for slot, request in entering.items():
            rows[slot, : len(request.prompt)] = request.prompt
        if len(free) == self.batch:
            self._batch_prefill.run(rows)
            self._enter(entering)
            return
        for slot, request in entering.items():
            self._single_text_prefill().run(rows[slot : slot + 1], slot)
            self._enter({slot: request})

    def _enter(self, entering: dict[int, Request]) -> None:
        for slot, request in entering.items():
            self._slots[slot] = request
            self._waiting.remove(request)

    def _generate_chunks(self, requests: list[Request]) -> Iterator[list[list[int]]]:
        self._waiting += requests
        counts = [0] * len(requests)
        try:
            # Steps of another thread may have continued these too.
            while any(not r.is_done or len(r.tokens) > n for r, n in zip(requests, counts, strict=True)):
                self.step()
                chunks = [r.tokens[n:] for r, n in zip(requests, counts, strict=True)]
                counts = [len(r.tokens) for r in requests]
                yield chunks
        finally:
            for request in requests:
                request.cancel()  # the caller no longer reads

    def _requests(self, prompts: Iterable[Iterable[int]], count: int, seed: int) -> list[Request]:
        """Requests for some prompts, which are checked first."""
        prompts = _texts(prompts)
        count = integer(count, "Generator: `count`")
        self._check(prompts, count)
        seeds = popxl.create_seeds(seed, replicas=len(prompts)).reshape(-1, 2)
        return [Request(prompt, count, text_seed) for prompt, text_seed in zip(prompts, seeds, strict=True)]

    def _check(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        if not 0 < len(prompts) <= self.batch:
            raise ValueError(
                f"Generator: there are {len(prompts)} prompts; expected 1 to {self.batch}, the `batch`. `submit` takes "
                "more, one by one."
            )
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) < 1 or max(lengths) > self.prompt:
            raise ValueError(
                f"Generator: the prompts have {lengths} tokens; expected 1 to {self.prompt} of each, its `prompt`."
            )
        if unknown := sorted({token for prompt in prompts for token in prompt if not 0 <= token < self.vocabulary}):
            raise ValueError(f"Generator: the prompts have tokens that the model does not know: {unknown}.")
        if count < 0:
            raise ValueError(f"Generator: `count` is {count}; expected a number of tokens.")
        if max(lengths) + count > self.room:
            raise ValueError(
                f"Generator: with {count} more tokens, a text would have {max(lengths) + count} places, and there is "
                f"`room` for {self.room}."
            )


def _texts(prompts: Iterable[Iterable[int]]) -> list[list[int]]:
    try:
        texts = list(prompts)
    except TypeError:
        raise TypeError(
            f"Generator: `prompts` must be sequences of tokens; got {prompts!r} ({type(prompts).__name__})."
        ) from None
    return [[*integers(prompt, "Generator: a prompt")] for prompt in texts]


def _is_session_and_variables(value: Any) -> bool:
    kinds = (popxl.Session, NamedTensors)
    return isinstance(value, tuple) and len(value) == 2 and all(map(isinstance, value, kinds))


def _create_variables(facts: NamedVariableFactories, is_known: bool) -> tuple[NamedTensors, NamedTensors]:
    """Create graph variables: weights (possibly known) and mutable state."""
    weights, changed = ({n: f for n, f in facts.to_dict().items() if f.by_ref == by_ref} for by_ref in (False, True))
    variables = NamedVariableFactories.from_dict(weights).init(empty=is_known)
    return variables, NamedVariableFactories.from_dict(changed).init()


def _share(session: popxl.Session, owner: popxl.Session, variables: dict[Any, Any]) -> None:
    """Share variables between sessions, on device and host, to store large models once."""
    session.use_variables_of(owner, variables)
    for mine, theirs in variables.items():
        mine.data = theirs.data


def _merged(a: NamedTensors, b: NamedTensors) -> NamedTensors:
    return NamedTensors.from_dict({**a.to_dict(), **b.to_dict()})
