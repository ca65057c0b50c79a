"""The optimisers as objects of the host: arguments, attributes, dictionaries of state, copies; LAMB's steps."""

import copy
import inspect
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from poptorch import optim  # noqa: E402

ALL = [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB]
HALF = torch.float16


@pytest.fixture
def w() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_defaults_are_torchs(kind: Any, w: torch.nn.Parameter) -> None:
    optimizer = kind([w], lr=0.1)
    assert isinstance(optimizer, optim.Optimizer) and isinstance(optimizer, torch.optim.Optimizer)
    (group,) = optimizer.param_groups
    assert group["params"] == [w] and group["lr"] == 0.1 and optimizer.loss_scaling == 1
    if kind is not optim.LAMB:
        theirs = getattr(torch.optim, kind.__name__)([w], lr=0.1)
        assert {name: group[name] for name in theirs.param_groups[0]} == theirs.param_groups[0]
    assert optimizer.accum_type == torch.float32


def test_defaults_that_torch_does_not_have(w: torch.nn.Parameter) -> None:
    sgd, adamw, rmsprop, lamb = optim.SGD([w], 0.1), optim.AdamW([w]), optim.RMSprop([w]), optim.LAMB([w])
    assert (sgd.use_combined_accum, sgd.max_grad_norm, sgd.param_groups[0]["velocity_scaling"]) == (False, math.inf, 1)
    assert (adamw.bias_correction, adamw.param_groups[0]["weight_decay"], adamw.max_grad_norm) == (True, 0.01, math.inf)
    assert not rmsprop.use_tf_variant
    numbers = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "max_weight_norm": 65500.0}
    assert lamb.param_groups[0] == {"params": [w], **numbers} and lamb.bias_correction


def test_arguments(w: torch.nn.Parameter) -> None:
    v = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [w], "velocity_scaling": 2.0}, {"params": [v], "momentum": 0.5}]
    sgd = optim.SGD(groups, 0.1, 0.9, 0.0, 0.01, True, use_combined_accum=True, velocity_scaling=4.0, accum_type=HALF)
    assert [g["velocity_scaling"] for g in sgd.param_groups] == [2, 4]
    assert [g["momentum"] for g in sgd.param_groups] == [0.9, 0.5]
    assert [g["nesterov"] for g in sgd.param_groups] == [True, True]
    assert sgd.accum_type == HALF
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert sgd.param_groups[2]["velocity_scaling"] == 4
    adam = optim.Adam([w], betas=(0.5, 0.6), max_grad_norm=2.0, first_order_momentum_accum_type=HALF)
    assert (adam.param_groups[0]["betas"], adam.max_grad_norm) == ((0.5, 0.6), 2)
    assert (adam.first_order_momentum_accum_type, adam.second_order_momentum_accum_type) == (HALF, torch.float32)


def test_what_is_refused(w: torch.nn.Parameter) -> None:
    for norm in (math.nan, -1.0, "x"):
        with pytest.raises(ValueError, match="`max_grad_norm` is .*; expected 0 or more, or infinity for no limit"):
            optim.SGD([w], lr=0.1, max_grad_norm=norm)
    with pytest.raises(ValueError, match="SGD: `loss_scaling` is 'x'; expected a positive number"):
        optim.SGD([w], lr=0.1, loss_scaling="x")
    for wrong in (dict(lr=-1), dict(eps="x"), dict(weight_decay=-0.1), dict(betas=(1.0, 0.9)), dict(betas=0.9)):
        with pytest.raises(ValueError, match=f"LAMB: `{next(iter(wrong))}` is .*; expected"):
            optim.LAMB([w], **wrong)
    with pytest.raises(ValueError, match="LAMB: `max_weight_norm` is -1.0; expected 0 or more"):
        optim.LAMB([w], max_weight_norm=-1.0)
    for number in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"`loss_scaling` is {number}; expected a positive number"):
            optim.AdamW([w], loss_scaling=number)
    for kind in ALL:
        with pytest.raises(
            AssertionError, match=f"{kind.__name__}: `accum_type` is torch.int32; expected torch.float32"
        ):
            kind([w], lr=0.1, accum_type=torch.int32)
    with pytest.raises(AssertionError, match="`second_order_momentum_accum_type` is torch.bfloat16"):
        optim.LAMB([w], second_order_momentum_accum_type=torch.bfloat16)
    with pytest.raises(ValueError, match="Invalid momentum"):  # torch's own
        optim.SGD([w], lr=0.1, momentum=-1.0)


