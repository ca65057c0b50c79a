"""Tensors and how ops on them are recorded in graphs. Nothing here knows which ops there are."""
