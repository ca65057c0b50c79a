"""Implementations for TPUs."""
