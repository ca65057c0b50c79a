"""XLA compile options for CPUs."""

from __future__ import annotations

from functools import cache

import jax

_SAFE: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@cache
def compile_options() -> dict[str, str | bool] | None:
    """Options for XLA on CPUs: YNNPACK is given single products only, as some of its fusions compute something else
    with jaxlib 0.10.2 and 0.11.0, or crash (https://github.com/jax-ml/jax/issues/39103 and 39257).

    A jaxlib without the option does not have the fusions. (The option `xla_cpu_copy_insertion_use_region_analysis`,
    which avoids copies of arrays that loops overwrite, gives wrong results on CPUs.)
    """
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_SAFE)
    except jax.errors.JaxRuntimeError as problem:
        if "No such compile option" not in str(problem):
            raise
        return None
    return _SAFE
