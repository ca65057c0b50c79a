"""Data, loaded aside. `DataLoader` and `AsynchronousDataAccessor` are names of `poptorch`.

Nothing is imported here: a worker process that loads data has to start without JAX.
"""
