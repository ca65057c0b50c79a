"""`SignatureCache`: a signature cache, with one program per argument signature.

It serves `generate` of `transformers`: the model first processes the prompt as a whole, and then one token at a time.
The loop runs on the host; `intercept_calls` redirects each of its calls of the module to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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


def with_static_cache(module: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Request a static cache in `generate` arguments, if the model is from `transformers` and specifies none.

    A cache that grows is of another shape for each token.
    """
    config: Any = getattr(module, "generation_config", None)
    if config is None or any(kwargs.get(name) is not None for name in ("past_key_values", "generation_config")):
        return kwargs
    if getattr(config, "cache_implementation", None) is not None or not kwargs.get("use_cache", config.use_cache):
        return kwargs
    return {"cache_implementation": "static", **kwargs}
