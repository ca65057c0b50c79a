"""Analyses of finished graphs: memory, operations, estimates, ambiguity, pictures, changes."""
