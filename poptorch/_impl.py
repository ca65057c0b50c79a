"""`createPoptorchError` under the name that programs reach it by, `poptorch._impl.createPoptorchError`."""

from poptorch.errors import createPoptorchError

__all__ = ["createPoptorchError"]
