"""Utilities for all poptorch modules, independent of models: messages, dtypes, structures, replicas."""
