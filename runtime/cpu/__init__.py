"""Implementations for CPUs."""
