"""Weights: when they come home, what stands in for classes, groups of replicas, and what `forward` must not do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import typing
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch.base.replica_groups import GroupedParameter, ParameterProxy, ReplicaGroups
from poptorch.capture.attributes import Attributes
from poptorch.capture.rebinding import not_rebound
from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import Error
from poptorch.run.weight_values import overwrite_tensors, read_host_values, tensors_of
from poptorch.run.weights import LazyWeights, TrainingRegistry


class Model(torch.nn.Module):
    """Tied parameters, a parameter and a buffer of its own, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.tensor([0, 0]))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale + self.steps.sum()


class Device:
    """A device whose values all are one number; it counts how often it is asked for them."""

    def __init__(self, module: torch.nn.Module | None, number: float = 7.0) -> None:
        self.number, self.fetched = number, 0
        self._shapes = {name: a.shape for name, a in read_host_values(module).items()}

    def fetch(self) -> dict[str, np.ndarray]:
        self.fetched += 1
        return {name: np.full(shape, self.number, np.float32) for name, shape in self._shapes.items()}


@pytest.fixture
def module() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def device(module: Model) -> Device:
    return Device(module)


@pytest.fixture
def training(module: Model, device: Device) -> LazyWeights:
    return LazyWeights(module, device.fetch)


# Values ---------------------------------------------------------------------------------------------------------------


