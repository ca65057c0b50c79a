"""What `poptorch.options` is made of."""
