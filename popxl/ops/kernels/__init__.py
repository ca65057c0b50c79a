"""How ops are computed where that is more than a line: functions of arrays, which a machine may compute in other forms.

What users call, with its shapes and gradients, is declared in the families beside this folder: `ops.conv`, for one,
takes what `kernels.convolutions` computes.
"""
