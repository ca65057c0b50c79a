"""`Array`: what functions of JAX take and return: an array, or what stands for one while JAX traces."""

from typing import Any

Array = Any