def test_tensors_by_name(module):
    assert list(tensors_of(module)) == [
        *("scale", "first.weight", "first.bias", "second.bias", "norm.weight", "norm.bias"),
        *("steps", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    ]
    assert tensors_of(torch.nn.Module()) == {}


def test_read_gives_types_of_the_device(module):
    values = read_host_values(module)
    assert values["steps"].dtype == np.int32 and values["first.weight"].dtype == np.float32
    assert list(read_host_values(module, names=["steps"])) == ["steps"]
    np.testing.assert_array_equal(values["first.weight"], module.first.weight.detach().numpy())


def test_write_is_in_place(module):
    view, half = module.first.weight.detach()[1], module.half().norm.running_mean
    assert module.first.weight.dtype == torch.float16
    view = module.first.weight.detach()[1]
    overwrite_tensors(
        tensors_of(module), {"first.weight": np.full((3, 3), 5, np.float16), "steps": np.array([1, 2], np.int32)}, {}
    )
    assert view.tolist() == [5, 5, 5] and module.second.weight is module.first.weight
    assert module.steps.tolist() == [1, 2] and module.steps.dtype == torch.int64
    assert half.dtype == torch.float16 and module.first.weight.requires_grad


def test_write_takes_arrays_that_are_read_only(module):
    number = np.array(3.0, np.float32)
    number.flags.writeable = False
    overwrite_tensors(tensors_of(module), {"scale": number}, {})
    assert module.scale.item() == 3


def test_write_checks_everything_first(module):
    before = module.scale.item()
    with pytest.raises(Error, match=r"steps has the shape \[2\] on the host and \[1\] on the device"):
        overwrite_tensors(tensors_of(module), {"scale": np.array(9.0), "steps": np.zeros(1)}, {})
    with pytest.raises(Error, match="no parameters or buffers named a, b. It has scale, first.weight"):
        overwrite_tensors(tensors_of(module), {"scale": np.array(9.0), "a": np.zeros(1), "b": np.zeros(1)}, {})
    assert module.scale.item() == before
    with pytest.raises(Error, match="named a"):
        read_host_values(module, names=["a"])


def test_buffers_that_are_no_tensors(module):
    module._buffers["steps"] = 3
    with pytest.raises(Error, match="All buffers must be an instance of torch.Tensor; steps is 3"):
        LazyWeights(module, dict)
    assert type(module) is Model and type(module.scale) is torch.nn.Parameter


class Shared(torch.nn.Module):
    """Two tensors in one memory, of which what is trained is `w`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        whole = torch.arange(12.0).reshape(4, 3)
        self.w = torch.nn.Parameter(whole[2:] if how == "apart" else whole)
        if how == "view":
            self.v = torch.nn.Parameter(self.w.data[:2], requires_grad=False)
        elif how == "data":
            self.v = torch.nn.Parameter(torch.zeros(4, 3))
            self.v.data = self.w.data
        else:
            self.register_buffer("v", whole[:2])

    def forward(self) -> torch.Tensor:
        v = 0 if self.how == "unused" else self.v.sum()
        return poptorch.identity_loss(self.w.sum() + v, "none")


@pytest.mark.parametrize("how", ["view", "data", "buffer", "apart", "unused"])
def test_tensors_that_share_memory(how: str) -> None:
    module = Shared(how)
    before = module.w.detach().clone()
    model = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0))
    if how in ("apart", "unused"):
        model()
        assert torch.equal(module.w.detach(), before - 1)
        assert torch.equal(module.v, torch.arange(6.0).reshape(2, 3) - int(how == "unused"))
    else:
        with pytest.raises(Error, match="w and v share memory, and the model overwrites [vw].*`module.v = module.w`"):
            model()
        assert poptorch.inferenceModel(Shared(how))() == module()  # that overwrites nothing


# When they come home --------------------------------------------------------------------------------------------------

READS = {
    "state_dict": lambda m: m.state_dict(),
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: list(m.named_parameters()),
    "buffers": lambda m: list(m.buffers()),
    "named_buffers": lambda m: list(m.named_buffers()),
    "a parameter": lambda m: m.scale,
    "a buffer": lambda m: m.steps,
    "a module in it": lambda m: m.first,
    "forward": lambda m: m(torch.zeros(2, 3)),
    "a deep copy": copy.deepcopy,
    "a copy": copy.copy,
    "pickling": pickle.dumps,
    "saving": lambda m: torch.save(m, io.BytesIO()),
}
TENSOR_READS = {
    "shape": lambda t: t.shape,
    "data": lambda t: t.data,
    "numpy": lambda t: t.detach().numpy(),
    "an array": lambda t: np.asarray(t.detach()),
    "item": lambda t: t.flatten()[0].item(),
    "add": lambda t: t + 1,
    "add on the right": lambda t: 1 + t,
    "a function": lambda t: torch.sum(t),
    "a list of tensors": lambda t: torch.stack([torch.ones_like(t.detach()), t]),
    "iterating": list,
    "repr": repr,
    "a deep copy": copy.deepcopy,
    "pickling": pickle.dumps,
}


@pytest.mark.parametrize("how", READS)
def test_reading_a_stale_module_fetches_once(module, device, training, how):
    training.mark_stale()
    READS[how](module)
    assert (device.fetched, training.is_stale, training.host) == (1, False, 1)
    READS[how](module)
    assert device.fetched == 1
    assert all((t == 7).all() for t in tensors_of(module).values())


@pytest.mark.parametrize("how", TENSOR_READS)
@pytest.mark.parametrize("name", ["first.weight", "steps"])
def test_reading_a_stale_tensor_fetches_once(module, device, training, how, name):
    t = tensors_of(module)[name]
    device.fetched = 0
    training.mark_stale()
    TENSOR_READS[how](t)
    assert device.fetched == 1
    TENSOR_READS[how](t)
    assert device.fetched == 1 and t.flatten()[0] == 7


def test_an_op_on_two_tensors_in_either_order(module, device, training):
    bias, other = module.first.bias, torch.full((3,), 7.0)
    for args in ((bias, other), (other, bias), (bias, bias)):
        device.fetched = 0
        training.mark_stale()
        assert torch.equal(*args) and device.fetched == 1
        device.number += 1
        other += 1


def test_runs_without_reads_fetch_nothing(module, device, training):
    for _ in range(1000):
        training.mark_stale()
    assert device.fetched == 0
    assert module.scale.item() == 7 and module.scale.item() == 7
    assert device.fetched == 1


def test_what_is_not_stale_is_not_fetched(module, device, training):
    for read_it in READS.values():
        read_it(module)
    assert device.fetched == 0 and training.host == 0


def test_to_host_always_fetches(device, training):
    training.to_host()
    training.to_host()
    assert (device.fetched, training.host) == (2, 2)
    assert training.to_host_if_stale() is False
    training.mark_stale()
    assert training.to_host_if_stale() is True
    assert (device.fetched, training.is_stale) == (3, False)


def test_reading_for_the_device_fetches_nothing(module, device, training):
    training.mark_stale()
    assert training.read_values(["scale"])["scale"] == 2
    assert device.fetched == 0 and training.is_stale


def test_a_fetch_that_fails_leaves_the_host_stale(module, device, training):
    device._shapes["scale"] = (4,)
    training.mark_stale()
    with pytest.raises(Error, match="scale has the shape"):
        module.state_dict()
    assert training.is_stale and training.host == 0
    device._shapes["scale"] = ()
    assert module.scale == 7


def test_loading_into_a_stale_module_keeps_what_is_loaded(module, device, training):
    state = {name: torch.full_like(t, 3) for name, t in module.state_dict().items()}
    training.mark_stale()
    module.load_state_dict(state)
    assert device.fetched == 1 and module.scale == 3 and not training.is_stale


def test_a_host_optimiser_works_on_watched_parameters(module, device, training):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5, foreach=True)
    training.mark_stale()
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert device.fetched == 1
    torch.testing.assert_close(module.scale.detach(), torch.tensor(6.5))


# What stands in for classes -------------------------------------------------------------------------------------------


def test_classes_are_subclasses(module, training):
    assert type(module).__name__ == "PoptorchModel" and isinstance(module, Model)
    assert isinstance(module.scale, torch.nn.Parameter) and isinstance(module.steps, torch.Tensor)
    assert not isinstance(module.steps, torch.nn.Parameter)
    assert module.second.weight is module.first.weight
    assert "PoptorchModel(" in repr(module) and repr(module.scale).startswith("Parameter containing:\ntensor(2.")
    assert repr(module.steps) == "tensor([0, 0])"


class Hinted(torch.nn.Module):
    """Base class that evaluates the annotations of its subclasses, as that of `transformers` does."""

    def __init_subclass__(cls, **settings):
        super().__init_subclass__(**settings)
        typing.get_type_hints(cls)


class HintedLinear(Hinted):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x), "sum")


def test_classes_whose_annotations_are_evaluated():
    model, x = HintedLinear(), torch.ones(4, 3)
    expected = copy.deepcopy(model)(x)
    wrapped = poptorch.trainingModel(model)
    torch.testing.assert_close(wrapped(x), expected.detach())
    assert wrapped.isCompiled() and type(model).__name__ == "PoptorchHintedLinear"


def test_results_of_ops_are_plain_tensors(module, training):
    assert type(module.scale * 2) is torch.Tensor
    assert {type(t) for t in module.state_dict().values()} == {torch.Tensor}
    assert type(module.scale.data) is torch.Tensor


def test_copies_are_plain(module, training):
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is Model and type(copied.scale) is torch.nn.Parameter and copied.scale.requires_grad
        assert type(copied.steps) is torch.Tensor and copied.second.weight is copied.first.weight
        assert copied.scale is not module.scale and copied.scale == 2
    assert type(copy.copy(module)) is Model and copy.copy(module).scale is module.scale
    assert type(module).__name__ == "PoptorchModel"


def test_saving_needs_no_poptorch_to_load(module, training):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["scale"] == 2
    file = io.BytesIO()
    torch.save(module, file)
    assert b"poptorch.run.weights" not in file.getvalue()
    file.seek(0)
    assert torch.load(file, weights_only=False)(torch.zeros(2, 3)).shape == (2, 3)


def test_wrapping_twice(module, device, training):
    with pytest.raises(RuntimeError, match="Model is already wrapped for training.*destroy()"):
        LazyWeights(module, device.fetch)
    training.destroy()
    LazyWeights(module, device.fetch).destroy()


def test_destroy_gives_the_classes_back(module, device, training):
    training.mark_stale()
    training.destroy()
    assert type(module) is Model and type(module.scale) is torch.nn.Parameter and type(module.steps) is torch.Tensor
    assert module.scale == 2 and device.fetched == 0
    training.destroy()


@pytest.mark.usefixtures("only_new_objects")
def test_a_module_outlives_its_training(module):
    device = Device(module)
    LazyWeights(module, device.fetch)
    gc.collect()
    assert type(module) is Model and type(module.scale) is torch.nn.Parameter
    training = LazyWeights(module, device.fetch)
    alive = weakref.ref(device)
    del device
    gc.collect()
    assert alive() is None  # a bound method does not keep it
    training.destroy()


def test_a_model_without_weights():
    training = LazyWeights(torch.nn.Module(), dict)
    training.to_host()
    assert training.read_values() == {} and training.host == 1


def test_parts_are_trained_apart(module):
    first, second = Device(module.first, 3.0), Device(module.second, 5.0)
    trainings = LazyWeights(module.first, first.fetch), LazyWeights(module.second, second.fetch)
    trainings[0].mark_stale()
    assert (module.second.bias != 5).all() and (first.fetched, second.fetched) == (0, 0)
    assert module.first.bias.tolist() == [3] * 3 and (first.fetched, second.fetched) == (1, 0)
    trainings[1].mark_stale()
    assert module.first.weight[0, 0] == 5  # a tied parameter asks both
    trainings[0].destroy()
    trainings[1].mark_stale()
    assert module.first.bias[0] == 3 and second.fetched == 1
    assert module.second.weight[0, 0] == 5 and second.fetched == 2
    trainings[1].destroy()
    assert type(module.first.weight) is torch.nn.Parameter and type(module.second) is torch.nn.Linear


def test_watched_tensors_become_fake_tensors(module, training):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in tensors_of(module).items()}
        module.norm.eval()
        result = torch.func.functional_call(module, fakes, (torch.ones(2, 3),), tie_weights=True)
    assert result.shape == (2, 3) and result.requires_grad


# Trainings, as inference sees them ------------------------------------------------------------------------------------


def test_news_of_a_training(module, device, training):
    trainings = TrainingRegistry(module)
    assert not trainings.have_news()
    training.mark_stale()
    assert trainings.have_news() and device.fetched == 1
    assert not trainings.have_news()
    training.to_host()
    assert trainings.have_news()
    module.state_dict()
    assert not trainings.have_news()


def test_news_reach_every_wrapper(module, device, training):
    whole, part, other = (
        TrainingRegistry(module),
        TrainingRegistry(module.first),
        TrainingRegistry(torch.nn.Linear(2, 2)),
    )
    training.mark_stale()
    assert not other.have_news() and device.fetched == 0
    assert whole.have_news() and part.have_news() and device.fetched == 1
    training.destroy()
    assert not whole.have_news() and not TrainingRegistry(torch.nn.Module()).have_news()


# Groups of replicas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, size, replicas, assignment",
    [
        (CommGroupType.All, 3, 4, (0, 0, 0, 0)),
        (CommGroupType.NoGrouping, 3, 4, (0, 1, 2, 3)),
        (CommGroupType.Consecutive, 2, 6, (0, 0, 1, 1, 2, 2)),
        (CommGroupType.Consecutive, 6, 6, (0,) * 6),
        (CommGroupType.Orthogonal, 2, 8, (0, 1, 2, 3, 0, 1, 2, 3)),
        (CommGroupType.Orthogonal, 1, 3, (0, 1, 2)),
    ],
)
def test_groups_are_those_of_popxl(kind, size, replicas, assignment):
    import popxl

    groups = ReplicaGroups.from_type(kind, size, replicas)
    assert groups.assignment == assignment and groups.count == len(set(assignment))
    theirs = popxl.Ir(replication=replicas).replica_grouping(groups.stride, groups.size)
    assert tuple(theirs.assignment) == assignment


@pytest.mark.parametrize("size", [0, -2, 4, 12])
def test_groups_that_do_not_make_up_the_replicas(size):
    with pytest.raises(ValueError, match=f"Groups of {size} replicas do not make up 6"):
        ReplicaGroups.from_type(CommGroupType.Consecutive, size, 6)


@pytest.mark.parametrize("retrieval", VariableRetrievalMode)
@pytest.mark.parametrize(
    "kind, size", [(CommGroupType.Consecutive, 2), (CommGroupType.Orthogonal, 2), (CommGroupType.Consecutive, 4)]
)
def test_grouped_values_go_there_and_back(kind, size, retrieval):
    groups = ReplicaGroups.from_type(kind, size, 4)
    module = torch.nn.Linear(3, 4 // size, bias=False)
    groupings = {"weight": GroupedParameter(groups, retrieval)}
    host = module.weight.detach().numpy().copy()
    variable = read_host_values(module, groupings)["weight"].copy()
    assert variable.shape == ((groups.count, 3) if groups.count > 1 else (3,))
    overwrite_tensors(tensors_of(module), {"weight": variable * 2}, groupings)
    rows = 2 * host
    if retrieval == VariableRetrievalMode.AllReplicas:
        rows = rows[list(groups.assignment)]
    assert module.weight.tolist() == rows.tolist()
    np.testing.assert_array_equal(read_host_values(module, groupings)["weight"], 2 * variable)


def proxy_of(parameter, replicas=4):
    groupings = []
    return ParameterProxy(parameter, "weight", replicas, groupings.append), groupings


def test_replica_grouping_of_a_parameter():
    proxy, groupings = proxy_of(torch.nn.Parameter(torch.ones(2, 3)))
    proxy.replicaGrouping(CommGroupType.Orthogonal, 2, VariableRetrievalMode.OnePerGroup)
    proxy.replicaGrouping(CommGroupType.All, 3, VariableRetrievalMode.OnePerGroup)
    assert groupings == [GroupedParameter(ReplicaGroups(4, 2, 2), VariableRetrievalMode.OnePerGroup), None]


@pytest.mark.parametrize(
    "shape, kind, error, message",
    [
        ((), CommGroupType.Consecutive, Error, "weight is a scalar.*leading dimension of 2"),
        ((4, 3), CommGroupType.Consecutive, Error, r"weight has the shape \[4, 3\]; its first dimension should be 2"),
        ((2, 3), CommGroupType.NoGrouping, Error, "should be 4, the number of groups: 4 replicas in groups of 1"),
        ((2, 3), 9, ValueError, "9 is not a valid CommGroupType"),
    ],
)
def test_a_parameter_that_cannot_be_grouped(shape, kind, error, message):
    proxy, groupings = proxy_of(torch.nn.Parameter(torch.ones(shape)))
    with pytest.raises(error, match=message):
        proxy.replicaGrouping(kind, 2, VariableRetrievalMode.OnePerGroup)
    assert groupings == []


def test_a_proxy_does_what_its_parameter_does(module, training):
    for parameter in (torch.nn.Parameter(torch.ones(2, 3)), module.first.weight):
        proxy, _ = proxy_of(parameter)
        assert isinstance(proxy, torch.nn.Parameter) and proxy.shape == parameter.shape and len(proxy) == len(parameter)
        assert torch.equal(proxy, parameter) and torch.equal(parameter, proxy) and torch.equal(proxy, proxy)
        assert (2 * proxy - proxy == parameter).all() and repr(proxy) == repr(parameter)
        assert torch.equal(proxy[0], parameter[0]) and torch.equal(proxy @ parameter.T, parameter @ proxy.T)
        torch.testing.assert_close(torch.nn.functional.linear(torch.ones(1, 3), proxy), parameter.sum(1)[None])
        np.testing.assert_array_equal(np.asarray(proxy.detach()), parameter.detach().numpy())
        proxy.requires_grad = False
        assert not parameter.requires_grad
        assert (
            type(copy.deepcopy(proxy)) is torch.nn.Parameter
            and type(pickle.loads(pickle.dumps(proxy))) is torch.nn.Parameter
        )


# During a capture -----------------------------------------------------------------------------------------------------


def test_attributes_are_those_of_the_time_of_wrapping(module):
    module.counter = 1
    attributes = Attributes(module)
    module.eval()
    module.counter, module.new = 2, 3
    with pytest.raises(ZeroDivisionError), attributes.restored():
        assert module.training and module.norm.training and module.counter == 1 and not hasattr(module, "new")
        module.counter = 1 / 0
    assert not module.training and not module.norm.training and (module.counter, module.new) == (2, 3)
    with Attributes(torch.nn.Module()).restored():
        pass


def test_forward_may_change_values_in_place(module):
    with not_rebound(module):
        module.steps += 1
        module.steps.copy_(module.steps * 2)
        module.norm.num_batches_tracked = module.norm.num_batches_tracked + 1
        module.register_buffer("made", torch.ones(1))
    assert module.steps.tolist() == [2, 2] and not hasattr(module, "made")


class Moved(torch.nn.Module):
    """One whose layers are moved to another dtype where they run."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x, y=None):
        self.first = self.first.to(torch.bfloat16)
        self.last.half()
        self.count = getattr(self, "count", 0) + 1
        out = self.last(self.first(x.bfloat16()).half()).float()
        return out if y is None else (out, torch.nn.functional.mse_loss(out, y))


def test_forward_may_move_modules():
    torch.manual_seed(0)
    module, x, y = Moved(), torch.randn(5, 3), torch.randn(5, 2)
    expected = copy.deepcopy(module)(x)
    ours = poptorch.inferenceModel(module)(x)
    torch.testing.assert_close(ours, expected.detach(), rtol=1e-2, atol=1e-2)
    assert module.first.weight.dtype is torch.float32 and not hasattr(module, "count")
    wrapped = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    losses = [float(wrapped(x, y)[1]) for _ in range(3)]
    assert losses[2] < losses[0] and module.last.weight.dtype is torch.float32


def reassign_buffer(m):
    m.steps = m.steps + 1


def remove_buffer(m):
    del m.steps


def reassign_parameter(m):
    m.first.bias = torch.nn.Parameter(torch.zeros(3))


def remove_parameter(m):
    del m.first.bias


@pytest.mark.parametrize(
    "change, message",
    [
        (reassign_buffer, "Buffer steps is reassigned within the model.*copy_"),
        (remove_buffer, "Buffer steps is removed from the model.*copy_"),
        (reassign_parameter, "Parameter first.bias is reassigned within the model.*copy_"),
        (remove_parameter, "Parameter first.bias is removed from the model.*copy_"),
    ],
)
def test_forward_must_not_rebind(module, change, message):
    before, names = tensors_of(module), list(module.state_dict())
    with pytest.raises(Error, match=message), not_rebound(module):
        change(module)
    assert tensors_of(module) is not before and {n: id(t) for n, t in tensors_of(module).items()} == {
        n: id(t) for n, t in before.items()
    }
    assert list(module.state_dict()) == names


def test_errors_of_forward_pass_through_and_tensors_are_restored(module):
    before = module.steps
    with pytest.raises(ZeroDivisionError), not_rebound(module):
        module.steps = module.steps + 1
        1 / 0  # noqa: B018
    assert module.steps is before
