"""Implementations of ops that are more than a line: functions of arrays, which a platform may override.

The public functions, with their shapes and gradients, are declared in the families beside this folder: `ops.conv`, for
example, uses `kernels.convolutions`.
"""
