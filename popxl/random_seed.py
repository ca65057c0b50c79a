"""Seeds for random ops: pairs of 32-bit words, made on the host and streamed to a program.

The op that derives seeds from a seed inside a program is `popxl.ops.split_random_seed`.
"""

import numpy as np
from numpy.typing import NDArray

from popxl.values.shapes import integer

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1


def create_seeds(
    seed: int,
    offset: int = 0,
    batches_per_step: int = 1,
    gradient_accumulation_factor: int = 1,
    replicas: int = 1,
) -> NDArray[np.uint32]:
    """Make one random seed for every batch, micro-batch and replica of a `session.run`.

    The same arguments give the same seeds on every machine, and a longer request begins with the seeds of a shorter
    one. `offset` is added to `seed`; give each step of a training loop its own.

    Returns:
        uint32 of shape `(batches_per_step, gradient_accumulation_factor, replicas, 2)` without its axes of length 1,
        ready for a `(2,)` stream. The last axis holds the high and the low word.

    Raises:
        TypeError: if one of the arguments is not an integer.
        ValueError: if `seed + offset` is negative or one of the counts is less than 1.

    Example:
        >>> create_seeds(7).tolist()
        [2684764585, 4058335883]
        >>> create_seeds(7, replicas=3).shape
        (3, 2)
    """
    seed, offset = integer(seed, "create_seeds: `seed`"), integer(offset, "create_seeds: `offset`")
    if seed + offset < 0:
        raise ValueError(
            f"create_seeds: `seed` + `offset` is {seed} + {offset} = {seed + offset}. "
            "Expected a sum of at least 0: choose a larger seed."
        )
    given = {
        "batches_per_step": batches_per_step,
        "gradient_accumulation_factor": gradient_accumulation_factor,
        "replicas": replicas,
    }
    counts = {name: integer(count, f"create_seeds: `{name}`") for name, count in given.items()}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"create_seeds: `{name}` is {count}. Expected at least 1, the default.")

    shape = tuple(counts.values())
    numbers = np.random.default_rng(seed + offset).integers(0, MAX_UINT64, size=shape, endpoint=True, dtype=np.uint64)
    words = np.stack([numbers >> 32, numbers & MAX_UINT32], axis=-1)
    return words.astype(np.uint32).squeeze()


def uint64_to_two_uint32(num: int) -> tuple[int, int]:
    """Split a number of 64 bits into its high and its low 32 bits.

    Raises:
        ValueError: if `num` is negative or needs more than 64 bits.

    Example:
        >>> uint64_to_two_uint32(2**32 + 5)
        (1, 5)
    """
    _check_fits("uint64_to_two_uint32", "num", num, 64)
    high, low = divmod(int(num), 2**32)
    return high, low


def two_uint32_to_uint64(a: int, b: int) -> int:
    """Join the high 32 bits `a` and the low 32 bits `b` into a number of 64 bits.

    Raises:
        ValueError: if either is negative or needs more than 32 bits.

    Example:
        >>> two_uint32_to_uint64(1, 5)
        4294967301
    """
    _check_fits("two_uint32_to_uint64", "a", a, 32)
    _check_fits("two_uint32_to_uint64", "b", b, 32)
    return (int(a) << 32) + int(b)


def _check_fits(function: str, argument: str, number: int, bits: int) -> None:
    if not 0 <= number < 2**bits:
        raise ValueError(f"{function}: `{argument}` is {number}. Expected 0 to 2**{bits} - 1.")
