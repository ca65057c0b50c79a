"""What programs of several replicas run on: one device for all of them, or one for each."""

import jax
import pytest

from runtime.targets.devices import Device


def one_device(count: int) -> Device:
    """One device for so many replicas."""
    return Device("ipu_model", tuple(jax.devices("cpu")[:1]))


def a_device_each(count: int) -> Device:
    """A device for each of so many replicas. The test is left out if there are fewer."""
    devices = jax.devices("cpu")[:count]
    if len(devices) < count:
        pytest.skip("JAX was started with fewer devices")
    return Device("ipu_model", tuple(devices))
