"""Session options by PopART's names: `options._Popart`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from popart import RecomputationType
from poptorch.errors import Error
from poptorch.settings.setting import NO_EFFECT, OptionsDict, setting, strings
from popxl.options import SessionOptions

_SESSION_OPTIONS = frozenset(SessionOptions.model_fields) | frozenset(
    """accumulateOuterFragmentSettings accumulationAndReplicationReductionType accumulationFactor
    accumulatorTensorLocationSettings activationTensorLocationSettings autodiffSettings
    automaticLossScalingSettings autoRecomputation batchSerializationSettings bufferingDepthMap
    compilationProgressLogger compilationProgressTotal compileEngine convolutionOptions
    createHostTransferableTensorWithOffset createImplicitPipeliningFwdOnlyProgram customCodeletCompileFlags
    customCodelets defaultBufferingDepth defaultPrefetchBufferingDepth delayVarUpdates developerSettings
    disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams dotOpNames
    enableConstantFoldingOfMultipleConsumers enableExplicitIR enableFloatingPointChecks
    enableFullyConnectedPass enableGradientAccumulation enableLoadAndOffloadRNGState enableMergeExchange
    enableNonStableSoftmax enableOutlining enableOutliningCopyCostPruning enablePipelining
    enablePrefetchDatastreams enableRngStateManagement enableSerializedMatmuls enableStableNorm
    enableSupportedDataTypeCasting ensureFp32LossScaleTensor executionPhaseSettings experimentalSettings
    exportPoplarComputationGraph exportPoplarVertexGraph finalDotOp firstDotOp gclOptions groupHostSync
    groupNormStridedChannelGrouping hardwareInstrumentations implicitPipeliningEnabled
    instrumentWithHardwareCycleCounter kahnTieBreaker looseThresholdAtPeak lstmOptions matmulOptions
    meanAccumulationAndReplicationReductionStrategy mergeVarUpdate mergeVarUpdateMemThreshold
    optimizerStateTensorLocationSettings opxAliasChecking opxModifyChecking outlineSequenceBreakCost
    outlineThreshold prefetchBufferingDepthMap rearrangeAnchorsOnHost rearrangeStreamsOnHost
    replicatedCollectivesSettings reportOptions saveInitializersToFile
    scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs serializedPoprithmsShiftGraphsDir
    stashAllTensorsInferencePipeline strictOpVersions subgraphCopyingStrategy swapLimitScheduler
    syntheticDataMode tensorLocationSettingsOverride timeLimitScheduler transitiveClosureOptimizationThreshold
    updatableNamedBuffers useLoopCandidateCreator weightTensorLocationSettings""".split()
)


class _PopartOptions(OptionsDict):
    """Session options by PopART's names, for programs below PopTorch's level; `options._Popart`."""

    options: dict[str, Any] = setting(
        {},
        "`autoRecomputation`: which activations are computed again in the backward pass, by the kinds of "
        "`popart.RecomputationType`; those that `popxl.Ir.options` has (`placement`, `calledGraphs`, `remoteBuffers`, "
        "`precision`) have their effect there, and others none; a name that no session option has raises an Error",
        "set",
    )
    patterns: dict[str, bool] = setting(
        {},
        NO_EFFECT,
        "setPatterns",
        valid=lambda patterns: strings(patterns) and all(isinstance(use, bool) for use in patterns.values()),
        expects="a dict from names of patterns to bools",
    )
    patterns_level: int = setting(
        2, NO_EFFECT, "setPatterns", valid=lambda level: 0 <= level <= 3, expects="a number from 0 to 3"
    )
    engine_options: dict[str, str] = setting(
        {},
        NO_EFFECT,
        "setEngineOptions",
        valid=lambda options: strings([*options, *options.values()]),
        expects="a dict of strings",
    )

    def set(self, key: str, value: Any) -> _PopartOptions:
        """Set one session option.

        Args:
            key: name of the option, `"decomposeGradSum"`; or of a part of it, `"batchSerializationSettings.factor"`.
            value: value of the option; `check` validates its type.

        Raises:
            Error: if there is no such option.
        """
        if not isinstance(key, str) or key.split(".")[0] not in _SESSION_OPTIONS:
            raise Error(
                f"Unknown session option {key!r}: `options._Popart.set` takes the names of PopART's session options."
            )
        return self._set(options={**self.options, key: value})

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> _PopartOptions:
        """Switch rewriting patterns on or off.

        Args:
            patterns: whether to use each.
            level: level of other patterns to use, from 0 (none) to 3 (all).
        """
        return self._set(patterns=_plain(patterns), patterns_level=level)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> _PopartOptions:
        """Set engine options, replacing earlier ones."""
        return self._set(engine_options=_plain(engine_options))

    @property
    def recomputation(self) -> RecomputationType | None:
        """Kind of recomputation in the backward pass, from `autoRecomputation`; `None` if unset.

        Raises:
            Error: if it is set to anything else.
        """
        value = self.options.get("autoRecomputation")
        if value is None:
            return None
        known = {kind.name: kind for kind in RecomputationType} | {int(kind): kind for kind in RecomputationType}
        if not isinstance(value, int | str) or isinstance(value, bool) or value not in known:
            kinds = ", ".join(f"{int(kind)} ({kind.name})" for kind in RecomputationType)
            raise Error(f"Session option 'autoRecomputation' is {value!r}; expected one of {kinds}.")
        return known[value]

    def check(self) -> None:
        """Check the types of all values, at compilation.

        Raises:
            Error: if one is not a bool, a number, a string, an enum, or a list or dictionary of these.
        """
        for key, value in self.options.items():
            if not _is_session_value(value):
                raise Error(
                    f"Session option {key!r} is {value!r} ({type(value).__name__}); expected a bool, a number, a "
                    "string, an enum, or a list or dictionary of these."
                )

    def apply(self, to: SessionOptions) -> None:
        """Apply these options to those of an Ir, except the number of replicas.

        Raises:
            Error: if one does not take its value.
        """
        for key, value in self.options.items():
            if key in SessionOptions.model_fields and "replica" not in key.lower():
                try:
                    setattr(to, key, value)
                except ValidationError as problem:
                    raise Error(f"Session option {key!r} is {value!r}: {problem.errors()[0]['msg']}.") from None


def _plain(value: Mapping[str, Any]) -> Any:
    """Convert mappings to dictionaries; other values are left to the setting's check."""
    return dict(value) if isinstance(value, Mapping) else value


def _is_session_value(value: object) -> bool:
    if isinstance(value, Mapping):
        return strings(value) and all(map(_is_session_value, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_session_value, value))
    return isinstance(value, (bool, int, float, str))
