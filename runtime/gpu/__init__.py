"""Implementations for GPUs."""
