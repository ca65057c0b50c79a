"""Descriptions of tensors: specs, shapes, shards. Independent of ops."""