def test_what_is_told(w: torch.nn.Parameter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "poptorch::python")
    optim.SGD([w], lr=0.1, velocity_scaling=2.0, use_combined_accum=True)
    optim.SGD([w], lr=0.1, velocity_scaling=1.0)  # as a saved one says
    optim.LAMB([w], bias_correction=False)
    assert not caplog.records
    optim.SGD([w], lr=0.1, velocity_scaling=2.0)
    optim.AdamW([w], bias_correction=False)
    optim.Adam([w], maximize=True, amsgrad=True)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "SGD: velocity_scaling has no effect without use_combined_accum=True."
    assert second == "AdamW: bias_correction=False has no effect; the moments are always corrected."


# Variable attributes ------------------------------------------------------------------------------------------------


def test_given_arguments_are_variable(w: torch.nn.Parameter) -> None:
    attrs = optim.SGD([w], lr=0.1, momentum=0.0, weight_decay=None, use_combined_accum=False).variable_attrs
    assert [attrs.isConstant(n) for n in ("lr", "momentum", "weight_decay", "loss_scaling")] == [
        False,
        False,
        True,
        True,
    ]
    assert optim.Adam([w]).variable_attrs.isConstant("lr")
    attrs.markAsVariable("loss_scaling")
    attrs.markAsConstant("lr")
    assert (attrs.isConstant("loss_scaling"), attrs.isConstant("lr")) == (False, True)


@pytest.mark.parametrize("method", ["isConstant", "markAsConstant", "markAsVariable"])
def test_unknown_attributes(w: torch.nn.Parameter, method: str) -> None:
    for name in ("learning_rate", "accum_type", "use_combined_accum", "params", "foreach"):
        with pytest.raises(AssertionError, match=f"no attribute '{name}' that can be variable.*'lr', 'momentum'"):
            getattr(optim.SGD([w], lr=0.1).variable_attrs, method)(name)


def test_variable_attributes_by_themselves() -> None:
    attrs = optim.VariableAttributes(["a"], ["a", "b"])
    assert (attrs.isConstant("a"), attrs.isConstant("b")) == (False, True)
    with pytest.raises(AssertionError, match="no attribute 'c'"):
        optim.VariableAttributes(["c"], ["a"])


# State on a device --------------------------------------------------------------------------------------------------


class Device:
    """What an executor is to an optimiser."""

    def __init__(self) -> None:
        self.reads = 0

    def fetch(self) -> dict[str, Any]:
        self.reads += 1
        number = torch.tensor(float(self.reads))
        return {"ipu_state": {"Accl1___w": number}, "ipu_param": {"lossScaling_FLOAT": torch.tensor(1.0)}}


def test_before_there_is_a_program(w: torch.nn.Parameter) -> None:
    optimizer = optim.Adam([w], lr=0.1)
    found = optimizer.state_dict()
    assert (found["ipu_state"], found["ipu_param"]) == (None, None)
    assert found["param_groups"][0]["lr"] == 0.1 and found["state"] == {}
    assert not optimizer.has_state()
    optimizer.load_state_dict(found)
    assert not optimizer.device.pending


def test_the_device_is_read_once_after_each_run(w: torch.nn.Parameter) -> None:
    optimizer, device = optim.Adam([w]), Device()
    optimizer.device.connect(device.fetch)
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"] == 1
    assert optimizer.state_dict()["ipu_state"] is optimizer.state_dict()["ipu_state"]
    assert optimizer.has_state() and device.reads == 1
    optimizer.device.mark_stale()
    assert optimizer.get_state_dict()["ipu_state"]["Accl1___w"] == 1 and device.reads == 1
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"] == 2
    optimizer.device.mark_stale()
    optimizer.device.disconnect()
    optimizer.device.mark_stale()
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"] == 3 and device.reads == 3


