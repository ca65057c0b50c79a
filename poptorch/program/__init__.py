"""Conversion of captured models to programs: the main graph around a model, its loops, the optimiser step."""
