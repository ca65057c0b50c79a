"""A program as a plan of executables, which the host dispatches one after the other."""