def test_a_dictionary_is_taken_over_before_the_next_run(w: torch.nn.Parameter) -> None:
    optimizer, device = optim.SGD([w], lr=0.1, momentum=0.9), Device()
    optimizer.device.connect(device.fetch)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(saved | {"ipu_state": {"Accl1___w": torch.tensor(7.0)}})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.device.pending and optimizer.state_dict()["ipu_state"]["Accl1___w"] == 7 and device.reads == 1
    optimizer.device.mark_written()
    assert not optimizer.device.pending and optimizer.state_dict()["ipu_state"]["Accl1___w"] == 2
    optimizer.set_state_dict({"ipu_state": {}, "ipu_param": {}})
    assert not optimizer.device.pending and optimizer.get_state_dict() == {"ipu_state": {}, "ipu_param": {}}
    optimizer.load_state_dict({"ipu_state": {"Accl1___w": torch.tensor(8.0)}, "ipu_param": None})
    assert optimizer.device.pending


def test_dictionaries_that_are_refused(w: torch.nn.Parameter) -> None:
    optimizer = optim.Adam([w])
    for state in ({}, torch.optim.Adam([w]).state_dict(), {"ipu_state": {}}):
        with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded onto the IPU."):
            optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="different number of parameter groups"):  # torch's own; nothing is taken over
        optimizer.load_state_dict({"ipu_state": {"x": w}, "ipu_param": {}, "state": {}, "param_groups": []})
    assert not optimizer.device.pending and optimizer.get_state_dict()["ipu_state"] is None


@pytest.mark.parametrize("kind", ALL)
def test_copies_keep_attributes_and_state(kind: Any, w: torch.nn.Parameter, tmp_path: Path) -> None:
    optimizer, device = kind([w], lr=0.1, loss_scaling=4.0, accum_type=HALF), Device()
    optimizer.variable_attrs.markAsConstant("lr")
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # has put a function of its own in place of `step`
    optimizer.device.connect(device.fetch)
    torch.save(optimizer, tmp_path / "optimizer")
    loaded = torch.load(tmp_path / "optimizer", weights_only=False)
    for copied in (copy.copy(optimizer), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded):
        assert type(copied) is kind and (copied.loss_scaling, copied.accum_type) == (4.0, HALF)
        assert copied.variable_attrs.isConstant("lr") and not copied.variable_attrs.isConstant("loss_scaling")
        assert copied.device.pending and copied.state_dict()["ipu_state"]["Accl1___w"] == 1
        copied.step()
    assert device.reads == 1 and not optimizer.device.pending


# On the CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL[:-1])
def test_on_the_cpu_they_are_torchs(kind: Any) -> None:
    results = []
    for base in (kind, getattr(torch.optim, kind.__name__)):
        w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = base([w], lr=0.1, weight_decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (w**3).sum().backward()
            optimizer.step()
        results.append(w.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (dict(), [0.839521, 2.155713, 0.612791, 2.109748]),
        (dict(bias_correction=False), [0.841137, 2.157361, 0.613401, 2.115486]),
        (dict(max_weight_norm=1), [0.928231, 2.069637, 0.830201, 2.049889]),
    ],
)
def test_lamb_on_the_cpu(numbers: dict[str, Any], expected: list[float], w: torch.nn.Parameter) -> None:
    optimizer = optim.LAMB([w, torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.01, **numbers)
    found = []
    for g in ([0.5, -0.25], [0.1, 0.3]):

        def closure(g: list[float] = g) -> float:
            assert torch.is_grad_enabled()
            w.grad = torch.tensor(g)
            return 5.0

        assert optimizer.step(closure) == 5
        found += w.tolist()
    assert found == pytest.approx(expected, abs=2e-6)


def test_lamb_without_a_step_to_take() -> None:
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = optim.LAMB([w], lr=0.1)
    w.grad = torch.zeros(2)
    assert optimizer.step() is None
    assert w.tolist() == [0, 0]


def test_signatures() -> None:
    """As programs give them by position."""
    assert (
        list(inspect.signature(optim.SGD).parameters)[:6]
        == "params lr momentum dampening weight_decay nesterov".split()
    )
    assert list(inspect.signature(optim.Adam).parameters)[6:8] == ["foreach", "maximize"]
    assert list(inspect.signature(optim.AdamW).parameters)[6:8] == ["maximize", "foreach"]
