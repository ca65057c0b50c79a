"""Settings of tensor storage: `options.TensorLocations`."""

from __future__ import annotations

from typing import Any, Self

from poptorch.base.logging_ import logger
from poptorch.settings.setting import NO_EFFECT, OptionsDict, Setting, setting

_WARNED = f"{NO_EFFECT}, as a warning says"


class TensorLocationSettings(OptionsDict):
    """Storage location of one kind of tensors.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> location = poptorch.TensorLocationSettings().useOnChipStorage(False)
        >>> _ = options.TensorLocations.setActivationLocation(location)
    """

    min_elements_for_off_chip: int | None = setting(
        None, "tensors of fewer elements stay in the memory of the device; 2 if unset", "minElementsForOffChip"
    )
    min_elements_for_replicated_tensor_sharding: int | None = setting(
        None, "tensors of fewer elements stay whole; 2 if unset", "minElementsForReplicatedTensorSharding"
    )
    use_on_chip_storage: bool | None = setting(
        None,
        "if False, tensors are in the memory of the host; if unset, in that of the device, except for tensors that "
        "leave it under the liveness of a phased strategy",
        "useOnChipStorage",
    )
    use_replicated_tensor_sharding: bool | None = setting(
        None,
        "if True, each replica stores a part of every tensor whose elements can be divided evenly among the replicas "
        "that share it; not for activations, as a warning says",
        "useReplicatedTensorSharding",
    )
    use_io_tiles_to_load: bool | None = setting(None, _WARNED, "useIOTilesToLoad")
    use_io_tiles_to_store: bool | None = setting(None, _WARNED, "useIOTilesToStore")

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Set the minimum size, in elements, of tensors stored off chip."""
        return self._set(min_elements_for_off_chip=min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Set the minimum size, in elements, of sharded tensors."""
        return self._set(min_elements_for_replicated_tensor_sharding=min_elements)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Store tensors on the device (True), on the host (False), or by default rules (None)."""
        return self._set(use_on_chip_storage=use)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Shard the tensors over replicas."""
        return self._set(use_replicated_tensor_sharding=use)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load tensors through IO tiles."""
        return self._set(use_io_tiles_to_load=use)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store tensors through IO tiles."""
        return self._set(use_io_tiles_to_store=use)


_METHODS = {name: each.setter for name, each in vars(TensorLocationSettings).items() if isinstance(each, Setting)}


def is_off_chip(location: TensorLocationSettings, elements: int, leaves: bool = False) -> bool:
    """Whether a tensor of a given size is stored on the host: `location` decides, otherwise `leaves`."""
    on_chip = not leaves if location.use_on_chip_storage is None else location.use_on_chip_storage
    return not on_chip and elements >= (location.min_elements_for_off_chip or 2)


def is_sharded(location: TensorLocationSettings, elements: int, replicas: int) -> bool:
    """Whether a tensor of a given size is sharded over replicas."""
    least = location.min_elements_for_replicated_tensor_sharding or 2
    asked = location.use_replicated_tensor_sharding and elements >= least
    return bool(asked) and replicas > 1 and elements % replicas == 0


def _without_effect(location: TensorLocationSettings, is_of_activations: bool) -> list[str]:
    """Method names of changed settings without effect."""
    lost = ["use_io_tiles_to_load", "use_io_tiles_to_store"]
    if is_of_activations:  # each replica has activations of its own
        lost += ["use_replicated_tensor_sharding", "min_elements_for_replicated_tensor_sharding"]
    return [_METHODS[name] for name, value in location._values().items() if name in lost and value]


class _TensorLocationOptions(OptionsDict):
    """Storage locations; `options.TensorLocations`. Numerically without effect.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        >>> _ = options.TensorLocations.numIOTiles(32).setOptimizerLocation(location)
    """

    num_io_tiles: int | None = setting(
        None,
        f"{_WARNED}; but overlapped IO needs some",
        "numIOTiles",
        valid=lambda count: count is None or (32 <= count <= 192 and count % 2 == 0),
        expects="an even number from 32 to 192",
        words="numIOTiles must be an even number between 32 and 192.",
        default_text="none",
    )
    activation_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, what the backward pass reads of the forward pass is in the memory of the host "
        "meanwhile (`popxl.ops.offload`)",
        "setActivationLocation",
        default_text="unset",
    )
    weight_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, parameters, and buffers that `forward` does not overwrite, are in remote "
        "buffers (`popxl`); each layer loads its own, once in the forward pass and once in the backward pass",
        "setWeightLocation",
        default_text="unset",
    )
    optimizer_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, the state of the optimiser is in remote buffers (`popxl`); a step loads and "
        "stores that of one parameter after the other",
        "setOptimizerLocation",
        default_text="unset",
    )
    accumulator_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, gradients are summed over micro-batches in remote buffers (`popxl`); the "
        "backward pass loads and stores one sum after the other",
        "setAccumulatorLocation",
        default_text="unset",
    )

    def _set(self, **values: Any) -> Self:
        super()._set(**values)
        for name, value in values.items():
            if isinstance(value, TensorLocationSettings):
                lost = _without_effect(value, is_of_activations=name == "activation_location")
                if lost:
                    logger.warning("TensorLocations.%s: %s has no effect here.", _LOCATIONS[name], ", ".join(lost))
            elif value is not None:
                logger.warning("TensorLocations.numIOTiles has no effect here, where there are no tiles.")
        return self

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Reserve tiles for transfers.

        Args:
            num_tiles: an even number from 32 to 192.
        """
        return self._set(num_io_tiles=num_tiles)

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage location of activations."""
        return self._set(activation_location=location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage location of weights."""
        return self._set(weight_location=location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage location of optimiser state."""
        return self._set(optimizer_location=location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage location of gradient accumulators."""
        return self._set(accumulator_location=location)


_LOCATIONS = {name: each.setter for name, each in vars(_TensorLocationOptions).items() if isinstance(each, Setting)}
