"""Placement of ops: blocks, strategies, annotations during capture."""
