"""Check arguments of functions that build graphs, with errors like those of built-in ops.

Example:
    >>> from popxl.extend.arguments import integer
    >>> integer(2.5, "my_op: `rate`")
    Traceback (most recent call last):
    TypeError: my_op: `rate` must be an integer; got 2.5 (float).
"""

from popxl.base.arguments import check_type
from popxl.base.exact_key import exact_key
from popxl.base.names import camel
from popxl.values.shapes import flag, integer, integer_or_integers, integers, is_known_word, number, one_axis, word

__all__ = [
    "camel",
    "check_type",
    "flag",
    "integer",
    "integer_or_integers",
    "integers",
    "is_known_word",
    "number",
    "one_axis",
    "exact_key",
    "word",
]
