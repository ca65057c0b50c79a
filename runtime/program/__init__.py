"""An Ir compiled for a device, with the state that it keeps there."""
