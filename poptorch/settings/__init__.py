"""Building blocks of `poptorch.options`."""
