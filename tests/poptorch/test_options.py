"""Options: what each method sets, what is refused; freezing and copies; files, JSON, the environment; their page."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch
import popxl
from poptorch.enums import (
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    PartialBatch,
    ReductionType,
    SyncPattern,
)
from poptorch.errors import Error
from poptorch.options import Anchor, ConfigFileError, Options, TensorLocationSettings, options_page
from poptorch.placement import strategies
from poptorch.placement.blocks import MultiConv
from poptorch.settings.setting import NO_EFFECT, Group, OptionsDict, Setting

VARIABLES = """POPTORCH_DEFAULT_OPTIONS POPTORCH_CACHE_DIR POPTORCH_IPU_MODEL POPTORCH_SMALL_IPU_MODEL
POPLAR_ENGINE_OPTIONS PVTI_OPTIONS OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK""".split()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def read(options: object, path: str) -> Any:
    for name in path.split("."):
        options = getattr(options, name)
    return options


SHARDED = strategies.ShardedExecution("A", "B")
LOCATION = TensorLocationSettings().useOnChipStorage(False)

# the method, its arguments, and what is read afterwards
SETTERS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("deviceIterations", (3,), {"device_iterations": 3}),
    ("replicationFactor", (4,), {"replication_factor": 4}),
    ("inputReplicaGrouping", (1, CommGroupType.Orthogonal), {"input_group_type": CommGroupType.Orthogonal}),
    ("outputMode", (OutputMode.All,), {"output_mode": OutputMode.All, "output_return_period": 1}),
    ("outputMode", (OutputMode.EveryN, 5), {"output_mode": OutputMode.EveryN, "output_return_period": 5}),
    ("broadcastBuffers", (False,), {"broadcast_buffers": False}),
    ("broadcastBuffers", (), {"broadcast_buffers": True}),
    ("randomSeed", (42,), {"random_seed": 42}),
    ("modelName", ("encoder",), {"model_name": "encoder"}),
    ("enableExecutableCaching", ("cache",), {"executable_cache": "cache"}),
    ("enableExecutableCaching", (None,), {"executable_cache": None}),
    ("keptPrograms", (3,), {"kept_programs": 3}),
    ("partialBatch", (PartialBatch.Refuse,), {"partial_batch": PartialBatch.Refuse}),
    ("enableProfiling", (), {"profile_dir": "."}),
    ("enableProfiling", ("reports",), {"profile_dir": "reports"}),
    ("logDir", ("logs",), {"log_dir": "logs"}),
    ("maxRepeatLogs", (None,), {"max_repeat_logs": None}),
    ("showCompilationProgressBar", (False,), {"show_compilation_progress_bar": False}),
    ("relaxOptimizerAttributesChecks", (), {"relax_optimizer_attributes_checks": True}),
    ("disableModuleNamescope", (), {"module_namescope_enabled": False}),
    ("sourceLocationExcludes", (["a", "b"],), {"source_location_excludes": ["a", "b"]}),
    ("updatableNamedBuffers", (["mean"],), {"updatable_named_buffers": ["mean"]}),
    ("connectionType", (ConnectionType.OnDemand,), {"connection_type": ConnectionType.OnDemand}),
    ("setExecutionStrategy", (SHARDED,), {"execution_strategy": SHARDED}),
    ("autoRoundNumIPUs", (), {"auto_round_num_ipus": True}),
    ("enableSyntheticData", (True,), {"synthetic_data": True}),
    ("enableStableNorm", (True,), {"stable_norm": True}),
    ("useIpuModel", (True,), {"ipu_model": True}),
    ("useIpuId", (2,), {"ipu_id": 2}),
    ("useOfflineIpuTarget", (), {"ipu_version": 2, "connection_type": ConnectionType.Never}),
    ("useOfflineIpuTarget", (21,), {"ipu_version": 21}),
    ("useOfflineIpuTarget", ("tpu v5e:2x2",), {"target": "tpu v5e:2x2", "connection_type": ConnectionType.Never}),
    ("setAvailableMemoryProportion", ({"IPU0": 0.5},), {"available_memory_proportion": {"IPU0": 0.5}}),
    ("syncPattern", (SyncPattern.ReplicaAndLadder,), {"sync_pattern": SyncPattern.ReplicaAndLadder}),
    ("logCycleCount", (True,), {"log_cycle_count": True}),
    ("Training.gradientAccumulation", (4,), {"Training.gradient_accumulation": 4}),
    (
        "Training.accumulationAndReplicationReductionType",
        (ReductionType.Sum,),
        {"Training.accumulation_and_replication_reduction_type": ReductionType.Sum},
    ),
    (
        "Training.setMeanAccumulationAndReplicationReductionStrategy",
        (MeanReductionStrategy.Running,),
        {"Training.mean_accumulation_and_replication_reduction_strategy": MeanReductionStrategy.Running},
    ),
    ("Training.setAutomaticLossScaling", (True,), {"Training.automatic_loss_scaling": True}),
    ("Training.setConvolutionDithering", (True,), {"Training.convolution_dithering": True}),
    ("Training.setMemoryPlan", ("products",), {"Training.memory_plan": "products"}),
    ("Precision.enableFloatingPointExceptions", (True,), {"Precision.floating_point_exceptions": True}),
    ("Precision.enableStochasticRounding", (True,), {"Precision.stochastic_rounding": True}),
    ("Precision.setPartialsType", (torch.half,), {"Precision.partials_type": torch.half}),
    (
        "Precision.halfFloatCasting",
        (HalfFloatCastingBehavior.HalfUpcastToFloat,),
        {"Precision.half_float_casting": HalfFloatCastingBehavior.HalfUpcastToFloat},
    ),
    ("Precision.runningStatisticsAlwaysFloat", (False,), {"Precision.running_statistics_always_float": False}),
    ("Jit.traceModel", (False,), {"Jit.trace_model": False}),
    ("Distributed.configureProcessId", (1, 3), {"Distributed.processId": 1, "Distributed.numProcesses": 3}),
    ("TensorLocations.numIOTiles", (32,), {"TensorLocations.num_io_tiles": 32}),
    ("TensorLocations.setActivationLocation", (LOCATION,), {"TensorLocations.activation_location": LOCATION}),
    ("TensorLocations.setWeightLocation", (LOCATION,), {"TensorLocations.weight_location": LOCATION}),
    ("TensorLocations.setOptimizerLocation", (LOCATION,), {"TensorLocations.optimizer_location": LOCATION}),
    ("TensorLocations.setAccumulatorLocation", (LOCATION,), {"TensorLocations.accumulator_location": LOCATION}),
    ("_Popart.set", ("decomposeGradSum", True), {"_Popart.options": {"decomposeGradSum": True}}),
    (
        "_Popart.setPatterns",
        ({"PadSum": False}, 0),
        {"_Popart.patterns": {"PadSum": False}, "_Popart.patterns_level": 0},
    ),
    ("_Popart.setEngineOptions", ({"a": "b"},), {"_Popart.engine_options": {"a": "b"}}),
]


@pytest.mark.parametrize("path, args, expected", SETTERS, ids=lambda value: value if isinstance(value, str) else "")
def test_setters(path: str, args: tuple[Any, ...], expected: dict[str, Any]) -> None:
    options = Options()
    before = repr(options)
    owner = read(options, path.rpartition(".")[0]) if "." in path else options
    assert read(options, path)(*args) is owner, "calls chain"
    assert {name: read(options, name) for name in expected} == expected

    frozen = Options()
    frozen.freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        read(frozen, path)(*args)
    assert repr(frozen) == before


def methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


NOT_SETTERS = {
    "clone", "defaultOutputMode", "exists", "freeze", "from_json", "loadFromFile", "toDict", "update"
}  # fmt: skip


def groups() -> dict[str, type[OptionsDict]]:
    return {f"{name}.": each.kind for name, each in Options._declared().items() if isinstance(each, Group)}


@pytest.mark.parametrize("path, kind", [("", Options), *groups().items(), ("settings", TensorLocationSettings)])
def test_each_method_sets_a_declared_setting(path: str, kind: type[OptionsDict]) -> None:
    by = {each.setter for each in kind._declared().values() if isinstance(each, Setting)}
    others = {"setEnvVarNames", "disable", "check", "apply", "appendToLocationExcludes", *NOT_SETTERS}
    assert methods(kind) - others == by
    if path != "settings":
        assert by - {"anchorTensor"} == {
            name.removeprefix(path) for name, _, _ in SETTERS if name.rpartition(".")[0] == path.removesuffix(".")
        }


def test_the_page_of_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        [cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")]
        for line in options_page().splitlines()
        if line.startswith("| `")
    ]
    declared = [
        (path, each)
        for path, kind in [("", Options), *groups().items(), ("", TensorLocationSettings)]
        for each in kind._declared().values()
        if isinstance(each, Setting)
    ]
    assert [row[:2] for row in rows] == [[f"`{each.name}`", f"`{path}{each.setter}`"] for path, each in declared]
    for row, (_, each) in zip(rows, declared, strict=True):
        assert row[2] and row[2] == each.default_text
        assert row[3].lower().removesuffix(".") == each.effect.lower()
        assert each.effect.startswith(NO_EFFECT) or NO_EFFECT not in each.effect.split(";")[0]
    assert "/" + "work" not in options_page()


@pytest.mark.thorough
def test_the_page_is_printed() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "poptorch", "options"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert shown.stdout == options_page() and not shown.stderr


LOCATION_SETTERS = [
    ("minElementsForOffChip", (8,), "min_elements_for_off_chip", 8),
    ("minElementsForReplicatedTensorSharding", (9,), "min_elements_for_replicated_tensor_sharding", 9),
    ("useOnChipStorage", (), "use_on_chip_storage", True),
    ("useOnChipStorage", (None,), "use_on_chip_storage", None),
    ("useReplicatedTensorSharding", (), "use_replicated_tensor_sharding", True),
    ("useIOTilesToLoad", (False,), "use_io_tiles_to_load", False),
    ("useIOTilesToStore", (), "use_io_tiles_to_store", True),
]


@pytest.mark.parametrize("method, args, name, value", LOCATION_SETTERS)
def test_tensor_locations(method: str, args: tuple[Any, ...], name: str, value: Any) -> None:
    location = TensorLocationSettings()
    assert getattr(location, method)(*args) is location
    assert getattr(location, name) == value


def test_a_location_is_copied_into_options() -> None:
    location = TensorLocationSettings().useOnChipStorage(False)
    options = Options()
    options.TensorLocations.setWeightLocation(location)
    location.useOnChipStorage(True)
    assert options.TensorLocations.weight_location.use_on_chip_storage is False
    options.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        options.TensorLocations.weight_location.useOnChipStorage(True)


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda o: o.deviceIterations("3"), AssertionError, "`device_iterations` is '3'; expected a positive integer"),
    (lambda o: o.deviceIterations(0), AssertionError, "`device_iterations` is 0; expected a positive integer"),
    (lambda o: o.deviceIterations(1.0), AssertionError, "expected a positive integer"),
    (lambda o: o.broadcastBuffers(0), AssertionError, "`broadcast_buffers` is 0; expected a value of bool"),
    (lambda o: o.outputMode(2), AssertionError, "expected a value of OutputMode"),
    (lambda o: o.outputMode(OutputMode.EveryN), AssertionError, "`output_return_period` is None; expected a positive"),
    (lambda o: o.outputMode(OutputMode.EveryN, 0), AssertionError, "`output_return_period` is 0; expected a positive"),
    (lambda o: o.anchorTensor("a", "b", OutputMode.EveryN, 0), AssertionError, "anchorTensor: `output_return_period`"),
    (lambda o: o.anchorTensor("a", None), AssertionError, "anchorTensor: `long_name` is None; expected a value of str"),
    (lambda o: o.anchorTensor("a", "b", "All"), AssertionError, "`output_mode` is 'All'; expected a value"),
    (lambda o: o.inputReplicaGrouping(1, CommGroupType.All), ValueError, "is CommGroupType.All; expected Consecutive"),
    (
        lambda o: o.inputReplicaGrouping(3, CommGroupType.Consecutive),
        ValueError,
        "Groups of 3 replicas do not make up 2",
    ),
    (
        lambda o: o.inputReplicaGrouping(4, CommGroupType.Consecutive),
        ValueError,
        "Groups of 4 replicas do not make up 2",
    ),
    (lambda o: o.inputReplicaGrouping("2", CommGroupType.Consecutive), AssertionError, "expected a value of int"),
    (lambda o: o.randomSeed("3"), AssertionError, "`random_seed` is '3'; expected a value of int or None"),
    (lambda o: o.sourceLocationExcludes(["a", 1]), AssertionError, "expected a list of strings"),
    (lambda o: o.setExecutionStrategy("pipelined"), AssertionError, "expected an execution strategy, such as"),
    (lambda o: o.useOfflineIpuTarget("abacus"), ValueError, "'abacus' describes no machine"),
    (lambda o: o.useOfflineIpuTarget(3), AssertionError, "`ipu_version` is 3; expected 1, 2 or 21"),
    (lambda o: o.setAvailableMemoryProportion({"0": 0.5}), AssertionError, "expected a dict from units, 'IPU0'"),
    (lambda o: o.setAvailableMemoryProportion({"IPU0": 2.0}), AssertionError, "numbers from 0 to 1"),
    (lambda o: o.Training.gradientAccumulation(0), AssertionError, "Options.Training.gradientAccumulation: `g"),
    (
        lambda o: o.Training.accumulationAndReplicationReductionType(ReductionType.NoReduction),
        ValueError,
        "expected ReductionType.Sum or ReductionType.Mean",
    ),
    (
        lambda o: o.Training.accumulationAndReplicationReductionType("mean"),
        ValueError,
        "'mean'; expected ReductionType",
    ),
    (lambda o: o.Precision.setPartialsType(torch.float64), ValueError, "expected torch.float or torch.half"),
    (lambda o: o.Precision.setPartialsType("half"), ValueError, "expected torch.float or torch.half"),
    (lambda o: o.Jit.traceModel(True), ValueError, "models are no longer traced"),
    (lambda o: o.Distributed.configureProcessId(2, 2), AssertionError, "`process_id` is 2 of 2 processes"),
    (lambda o: o.TensorLocations.numIOTiles(33), AssertionError, "expected an even number from 32 to 192"),
    (lambda o: o.TensorLocations.numIOTiles(30), AssertionError, "expected an even number from 32 to 192"),
    (lambda o: o.TensorLocations.numIOTiles(194), AssertionError, "expected an even number from 32 to 192"),
    (lambda o: o.TensorLocations.setWeightLocation(None), AssertionError, "expected a value of TensorLocationSettings"),
    (lambda o: o._Popart.setEngineOptions({"a": 1}), AssertionError, "expected a dict of strings"),
    (lambda o: o._Popart.setEngineOptions(3), AssertionError, "`engine_options` is 3; expected a dict of strings"),
    (lambda o: o._Popart.setPatterns({"a": 1}), AssertionError, "expected a dict from names of patterns to bools"),
    (lambda o: o._Popart.setPatterns({}, 7), AssertionError, "`patterns_level` is 7; expected a number from 0 to 3"),
    (lambda o: o._Popart.set(3, 1), Error, "Unknown session option 3"),
    (lambda o: o._Popart.set("noSuchOption", 1), Error, "Unknown session option 'noSuchOption'"),
    (lambda o: setattr(o, "device_iterations", "3"), AssertionError, "expected a positive integer"),
    (
        lambda o: setattr(o, "deviceIteration", 3),
        AttributeError,
        "no setting 'deviceIteration'; did you mean device_it",
    ),
    (lambda o: setattr(o, "Training", 3), AttributeError, "Options has no setting 'Training'"),
    (lambda o: setattr(o.Training, "xyz", 3), AttributeError, "Options.Training has no setting 'xyz'."),
    (lambda o: delattr(o, "device_iterations"), AttributeError, "can't be deleted"),
    (lambda o: o.toDict(), AssertionError, "the output mode still is the default"),
]


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_what_is_refused(change: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    options = Options().replicationFactor(2)
    before = repr(options)
    with pytest.raises(error) as raised:
        change(options)
    assert message in str(raised.value)
    assert repr(options) == before, "nothing changes with an error"


def test_what_is_set_is_a_copy() -> None:
    buffers, options = ["mean"], Options()
    options.updatableNamedBuffers(buffers).freeze()
    buffers.append("variance")
    assert options.updatable_named_buffers == ["mean"]


def test_names_that_no_option_has() -> None:
    with pytest.raises(AttributeError):
        Options().noSuchOption  # noqa: B018
    with pytest.raises(AttributeError, match="no setting 'no_such'"):
        TensorLocationSettings(no_such=1)


def test_input_groups() -> None:
    options = Options().replicationFactor(8)
    assert options.input_groups.count == 8
    options.inputReplicaGrouping(4, CommGroupType.Orthogonal)
    assert options.input_group_size == 4 and options.input_groups.count == 2
    assert options.input_groups.assignment == (0, 1) * 4
    options.inputReplicaGrouping(4, CommGroupType.NoGrouping)
    assert (options.input_group_size, options.input_group_type) == (1, CommGroupType.Consecutive)
    options.inputReplicaGrouping(8, CommGroupType.Consecutive).replicationFactor(4)
    with pytest.raises(ValueError, match="Groups of 8 replicas do not make up 4"):
        options.input_groups  # noqa: B018


def test_a_period_without_every_n_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    options = Options().outputMode(OutputMode.All, 5)
    assert options.output_return_period == 1
    assert "`output_return_period` is ignored" in caplog.text


def test_default_output_mode() -> None:
    options = Options()
    assert options.defaultOutputMode()
    assert not options.outputMode(OutputMode.Final).defaultOutputMode()


def test_random_seed_seeds_torch() -> None:
    Options().randomSeed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))


def test_anchors() -> None:
    options = Options()
    assert options.anchorTensor("grad", "Gradient___w").anchorTensor("loss", "loss", OutputMode.EveryN, 2) is options
    assert options.anchored_tensors == {"grad": Anchor("Gradient___w"), "loss": Anchor("loss", OutputMode.EveryN, 2)}
    assert Options().anchored_tensors == {}, "every object has its own"


def test_location_excludes() -> None:
    options = Options()
    first = options.source_location_excludes
    assert str(Path(torch.__file__).parent) + "/" in first
    assert options.appendToLocationExcludes("a", "b").source_location_excludes == [*first, "a", "b"]


def test_deprecated(caplog: pytest.LogCaptureFixture) -> None:
    Options().Precision.halfFloatCasting(HalfFloatCastingBehavior.Default)
    Options().Precision.runningStatisticsAlwaysFloat(True)
    Options().Jit.traceModel(False)
    for name in ("Precision.halfFloatCasting", "Precision.runningStatisticsAlwaysFloat", "Jit.traceModel"):
        assert f"Options.{name} is deprecated" in caplog.text


def test_copies() -> None:
    options = Options().deviceIterations(3).setExecutionStrategy(strategies.PipelinedExecution("A"))
    options.Training.gradientAccumulation(2)
    options.freeze()
    for made in (options.clone(), copy.deepcopy(options).clone(), pickle.loads(pickle.dumps(options)).clone()):
        assert repr(made) == repr(options) and made == options
        made.deviceIterations(4).Training.gradientAccumulation(5)
        made.execution_strategy.stage("A").ipu(3)
        made.TensorLocations.weight_location.useOnChipStorage(True)
        assert made != options
    assert options.device_iterations == 3 and options.Training.gradient_accumulation == 2
    assert options.execution_strategy.stage("A").unit is None
    assert options.TensorLocations.weight_location.use_on_chip_storage is None
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        pickle.loads(pickle.dumps(options)).deviceIterations(1)


def test_repr_shows_every_value() -> None:
    options = Options().deviceIterations(11)
    options.Training.gradientAccumulation(13)
    options.TensorLocations.setWeightLocation(TensorLocationSettings().minElementsForOffChip(17))
    text = repr(options)
    for shown in ("device_iterations=11", "Training.gradient_accumulation=13", "min_elements_for_off_chip=17"):
        assert shown in text
    for name, each in Options._declared().items():
        assert f"    {name}{'.' if isinstance(each, Group) else '='}" in text
    assert repr(Options()) == repr(Options()) and Options() == Options()
    assert Options() != Options().Training


def test_to_dict() -> None:
    options = Options().outputMode(OutputMode.All).deviceIterations(3)
    options.Training.gradientAccumulation(4)
    found = options.toDict()
    assert found["device_iterations"] == 3 and found["gradient_accumulation"] == 4
    assert found["output_mode"] is OutputMode.All and found["execution_mode"] == "pipelined"
    names = [
        name for kind in (Options, *groups().values()) for name in kind._declared() if name not in Options._declared()
    ]
    assert len(names) == len(set(names)), "so no setting hides another"


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (lambda o: o, "device_iterations", 4),
        (lambda o: o.Training, "gradient_accumulation", 4),
        (lambda o: o.Precision, "stochastic_rounding", True),
        (lambda o: o.TensorLocations, "num_io_tiles", 32),
        (lambda o: o._Popart, "patterns_level", 1),
        (lambda o: poptorch.TensorLocationSettings(), "use_on_chip_storage", True),
    ],
)
def test_groups_as_dictionaries(group: Callable[[Options], OptionsDict], name: str, value: Any) -> None:
    options = Options().outputMode(OutputMode.All)
    settings = group(options)
    first = settings.toDict()
    assert settings.exists(name) and name in first and not settings.exists("no_such")
    assert settings.update({name: value}) is settings
    assert settings.toDict() == {**first, name: value} and getattr(settings, name) == value
    with pytest.raises(AttributeError, match="has no setting 'no_such'"):
        settings.update({name: first[name], "no_such": 1})
    with pytest.raises(AssertionError, match=f"`{name}` is 'x'"):
        settings.update({name: "x"})
    assert getattr(settings, name) == value
    settings.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        settings.update({name: value})


def test_popart_values() -> None:
    options = Options()
    options._Popart.set("batchSerializationSettings.factor", 4).set("virtualGraphMode", SyncPattern.Full)
    options._Popart.set("convolutionOptions", {"a": [1, 2.0, "x"]})
    options._Popart.check()
    options._Popart.set("convolutionOptions", {"a": object()})
    with pytest.raises(Error, match="Session option 'convolutionOptions' is .*dict.; expected a bool"):
        options._Popart.check()


def test_options_of_the_ir() -> None:
    """They have their effect, but for those that the Ir decides."""
    options = Options()
    for key, value in {"calledGraphs": "inlined", "replicatedGraphCount": 4, "decomposeGradSum": True}.items():
        options._Popart.set(key, value)
    ir = popxl.Ir()
    options._Popart.apply(ir.options)
    assert (ir.options.calledGraphs, ir.options.replicatedGraphCount) == ("inlined", 1)
    assert ir.options.decomposeGradSum
    options._Popart.set("placement", "somewhere")
    with pytest.raises(Error, match="Session option 'placement' is 'somewhere': Input should be 'auto', 'several'"):
        options._Popart.apply(ir.options)


@pytest.mark.parametrize(
    ("change", "level"),
    [
        (lambda o: o, "highest"),
        (lambda o: o.Precision.setPartialsType(torch.half), "default"),
        (lambda o: o._Popart.set("partialsTypeMatMuls", "half"), "default"),
        (lambda o: o._Popart.set("precision", "high"), "high"),
    ],
)
def test_half_partials_allow_fewer_digits(change: Callable[[Options], object], level: str) -> None:
    options = Options()
    change(options)
    model = poptorch.inferenceModel(torch.nn.Linear(3, 2), options)
    model.compile(torch.ones(4, 3))
    assert poptorch.sessionOf(model).ir.options.precision == level


# Files


def write(tmp_path: Path, text: str, name: str = "poptorch.conf") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file(tmp_path: Path) -> None:
    text = """
