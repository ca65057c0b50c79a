"""Private names of PopART's IR: the classes of its ops."""

from popart._internal.ir import op as op
