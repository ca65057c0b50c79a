"""`Session`, and related names, under the path that programs import. The implementation is in `runtime.session`."""

from collections.abc import Mapping

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
