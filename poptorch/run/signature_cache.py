"""`SignatureCache`: a signature cache, with one program per argument signature.

It serves `generate` of `transformers`: the model first processes the prompt as a whole, and then one token at a time.
The loop runs on the host; `intercept_calls` redirects each of its calls of the module to the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from poptorch.base.patching import patched
from poptorch.run.program_cache import ProgramCache

if TYPE_CHECKING:
    from poptorch.run.executor import PoplarExecutor


class SignatureCache:
    """An LRU cache of wrapped models, one per argument signature.

    Args:
        make: wraps the model once more.
    """

    def __init__(self, make: Callable[[], PoplarExecutor], max_programs: int) -> None:
        self._make = make
        self._length = 0  # longest cache of positions so far; shorter prompts share the program of its tokens
        self._cache: ProgramCache[PoplarExecutor] = ProgramCache(
            max_programs,
            lambda wrapped: wrapped.destroy(),
            "The model was called with more than %d kinds of arguments, and is compiled for each: a shape that "
            "changes from call to call costs a compilation each time. Have a cache that keeps its shape, and "
            "pad what is given to a few lengths; or keep more programs: `options.keptPrograms(%d)`.",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self._cache.get(lambda wrapped: wrapped._takes(args, kwargs), self._make)(*args, **kwargs)

    def with_static_cache(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Request a static cache in `generate` arguments, if the model is from `transformers` and they specify none.

        A cache that grows is of another shape for each token.
        """
        config: Any = getattr(module, "generation_config", None)
        specified = (*_CACHES, "generation_config", "cache_implementation")
        if config is None or any(kwargs.get(name) is not None for name in specified):
            return kwargs
        if getattr(config, "cache_implementation", None) is not None or not kwargs.get("use_cache", config.use_cache):
            return kwargs
        length = _length(config, args, kwargs)
        if length is None or not _has_windows(module):
            return {"cache_implementation": "static", **kwargs}
        self._length = max(length, self._length)
        name = next(name for name in _CACHES if name in inspect.signature(module.forward).parameters)
        return {name: _cache_of_all_positions(module, self._length), **kwargs}

    def copy_weights(self) -> None:
        """Copy host weights to the device."""
        for each in self._cache:
            each.copyWeightsToDevice()

    def destroy(self) -> None:
        """Release all devices. Subsequent calls recompile."""
        self._cache.clear()


def intercept_calls(module: torch.nn.Module, run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Context manager redirecting calls of a module to a function."""
    return patched(module, _compiled_call_impl=run)  # which `Module.compile` sets


_CACHES = ("cache", "past_key_values")
"""Names of the cache among the arguments, in newer and in older versions of `transformers`."""


def _has_windows(module: Any) -> bool:
    """Whether each layer of a decoder has attention, and some have it to a window of the last tokens only."""
    config = module.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    has_windows = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
    return has_windows and kinds <= {"full_attention", "sliding_attention"} and not config.is_encoder_decoder


def _length(config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Largest number of tokens after `generate`; `None` if unknown."""
    prompts = (*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds")))
    prompt = next((each for each in prompts if isinstance(each, torch.Tensor)), None)
    new, total = (kwargs.get(name, getattr(config, name, None)) for name in ("max_new_tokens", "max_length"))
    more = total if new is None else new
    if prompt is None or more is None:
        return None
    is_counted = new is None and not prompt.is_floating_point()  # embeddings are not
    return int(more if is_counted else prompt.shape[1] + more)


def _cache_of_all_positions(module: Any, length: int) -> Any:
    """Static cache whose layers keep all positions. Attention masks those before a window.

    A layer that keeps those of a window counts the tokens in a Python integer: each token would need a program.
    """
    caches: Any = import_module("transformers.cache_utils")
    cache = caches.StaticCache(config=module.config, max_cache_len=length)
    cache.layers = [caches.StaticLayer(length) for _ in cache.layers]
    return cache
