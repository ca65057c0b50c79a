"""Asynchronous data loading. `DataLoader` and `AsynchronousDataAccessor` are exported from `poptorch`.

Nothing is imported here: a worker process that loads data has to start without JAX.
"""
