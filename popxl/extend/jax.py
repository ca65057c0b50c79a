"""JAX functions as graphs: arrays of random keys, whose tensors hold their data.

Example:
    >>> from popxl.extend.jax import generator_of, key_data
    >>> key = jax.random.key(0)
    >>> generator_of(jax.typeof(key)), key_data([key])[0].shape
    ('threefry2x32', (2,))
"""

from popxl.transforms.jax_keys import generator_of, key_data, with_keys

__all__ = ["generator_of", "key_data", "with_keys"]
