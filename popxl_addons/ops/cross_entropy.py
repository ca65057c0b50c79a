"""Cross entropy of logits and labels, one op, optionally with its gradient.

The ops are popxl's, so that a saved program with them needs no addons.
"""

from popxl.extend.ops import REDUCTION_TYPE as Reduction
from popxl.extend.ops import cross_entropy, cross_entropy_with_grad

__all__ = ["Reduction", "cross_entropy", "cross_entropy_with_grad"]
