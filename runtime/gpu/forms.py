"""The kernels of ops that are computed in another form on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from popxl.ops.kernels.kernel import Form, Kernel
from popxl.ops.kernels.sums import softmax_gradient
from runtime.gpu import sums as of_sums

FORMS: Mapping[Kernel, Form] = {softmax_gradient: of_sums.softmax_gradient}
