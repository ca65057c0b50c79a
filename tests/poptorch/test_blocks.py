"""Annotations: where each operation of a capture is said to be, what programs may be placed so, and plain runs."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch
from poptorch.enums import AutoStage, MultiConvPlanType, OutputMode
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.placement import blocks
from poptorch.placement.blocks import (
    Attribute,
    BeginBlock,
    Block,
    BlockFunction,
    MultiConv,
    NameScope,
    module_repr,
    removeBlocks,
)
from poptorch.placement.capture_context import CaptureContext, OpPlacement, capturing, current, isRunningOnIpu
from poptorch.placement.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch.program.placement_checks import check_overlapped_io, check_placement

AUTO = PipelinedExecution(AutoStage.AutoIncrement)


class Probe(torch.nn.Module):
    """A layer that notes where it runs."""

    def __init__(self, seen: list[OpPlacement] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.seen: list[OpPlacement] = [] if seen is None else seen

    def forward(self, x: Any = None) -> Any:
        self.seen.append(here().placement())
        return x


def here() -> CaptureContext:
    ambient = current()
    assert ambient is not None
    return ambient


def site() -> OpPlacement:
    return here().placement()


# What is captured


def test_before_any_block() -> None:
    with capturing(PipelinedExecution()):
        assert site() == OpPlacement(block=None, unit=0, stage=0, phase=None)
    with capturing(SerialPhasedExecution(["A"])):
        assert site() == OpPlacement(phase=0)


def test_blocks() -> None:
    with capturing(PipelinedExecution()):
        with Block("A", ipu_id=2):
            assert site() == OpPlacement("A", 2, 2)
            with Block(ipu_id=1):
                assert site() == OpPlacement("0", 1, 1)
            assert site() == OpPlacement("A", 2, 2), "an inner block ends"
        with pytest.raises(Error, match="No active Block"):
            site()
        with Block("A"):
            assert site() == OpPlacement("A", 2, 2), "blocks with one id are one block"
        Block.start("B", 3)
        assert site() == OpPlacement("B", 3, 3), "holds until the next"
        with Block(ipu_id=0):
            assert site() == OpPlacement("1", 0, 0)
        Block.useAutoId()
        Block.start(ipu_id=4)
        assert site() == OpPlacement("0", 1, 1), "the block that had this id"


def test_one_block_on_two_units(caplog: pytest.LogCaptureFixture) -> None:
    with capturing(PipelinedExecution()):
        Block.start("A", 1)
        Block.start("A", 1)
        assert not caplog.text
        Block.start("A", 2)
        assert site().unit == 1 and "Block 'A' asks for unit 2 and stays on unit 1" in caplog.text


def test_automatic_stages() -> None:
    with capturing(AUTO):
        for block, unit, expected in [("A", None, (1, 1)), ("B", 0, (0, 2)), ("A", None, (1, 1)), (None, None, (3, 3))]:
            with Block(block, unit):
                assert (site().unit, site().stage) == expected


def test_listed_stages() -> None:
    with capturing(PipelinedExecution(Stage("A", "B").ipu(4), "C")):
        with Block("B", ipu_id=1):
            assert site() == OpPlacement("B", 4, 0)
        with Block("C"):
            assert site() == OpPlacement("C", 1, 1)
        with pytest.raises(AssertionError, match="Unknown Block 'D'"), Block("D"):
            pass
    with capturing(ParallelPhasedExecution(["A"], [Stage("B"), Stage("C")])), Block("C"):
        assert site() == OpPlacement("C", 3, 1, 1)


def test_a_block_without_a_unit() -> None:
    with capturing(PipelinedExecution()), pytest.raises(AssertionError, match="Block '0' has no `ipu_id`"):
        Block.start()


def test_blocks_of_modules() -> None:
    seen: list[OpPlacement] = []
    model = torch.nn.Sequential(*(Probe(seen) for _ in range(4)))
    assert BeginBlock(model[1], ipu_id=1) is model[1]
    BeginBlock(model[3], "last", ipu_id=0)
    with capturing(PipelinedExecution()):
        model(None)
    assert seen == [OpPlacement(), OpPlacement("0", 1, 1), OpPlacement("0", 1, 1), OpPlacement("last", 0, 0)]


def test_the_hook_stays_with_the_module() -> None:
    module = BeginBlock(torch.nn.Linear(2, 3), "A", ipu_id=1)
    assert list(module.state_dict()) == ["weight", "bias"]
    for made in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with capturing(PipelinedExecution()):
            made(torch.ones(1, 2))
            assert site() == OpPlacement("A", 1, 1)
        with pytest.raises(Error, match="module has already been assigned to a block"):
            BeginBlock(made)
    module.load_state_dict(torch.nn.Linear(2, 3).state_dict())


def test_begin_block_takes_its_turn_among_hooks() -> None:
    seen: list[OpPlacement] = []
    module = torch.nn.ReLU()
    module.register_forward_pre_hook(lambda *_: seen.append(site()))
    BeginBlock(module, "A", ipu_id=1)
    module.register_forward_pre_hook(lambda *_: seen.append(site()))
    with capturing(PipelinedExecution()):
        module(torch.ones(2))
    assert [each.block for each in seen] == [None, "A"]


def test_remove_blocks() -> None:
    model = BeginBlock(torch.nn.Sequential(BeginBlock(torch.nn.ReLU(), ipu_id=1), torch.nn.ReLU()), ipu_id=2)
    kept = model[0].register_forward_pre_hook(lambda *_: None)
    removeBlocks(model)
    assert list(model[0]._forward_pre_hooks) == [kept.id] and not model._forward_pre_hooks
    with capturing(PipelinedExecution()):
        model(torch.ones(2))
        assert site() == OpPlacement()
    BeginBlock(model, ipu_id=3)


def test_functions() -> None:
    begun = BeginBlock(lambda: site(), "A", ipu_id=1)

    @BlockFunction("B", ipu_id=2)
    def decorated(x: int, y: int = 0) -> tuple[OpPlacement, int]:
        return site(), x + y

    with capturing(PipelinedExecution()):
        assert begun() == OpPlacement("A", 1, 1) == site()
        assert decorated(1, y=2) == (OpPlacement("B", 2, 2), 3)
        with pytest.raises(Error, match="No active Block"):
            site()
    assert decorated.__name__ == "decorated"


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: BeginBlock(3), Error, "`layer_to_call` is 3; expected a module or a function"),
        (lambda: Block(1.0), AssertionError, "Block: `user_id` is 1.0; expected a string, a number or None"),
        (lambda: Block("A", "1"), AssertionError, "Block: `ipu_id` is '1'; expected the number of a unit"),
        (lambda: Block.start("A", -1), AssertionError, "Block.start: `ipu_id` is -1"),
        (lambda: BlockFunction(True), AssertionError, "BlockFunction: `user_id` is True"),
        (lambda: BeginBlock(torch.nn.ReLU(), []), AssertionError, "BeginBlock: `user_id` is []"),
        (lambda: NameScope(1), AssertionError, "NameScope: `name` is 1; expected a string"),
        (lambda: Attribute(a="b"), ValueError, "Attribute: `a` is 'b'; expected a dictionary"),
        (lambda: Attribute(a={"b": []}), ValueError, "Attribute: `a` is {'b': []}"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)


def test_name_scopes_and_attributes() -> None:
    with capturing(PipelinedExecution()) as ambient:
        with NameScope("encoder"), ambient.named("layer.0"), Attribute(outline={"b": "x", "a": 1}, other={}):
            with Attribute(inner={"c": True}):
                found = site()
            assert site().attributes == (("outline", (("a", 1), ("b", "x"))), ("other", ()))
        assert found.scope == "encoder/layer.0" and found.attributes[-1] == ("inner", (("c", True),))
        assert hash(found) != hash(site()) and site() == OpPlacement()


def test_name_scopes_are_prefixes_of_names() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with NameScope("encoder"), NameScope("first"):
                x = torch.sin(self.fc(x))
            return torch.cos(x)

    for options, linear in (
        (poptorch.Options(), "encoder/first/fc/linear_out"),
        (poptorch.Options().disableModuleNamescope(), "encoder/first/linear_out"),
    ):
        model = poptorch.inferenceModel(Model(), options.anchorTensor("inner", linear))
        model(torch.ones(1, 2))
        assert {linear, "encoder/first/sin_out", "cos_out"} <= set(model.getTensorNames())
        assert model.getAnchoredTensor("inner").shape == (1, 2)


def test_multi_conv() -> None:
    with capturing(PipelinedExecution()) as ambient:
        for number in range(2):
            with MultiConv():
                assert site().multi_conv == number
                ambient.count_convolution()
            assert site().multi_conv is None
        ambient.count_convolution()
        with pytest.raises(Error, match="Unexpected end_multi_conv: there was no convolution"), MultiConv():
            pass
        with pytest.raises(Error, match="Nested poptorch.MultiConv is not supported"):
            with MultiConv():
                with MultiConv():
                    pass
        with pytest.raises(KeyError), MultiConv():
            raise KeyError
        assert site().multi_conv is None


@pytest.mark.parametrize(
    "method, good, bad, error",
    [
        ("availableMemoryProportions", [0.5, [0.1, 0.2], (0.0,), 0], [1.0, -0.1, "0.5", [0.5, 2]], AssertionError),
        ("cycleBackOff", [0, 0.5, 1.0], [-1, 1.5, "1", None], AssertionError),
        ("enableConvDithering", [True, [True, False], (False,)], [1, "yes", [0]], AssertionError),
        (
            "partialsTypes",
            [torch.half, [torch.float, torch.half]],
            [torch.int32, "half", [torch.float64]],
            AssertionError,
        ),
        ("perConvReservedTiles", [0, 50], [-1, 1.5, "5"], AssertionError),
        ("planType", list(MultiConvPlanType), [0, "Serial"], AssertionError),
    ],
)
def test_multi_conv_settings(method: str, good: list[Any], bad: list[Any], error: type[Exception]) -> None:
    for value in good:
        scope = MultiConv()
        assert getattr(scope, method)(value) is scope and repr(scope) != repr(MultiConv())
    for value in bad:
        with pytest.raises(error, match=f"MultiConv.{method}: .*; expected"):
            getattr(MultiConv(), method)(value)


# Captures


def test_captures_end() -> None:
    assert current() is None and not isRunningOnIpu()
    block = Block("A", ipu_id=1)
    with pytest.raises(KeyError):
        with capturing(AUTO) as outer, block, NameScope("n"):
            assert isRunningOnIpu() and current() is outer
            with capturing(PipelinedExecution()) as inner:
                assert current() is inner and site() == OpPlacement()
            assert site().block == "A"
            raise KeyError
    assert current() is None
    with capturing(PipelinedExecution()):
        assert site() == OpPlacement()
        with block:
            assert site().block == "A", "the same annotation in the next capture"


def test_a_body_that_fails_leaves_its_scopes() -> None:
    with capturing(PipelinedExecution()) as ambient, Block("A", ipu_id=1):
        with pytest.raises(KeyError):
            with Block("B", ipu_id=2), NameScope("n"), Attribute(a={}), MultiConv(), ambient.named("m"):
                raise KeyError
        assert site() == OpPlacement("A", 1, 1)


def test_other_threads_capture_nothing() -> None:
    found: list[Any] = []
    with capturing(PipelinedExecution()):
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
    assert found == [None]


def test_plain_runs() -> None:
    layer = BeginBlock(torch.nn.Linear(2, 2), ipu_id=1)
    x = torch.ones(1, 2)
    Block.useAutoId()
    Block.start()
    with Block(), Block("B"), NameScope("n"), Attribute(a={"b": "c"}), MultiConv(), MultiConv():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_a_block_may_be_a_part_of_a_module() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block("A", ipu_id=1)
            self.probe = Probe()

        def forward(self) -> None:
            with self.block:
                self.probe()

    model = copy.deepcopy(Model())
    with capturing(PipelinedExecution()):
        model()
    assert model.probe.seen == [OpPlacement("A", 1, 1)] and list(model.state_dict()) == ["probe.weight"]


# Texts


def test_module_repr() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.Tanh()]))
    plain = repr(model)
    assert module_repr(model) == plain
    BeginBlock(model[0], "A", ipu_id=1)
    BeginBlock(model[1][1])
    expected = """Sequential(
  (0): BeginBlock(user_id=A, ipu_id=1) ReLU()
  (1): ModuleList(
    (0): Tanh()
    (1): BeginBlock(user_id=None, ipu_id=None) Tanh()
  )
)"""
    assert module_repr(model) == expected and repr(model) == plain
    out = io.StringIO()
    blocks.print("model:", model, 3, file=out, sep="\n", end="")
    assert out.getvalue() == f"model:\n{expected}\n3"


# What a program asks for


def sites(*units: int) -> list[OpPlacement]:
    return [OpPlacement(str(number), unit, unit) for number, unit in enumerate(units)]


@pytest.mark.parametrize(
    "units, training, inference",
    [((), 1, 1), ((0, 0), 1, 1), ((0, 1), 3, 2), ((0, 1, 1, 0), 5, 3), ((0, 1, 2, 3), 7, 4)],
)
def test_pipeline_stages(units: tuple[int, ...], training: int, inference: int) -> None:
    options = Options().deviceIterations(inference)
    options.Training.gradientAccumulation(training)
    for is_trained in (True, False):
        check_placement(sites(*units), options, is_trained)
    if inference > 1:
        options.deviceIterations(inference - 1).Training.gradientAccumulation(training - 1)
        with pytest.raises(Error, match="deviceIterations must be greater than or equal .*; it is") as raised:
            check_placement(sites(*units), options, training=False)
        assert raised.value.message.startswith("poptorch.Options().deviceIterations must be greater")
        assert f"({inference})" in raised.value.message
        with pytest.raises(Error, match="gradientAccumulation must be greater") as raised:
            check_placement(sites(*units), options, training=True)
        assert f"({training})" in raised.value.message
        assert (
            f"{inference} pipeline stages in PopTorch will have an additional {inference - 1} stages"
            in raised.value.message
        )
        options.setExecutionStrategy(ShardedExecution())
        check_placement(sites(*units), options, training=True)


def test_the_number_of_units() -> None:
    options = Options().setExecutionStrategy(ShardedExecution())
    with pytest.raises(Error, match="specifies the use of 3 IPUs, however PopTorch must reserve a minimum of 4"):
        check_placement(sites(0, 1, 2), options, training=True)
    check_placement(sites(0, 1, 2), options.clone().autoRoundNumIPUs(), training=True)
    check_placement(sites(0, 1), options.replicationFactor(32), training=True)
    with pytest.raises(Error, match=r"Too many IPUs requested \(128\).*there are 2 for each of 64 replicas"):
        check_placement(sites(0, 1), options.replicationFactor(64), training=True)
    with pytest.raises(Error, match=r"Too many IPUs requested \(128\).*there are 1 for each of 128 replicas"):
        check_placement([], options.replicationFactor(128), training=False)


def test_the_units_of_parallel_phases() -> None:
    strategy = ParallelPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C"), Stage("D")))
    good = [OpPlacement("A", 0, 0, 0), OpPlacement("B", 2, 1, 0), OpPlacement("C", 1, 0, 1), OpPlacement("D", 3, 1, 1)]
    check_placement(good, Options().setExecutionStrategy(strategy), training=True)
    with pytest.raises(Error, match="block 'C' of phase 1 is on unit 0; even phases must be on even units"):
        check_placement([*good, OpPlacement("C", 0, 0, 1)], Options().setExecutionStrategy(strategy), training=True)
    serial = SerialPhasedExecution(["A"], ["C"])
    check_placement([OpPlacement("C", 0, 0, 1)], Options().setExecutionStrategy(serial), training=True)


def test_overlapped_io() -> None:
    options = Options()
    with pytest.raises(Error, match="Overlapped IO needs ShardedExecution"):
        check_overlapped_io(options, OutputMode.All)
    options.setExecutionStrategy(ShardedExecution())
    with pytest.raises(Error, match="Overlapped IO needs IO tiles"):
        check_overlapped_io(options, OutputMode.All)
    options.TensorLocations.numIOTiles(32)
    for mode in (OutputMode.Final, OutputMode.EveryN):
        with pytest.raises(Error, match=f"needs the output mode All or Sum; it is {mode.name}"):
            check_overlapped_io(options, mode)
    for mode in (OutputMode.All, OutputMode.Sum):
        check_overlapped_io(options, mode)


@contextmanager
def program(options: Options) -> Iterator[list[OpPlacement]]:
    """A capture that ends with the checks of what it has met."""
    met: list[OpPlacement] = []
    with capturing(options.execution_strategy):
        yield met
    check_placement(met, options, training=True)


def test_an_example_of_the_guide() -> None:
    """Two stages on each of two groups of units, phases alternating between them."""
    n = 3
    phases = []
    for i in range(n):
        phases.append([Stage(f"phase{2 * i}_ipu0").ipu(0), Stage(f"phase{2 * i}_ipu1").ipu(2)])
        phases.append([Stage(f"phase{2 * i + 1}_ipu0").ipu(1), Stage(f"phase{2 * i + 1}_ipu1").ipu(3)])
    with program(Options().setExecutionStrategy(ParallelPhasedExecution(*phases))) as met:
        for phase in range(2 * n):
            for unit in range(2):
                with Block(f"phase{phase}_ipu{unit}"):
                    met.append(site())
    assert [(each.phase, each.stage, each.unit) for each in met[:4]] == [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3)]


# On several devices ---------------------------------------------------------------------------------------------------


class TwoBlocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)

    def forward(self, x: Any, labels: Any) -> Any:
        with blocks.Block("first", ipu_id=0):
            x = torch.relu(self.first(x))
        with blocks.Block("second", ipu_id=1):
            return torch.nn.functional.cross_entropy(self.second(x), labels)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("strategy", [ShardedExecution, PipelinedExecution])
def test_each_unit_is_a_device(strategy: Any) -> None:
    """If there are several and the session options say so; the numbers are those of one device."""
    found = []
    for placement in ("several", "one"):
        options = Options().setExecutionStrategy(strategy("first", "second")).useIpuModel(True)
        options.Training.gradientAccumulation(4)
        options._Popart.set("placement", placement)
        torch.manual_seed(0)
        model = TwoBlocks()
        training = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.1))
        losses = [training(torch.randn(8, 5), torch.arange(8) % 3) for _ in range(3)]
        assert training._executable.session.program.layout.ipus == ((0, 1) if placement == "several" else (0,))
        found.append([torch.stack(losses), *(p.detach().clone() for p in model.parameters())])
    for several, one in zip(*found, strict=True):
        torch.testing.assert_close(several, one)


@pytest.mark.parametrize("kind", ["NoRecompute", "Pipeline"])
@pytest.mark.parametrize("mode", [poptorch.OutputMode.All, poptorch.OutputMode.Sum])
def test_micro_batches_of_a_pipeline_overlap(kind: str, mode: poptorch.OutputMode) -> None:
    """The second micro-batch begins before the first one comes back; each stage has its sums. Numbers stay the same."""
    found = []
    for strategy, placement in ((PipelinedExecution, "several"), (ShardedExecution, "one")):
        options = Options().setExecutionStrategy(strategy("first", "second")).useIpuModel(True).outputMode(mode)
        options.Training.gradientAccumulation(3)
        options._Popart.set("placement", placement)
        options._Popart.set("autoRecomputation", kind)
        torch.manual_seed(0)
        model = TwoBlocks()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(model, options, optimizer)
        x, labels = torch.randn(6, 5), torch.arange(6) % 3
        losses = [training(x, labels) for _ in range(2)]
        found.append([torch.stack(losses), *(p.detach().clone() for p in model.parameters())])
        if placement == "several":
            session = poptorch.sessionOf(training)
            sums = {
                op.inputs[0].name: op.ipu for g in session.ir.graphs for op in g.ops if op.kind.name == "Accumulate"
            }
            assert {name: ipu for name, ipu in sums.items() if "weight" in name} == {
                "sum/first.weight": 0,
                "sum/second.weight": 1,
            }
            (loop,) = [step for step, _ in session.program.plan.steps.all_steps() if getattr(step, "overlapped", None)]
            assert [*loop.overlapped.order(3)] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    for several, one in zip(*found, strict=True):
        torch.testing.assert_close(several, one)
