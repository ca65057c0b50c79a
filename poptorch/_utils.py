"""See `poptorch._impl`."""

from poptorch._impl import combine_batch_tensors_gen

__all__ = ["combine_batch_tensors_gen"]
