"""Descriptions of tensors: specs, shapes, shards. Nothing here knows an op."""
