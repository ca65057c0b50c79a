"""`Session`, and what belongs to it, under the names that programs import. The work is done in `runtime.session`."""

from collections.abc import Mapping
from typing import get_type_hints

import numpy as np

from popxl.core.tensor import HostScalarTensor
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from runtime.export import export
from runtime.jax_analysis import Analysis, analyze
from runtime.lowering.to_jax import GraphFunction, to_jax
from runtime.progress import CompilationProgress, compilation_progress
from runtime.session import Session
from runtime.targets.offline import Target

__all__ = [
    "Analysis",
    "CompilationProgress",
    "GraphFunction",
    "Session",
    "StreamBufferMaps",
    "Target",
    "analyze",
    "compilation_progress",
    "d2hStreamBufferMaps",
    "export",
    "h2dStreamBufferMaps",
    "to_jax",
]

d2hStreamBufferMaps = Mapping[DeviceToHostStream, np.ndarray]
h2dStreamBufferMaps = Mapping[HostToDeviceStream, HostScalarTensor]
StreamBufferMaps = d2hStreamBufferMaps | h2dStreamBufferMaps

Session.__annotations__ = get_type_hints(Session)  # as written they mean something in their own file alone
Session.__module__ = __name__  # in what is shown, in pickles and in the documentation
