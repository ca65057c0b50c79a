"""`Array`: type of the arguments and results of JAX functions: an array, or a tracer in its place."""

from typing import Any

Array = Any
