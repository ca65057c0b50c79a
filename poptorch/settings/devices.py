"""Options for the machine of models and compilation."""

from __future__ import annotations

from typing import Self

import popxl
from poptorch.enums import ConnectionType, SyncPattern
from poptorch.settings.environment import flag
from poptorch.settings.setting import NO_EFFECT, OptionsDict, setting


class _DeviceOptions(OptionsDict):
    """Device of a model, and time of its attachment."""

    connection_type: ConnectionType = setting(
        ConnectionType.Always, "when a model is attached to its device; `Never` only compiles", "connectionType"
    )
    auto_round_num_ipus: bool = setting(
        False, "a number of units that is no power of two is accepted rather than an Error", "autoRoundNumIPUs"
    )
    ipu_model: bool = setting(
        False,
        "models run on the CPU",
        "useIpuModel",
        make=lambda: flag("POPTORCH_IPU_MODEL") or flag("POPTORCH_SMALL_IPU_MODEL"),
        default_text="False, unless POPTORCH_IPU_MODEL or POPTORCH_SMALL_IPU_MODEL is set",
    )
    ipu_id: int | None = setting(None, "the number of the device that models run on", "useIpuId", default_text="any")
    ipu_version: int | None = setting(
        None,
        "models are only compiled, for no device of this machine; the version itself has no effect here",
        "useOfflineIpuTarget",
        valid=lambda version: version in (None, 1, 2, 21),
        expects="1, 2 or 21",
    )
    target: str | None = setting(
        None,
        "the machine that models are compiled for, which need not be here, as `popxl.Target` describes it",
        "useOfflineIpuTarget",
    )
    available_memory_proportion: dict[str, float] = setting(
        {},
        NO_EFFECT,
        "setAvailableMemoryProportion",
        valid=lambda proportions: all(
            isinstance(unit, str)
            and unit.startswith("IPU")
            and isinstance(proportion, (int, float))
            and 0 <= proportion <= 1
            for unit, proportion in proportions.items()
        ),
        expects="a dict from units, 'IPU0', to numbers from 0 to 1",
    )
    sync_pattern: SyncPattern = setting(SyncPattern.Full, NO_EFFECT, "syncPattern")

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Set the time of attaching to a device: `Always` (at the start), `OnDemand` (once compiled), or `Never`."""
        return self._set(connection_type=connection_type)

    def useIpuModel(self, use_model: bool) -> Self:
        """Run on the CPU (True), or on an accelerator if present (False); overrides `POPTORCH_IPU_MODEL`."""
        return self._set(ipu_model=use_model)

    def useIpuId(self, ipu_id: int) -> Self:
        """Select a device by index."""
        return self._set(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int | str = 2) -> Self:
        """Compile only, for a machine elsewhere; sets `ConnectionType.Never`.

        Args:
            ipu_version: 1, 2 or 21; or the machine to compile for, as `popxl.Target` describes it: "tpu v5e:2x2".

        Example:
            >>> options = poptorch.Options().useOfflineIpuTarget("gpu h100:8")
        """
        if isinstance(ipu_version, str):
            popxl.Target(ipu_version)  # reports errors of the description now
            return self._set(target=ipu_version, connection_type=ConnectionType.Never)
        return self._set(ipu_version=ipu_version, target=None, connection_type=ConnectionType.Never)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Round a number of IPUs up to a power of two, instead of raising an error."""
        return self._set(auto_round_num_ipus=auto_round_num_ipus)

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Set the memory proportion for temporary values by IPU: `{"IPU0": 0.5}`."""
        return self._set(available_memory_proportion=available_memory_proportion)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Set the synchronisation pattern of IPUs."""
        return self._set(sync_pattern=sync_pattern)
