"""Capture of a PyTorch function as a `Trace` of its ops, without computing any value."""