# General
deviceIterations(4)   # a comment
   outputMode(poptorch.OutputMode.EveryN, output_return_period=2)

Training.gradientAccumulation(8).setAutomaticLossScaling(True)
TensorLocations.setActivationLocation(poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(5))
setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("A", "B").ipu(1), ["C"], poptorch.Stage("D")))
Precision.setPartialsType(torch.half)
setAvailableMemoryProportion({"IPU0": 0.25})
sourceLocationExcludes(["a#b", "c"])
anchorTensor("x", "y")
_Popart.set("decomposeGradSum", True)
randomSeed(-3)
"""
    options = Options()
    training = options.Training
    assert options.loadFromFile(write(tmp_path, text)) is options
    expected = Options().deviceIterations(4).outputMode(OutputMode.EveryN, 2)
    expected.Training.gradientAccumulation(8).setAutomaticLossScaling(True)
    expected.TensorLocations.setActivationLocation(
        TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(5)
    )
    stages = strategies.Stage("A", "B").ipu(1), ["C"], strategies.Stage("D")
    expected.setExecutionStrategy(strategies.PipelinedExecution(*stages))
    expected.Precision.setPartialsType(torch.half)
    expected.setAvailableMemoryProportion({"IPU0": 0.25}).sourceLocationExcludes(["a#b", "c"]).randomSeed(-3)
    expected.anchorTensor("x", "y")
    expected._Popart.set("decomposeGradSum", True)
    assert repr(options) == repr(expected)
    assert options.Training is training and training.gradient_accumulation == 8


def test_a_later_file_overrides(tmp_path: Path) -> None:
    options = Options().loadFromFile(write(tmp_path, "deviceIterations(4)\nreplicationFactor(2)"))
    options.loadFromFile(str(write(tmp_path, "deviceIterations(5)", "second.conf")))
    assert (options.device_iterations, options.replication_factor) == (5, 2)


WRONG_LINES = [
    ("deviceIterations(", "SyntaxError", "never closed"),
    ("deviceIterations", "SyntaxError", "expected a call of a method"),
    ("device_iterations = 3", "SyntaxError", ""),
    ("deviceIterations(1); replicationFactor(2)", "SyntaxError", ""),
    ("options.deviceIterations(1)", "AttributeError", "no attribute 'options'"),
    ("noSuchOption(1)", "AttributeError", "noSuchOption"),
    ("outputMode(poptorch.OutputMode.Most)", "AttributeError", "Most"),
    ("outputMode(OutputMode.All)", "NameError", "name 'OutputMode' is not defined"),
    ("deviceIterations(0)", "AssertionError", "expected a positive integer"),
    ("deviceIterations()", "TypeError", "missing 1 required"),
    ("deviceIterations(2 * 3)", "SyntaxError", "`2 * 3` is not possible here"),
    ("deviceIterations(*[3])", "SyntaxError", "`*[3]` is not possible here"),
    ("deviceIterations(**{'device_iterations': 3})", "SyntaxError", "`**` is not possible here"),
    ("setAvailableMemoryProportion({**{}})", "SyntaxError", "`**` is not possible here"),
    ("logDir(__import__('os').getcwd())", "SyntaxError", "`__import__('os')` is not possible here"),
    ("logDir(open('x'))", "SyntaxError", "`open('x')` is not possible here"),
    ("logDir((lambda: 'x')())", "SyntaxError", "is not possible here"),
    ("logDir('{}'.format(3))", "SyntaxError", "is not possible here"),
    ("clone.__globals__.get('os')", "AttributeError", "'__globals__' is private"),
    ("_set(device_iterations=3)", "AttributeError", "'_set' is private"),
    ("logDir(poptorch.Options)", "AttributeError", "Options"),
]


@pytest.mark.parametrize("line, kind, message", WRONG_LINES)
def test_wrong_lines(tmp_path: Path, line: str, kind: str, message: str) -> None:
    path = write(tmp_path, f"# first\ndeviceIterations(9)\n{line}\nreplicationFactor(2)\n")
    options = Options()
    with pytest.raises(ConfigFileError) as raised:
        options.loadFromFile(path)
    text = str(raised.value)
    assert text.startswith(f"{kind} at line 3 of {path}: ") and text.endswith(f"> {line}") and message in text
    assert "line 1" not in text
    assert repr(options) == repr(Options()), "no line counts if one is wrong"


def test_files_and_json_do_not_change_frozen_options(tmp_path: Path) -> None:
    options = Options()
    options.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        options.loadFromFile(write(tmp_path, "deviceIterations(4)"))
    with pytest.raises(AttributeError, match="frozen"):
        options.from_json("{}")


# JSON


def test_json() -> None:
    options = Options()
    text = """{"deviceIterations": 4, "outputMode": ["OutputMode.EveryN", 2], "Training.gradientAccumulation": 3,
        "connectionType": "poptorch.ConnectionType.OnDemand", "setAvailableMemoryProportion": {"IPU0": 0.5},
        "logDir": "a.b", "disableModuleNamescope": [], "enableExecutableCaching": null,
        "sourceLocationExcludes": [["x.y"]], "Precision.setPartialsType": "torch.half"}"""
    assert options.from_json(text) is options
    expected = Options().deviceIterations(4).outputMode(OutputMode.EveryN, 2).logDir("a.b").disableModuleNamescope()
    expected.connectionType(ConnectionType.OnDemand).setAvailableMemoryProportion({"IPU0": 0.5})
    expected.sourceLocationExcludes(["x.y"]).Training.gradientAccumulation(3)
    expected.Precision.setPartialsType(torch.half)
    assert repr(options) == repr(expected)


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("{", ValueError, "Options.from_json: Expecting property name"),
        ("[1]", ValueError, "expected a JSON object"),
        ('{"replicationFactor": 2, "noSuch": 1}', AttributeError, "noSuch"),
        ('{"replicationFactor": 2, "device_iterations": 1}', AttributeError, "is no method"),
        ('{"Training._set": 1}', AttributeError, "'Training._set' is private"),
        ('{"outputMode": "OutputMode.Most"}', AttributeError, "there is no 'Most'; expected Final or EveryN or All or"),
        ('{"Training.gradAccumulation": 1}', AttributeError, "there is no 'gradAccumulation'; expected gradientAcc"),
        ('{"replicationFactor": 2, "deviceIterations": 0}', AssertionError, "expected a positive integer"),
    ],
)
def test_wrong_json(text: str, error: type[Exception], message: str) -> None:
    options = Options()
    with pytest.raises(error) as raised:
        options.from_json(text)
    assert message in str(raised.value)
    assert repr(options) == repr(Options())


# The environment


def test_default_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 6}')
    assert Options().device_iterations == 6
    assert Options().deviceIterations(2).clone().device_iterations == 2
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 0}')
    with pytest.raises(AssertionError) as raised:
        Options()
    assert raised.value.__notes__ == ["This is what the environment variable POPTORCH_DEFAULT_OPTIONS says."]


def test_cache_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().executable_cache is None
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cache")
    assert Options().executable_cache == "cache"
    assert Options().enableExecutableCaching(None).executable_cache is None


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False), ("", False), ("true", True), ("False", False)])
@pytest.mark.parametrize("variable", ["POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"])
def test_the_model_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: bool
) -> None:
    monkeypatch.setenv(variable, value)
    assert Options().ipu_model is expected
    assert Options().useIpuModel(False).ipu_model is False


def test_processes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    distributed.disable()
    assert (distributed.processId, distributed.numProcesses) == (0, 1)
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    distributed.setEnvVarNames("SIZE", "RANK")
    assert (distributed.processId, distributed.numProcesses) == (1, 2)
    distributed.setEnvVarNames("NOT_SET", "NOT_SET_EITHER")
    assert (distributed.processId, distributed.numProcesses) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "four")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE is 'four'; expected an integer"):
        Options()


def test_profiling_from_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert Options().profile_dir is None
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true"}')
    assert Options().profile_dir == "."
    assert Options().enableProfiling("mine").profile_dir == "mine"
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true", "autoReport.directory": "theirs"}')
    assert Options().profile_dir == "theirs" and not caplog.text
    assert Options().enableProfiling("mine").profile_dir == "theirs"
    assert "reports are written to 'theirs' rather than 'mine'" in caplog.text
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "yes")
    with pytest.raises(ValueError, match="POPLAR_ENGINE_OPTIONS is 'yes'; expected a JSON object"):
        Options()
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS")
    monkeypatch.setenv("PVTI_OPTIONS", '{"enable": "true", "directory": "traces"}')
    assert Options().profile_dir == "traces"


def test_a_subclass_may_refuse_a_setter() -> None:
    class Managed(Options):
        def replicationFactor(self, replication_factor: int) -> Managed:
            raise RuntimeError("The number of replicas is given by the launcher.")

    managed = Managed()._set(replication_factor=4)
    with pytest.raises(RuntimeError, match="given by the launcher"):
        managed.replicationFactor(2)
    assert managed.deviceIterations(2).clone().replication_factor == 4
    assert isinstance(managed, Options) and repr(managed).startswith("Managed(")


def test_multi_conv_is_made_of_settings() -> None:
    assert {each.effect for each in MultiConv._declared().values() if isinstance(each, Setting)} == {NO_EFFECT}


def test_options_say_nothing_when_made(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        Options().clone().freeze()
    assert not caplog.text
