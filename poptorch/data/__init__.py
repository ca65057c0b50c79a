"""Asynchronous data loading. `DataLoader` and `AsynchronousDataAccessor` are exported from `poptorch`.

This file imports nothing: a worker process that loads data has to start without JAX.
"""
