"""Arguments and results: binding, structures, what must match, and which rows go where."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

import popxl

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch.base.custom_types import ICustomArgParser, parser_of, registerCustomArgParser
from poptorch.base.replica_groups import ReplicaGroups
from poptorch.base.structures import structure_of
from poptorch.enums import CommGroupType, OutputMode
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.program.batching import Batching, Feeder
from poptorch.run.arguments import Binder, Signature

Point = namedtuple("Point", "x y")


class Batch(OrderedDict):
    """A dictionary with an attribute."""


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    scale: float = 1.0


@dataclass
class NamedPair(Pair):
    name: str = ""


class PairParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure, tensor_iterator):
        left, right = next(tensor_iterator), next(tensor_iterator)
        return Pair(left, right, original_structure.scale)


@pytest.fixture
def pair_parser():
    registerCustomArgParser(Pair, PairParser())
    yield
    registerCustomArgParser(Pair, None)


@pytest.fixture
def warnings(caplog):
    """The warnings of poptorch so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# Binding --------------------------------------------------------------------------------------------------------------

DEFAULT = ones(2)


def forward(x, y=DEFAULT, *, scale=1.0):
    return x * y * scale


def variadic(x, *args, scale=1.0, **kwargs):
    return x


@pytest.mark.parametrize(
    "args, kwargs, expected",
    [
        ((1,), {}, {"x": 1, "y": DEFAULT, "scale": 1.0}),
        ((1, 2), {}, {"x": 1, "y": 2, "scale": 1.0}),
        ((), {"scale": 3.0, "x": 1}, {"x": 1, "y": DEFAULT, "scale": 3.0}),
    ],
)
def test_binds_by_name(args, kwargs, expected):
    bound = Binder(forward).bind(args, kwargs)
    assert list(bound.items()) == list(expected.items())


def test_binds_the_rest():
    binder = Binder(variadic)
    bound = binder.bind((1, 2, 3), {"mask": 4})
    assert bound == {"x": 1, "args": (2, 3), "scale": 1.0, "kwargs": {"mask": 4}}
    assert binder.unbind(bound, 3, {"mask"}) == ((1, 2, 3), {"mask": 4})
    assert binder.unbind(bound, 3, {"mask", "scale"}) == ((1, 2, 3), {"scale": 1.0, "mask": 4})


def test_a_function_without_a_signature_takes_positional_arguments():
    signature = Signature(torch.add, (ones(2), ones(2)), {})
    assert len(signature.check((ones(2), ones(2)), {})) == 2
    assert torch.add(*signature.arguments([ones(2), ones(2)])[0]).tolist() == [2, 2]


def test_a_missing_parameter():
    with pytest.raises(Error, match="Mandatory parameter x missing.*takes .x, y="):
        Binder(forward).bind((), {"scale": 1.0})
    with pytest.raises(Error, match="Mandatory parameter a missing; Mandatory parameter b missing"):
        Binder(lambda a, *, b: a).bind((), {})


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        ((1,), {"z": 2}, "unexpected keyword argument 'z'"),
        ((1, 2, 3), {}, "too many positional"),
        ((1,), {"x": 2}, "multiple values for argument 'x'"),
    ],
)
def test_arguments_that_cannot_be_bound(args, kwargs, message):
    with pytest.raises(AssertionError, match=rf"forward\(x, .*: .*{message}"):
        Binder(forward).bind(args, kwargs)


# Structures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t(),
        lambda t: (t(), 1, [t(), None]),
        lambda t: Point(t(), y={"deep": (t(), "text")}),
        lambda t: OrderedDict(b=t(), a=t()),
        lambda t: defaultdict(list, a=t()),
        lambda t: {1: t(), ("tuple",): [t()], "empty": ()},
        lambda t: torch.Size([2, 3]),
    ],
)
def test_any_nesting_is_taken_apart_and_rebuilt(make):
    first, second = iter(range(10)), iter(range(10, 20))
    value = make(lambda: torch.tensor(next(first)))
    expected = make(lambda: torch.tensor(next(second)))
    structure = structure_of(value, "x")
    tensors = structure.tensors(value)
    assert [t.item() for t in tensors] == list(range(len(tensors)))
    rebuilt = structure.rebuild([t + 10 for t in tensors])
    assert rebuilt == expected and type(rebuilt) is type(expected)


def test_subclasses_keep_their_attributes():
    batch = Batch(x=ones(2))
    batch.name = "first"
    rebuilt = structure_of(batch, "batch").rebuild([ones(3)])
    assert type(rebuilt) is Batch and rebuilt.name == "first" and rebuilt["x"].shape == (3,)
    assert batch["x"].shape == (2,)
    assert structure_of(defaultdict(int, x=ones(2)), "d").rebuild([ones(3)])["other"] == 0


def test_leaves_are_named():
    structure = structure_of((ones(2), {"a": [ones(3, dtype=torch.int64)]}), "x")
    assert [(leaf.name, leaf.shape, leaf.dtype) for leaf in structure.leaves()] == [
        ("x[0]", (2,), torch.float32),
        ("x[1]['a'][0]", (3,), torch.int64),
    ]


def test_one_tensor_in_two_places_stays_so():
    t = ones(2)
    structure = structure_of((t, [t]), "result")
    a, (b,) = structure.rebuild(structure.tensors((t, [t])))
    assert a is b


# Types of the user ----------------------------------------------------------------------------------------------------


def test_a_registered_type(pair_parser):
    pair = Pair(ones(2), ones(3), scale=0.5)
    structure = structure_of([pair, ones(1)], "x")
    assert [leaf.name for leaf in structure.leaves()] == ["x[0].tensor0", "x[0].tensor1", "x[1]"]
    other, last = structure.rebuild([ones(4), ones(5), ones(6)])
    assert (other.left.shape, other.right.shape, other.scale, last.shape) == ((4,), (5,), 0.5, (6,))
    with pytest.raises(Error, match=r"Shape mismatch for x\[0\].tensor1: expected torch.Size\(\[3\]\)"):
        structure.tensors([Pair(ones(2), ones(2)), ones(1)])
    with pytest.raises(Error, match="Type mismatch for x.0.: expected .*Pair"):
        structure.tensors([(ones(2), ones(3)), ones(1)])


def test_the_parser_of_the_exact_type_goes_before_those_of_bases(pair_parser):
    named = NamedPair(ones(1), ones(1))
    base, exact = parser_of(named), PairParser()
    assert isinstance(base, PairParser)
    registerCustomArgParser(NamedPair, exact)
    try:
        assert parser_of(named) is exact and parser_of(Pair(ones(1), ones(1))) is base
    finally:
        registerCustomArgParser(NamedPair, None)
    assert parser_of(named) is base


def test_without_a_parser_an_object_is_a_constant_and_a_dataclass_its_fields():
    box, pair = object(), Pair(ones(1), ones(2))
    assert parser_of(box) is parser_of(pair) is None
    structure = structure_of(box, "x")
    assert structure.rebuild([]) is box and structure.tensors(box) == []
    structure = structure_of(pair, "x")
    assert [leaf.name for leaf in structure.leaves()] == ["x.left", "x.right"]
    assert structure.rebuild(["a", "b"]) == Pair("a", "b")
    assert all(a is b for a, b in zip(structure.tensors(pair), (pair.left, pair.right), strict=True))
    settings = Pair(1, 2)
    assert structure_of(settings, "x").rebuild([]) is settings


def test_registering_something_else():
    with pytest.raises(Error, match="`arg_parser` should be an instance of a subclass of ICustomArgParser"):
        registerCustomArgParser(Pair, PairParser)
    with pytest.raises(Error, match="`arg_data_type` should be a type; got 3"):
        registerCustomArgParser(3, PairParser())


@pytest.mark.parametrize(
    "yielded, taken, message",
    [
        (["left", "right"], 1, "reconstruct left 1 of the 2 tensors that yieldTensors gave for x"),
        (["left"], 2, "reconstruct took more than the 1 tensors"),
        (["scale"], 1, "yieldTensors gave 1.0 for x, which is not a tensor"),
    ],
)
def test_a_parser_that_is_wrong(yielded, taken, message):
    class Wrong(ICustomArgParser):
        def yieldTensors(self, struct):
            return (getattr(struct, name) for name in yielded)

        def reconstruct(self, original_structure, tensor_iterator):
            return [next(tensor_iterator) for _ in range(taken)]

    registerCustomArgParser(Pair, Wrong())
    try:
        with pytest.raises(Error, match=message):
            structure_of(Pair(ones(1), ones(1)), "x").rebuild([ones(1)] * 2)
    finally:
        registerCustomArgParser(Pair, None)


def test_a_registered_type_with_another_number_of_tensors():
    class Bag(list):
        pass

    class BagParser(ICustomArgParser):
        def yieldTensors(self, struct):
            return struct

        def reconstruct(self, original_structure, tensor_iterator):
            return Bag(tensor_iterator)

    registerCustomArgParser(Bag, BagParser())
    try:
        structure = structure_of(Bag([ones(1)]), "bag")
        assert type(structure.rebuild([ones(2)])) is Bag
        with pytest.raises(Error, match="Length mismatch for bag: expected 1 tensors but got 2"):
            structure.tensors(Bag([ones(1), ones(1)]))
    finally:
        registerCustomArgParser(Bag, None)


# What must match ------------------------------------------------------------------------------------------------------


def model(x, u=5, *rest, **options):
    return x


MATCHING = [
    ((ones(2),), {}),
    ((ones(2), 5), {}),
    ((), {"u": 5, "x": torch.nn.Parameter(ones(2))}),
]


@pytest.mark.parametrize("args, kwargs", MATCHING)
def test_calls_that_match(args, kwargs):
    signature = Signature(model, (ones(2),), {})
    (tensor,) = signature.check(args, kwargs)
    assert tensor is (args[0] if args else kwargs["x"])


def test_default_tensors_are_inputs():
    signature = Signature(forward, (ones(2),), {})
    assert [leaf.name for leaf in signature.leaves] == ["x", "y"]
    assert signature.check((ones(2),), {})[1] is DEFAULT


def test_the_order_of_keys_does_not_matter():
    signature = Signature(lambda x: x, ({"a": ones(1), "b": ones(2)},), {})
    a, b = ones(1), ones(2)
    assert [id(t) for t in signature.check(({"b": b, "a": a},), {})] == [id(a), id(b)]
    (batch,), _ = signature.arguments([a, b])
    assert list(batch) == ["a", "b"]


@pytest.mark.parametrize(
    "compiled, called, message",
    [
        (ones(1), ones(2), r"Shape mismatch for x: expected torch.Size\(\[1\]\) but got torch.Size\(\[2\]\)"),
        (ones(1), ones(1, 1), r"expected torch.Size\(\[1\]\) but got torch.Size\(\[1, 1\]\)"),
        (ones(1), ones(1, dtype=torch.int64), "x: expected torch.float32 but got torch.int64"),
        (ones(1), [ones(1)], "Type mismatch for x: expected <class 'torch.Tensor'> but got <class 'list'>"),
        ((ones(1),), [ones(1)], "Type mismatch for x: expected <class 'tuple'> but got <class 'list'>"),
        ((ones(1),), (ones(1),) * 2, "Length mismatch for x: expected 1 but got 2"),
        ([[ones(1)]], [[ones(2)]], r"Shape mismatch for x\[0\]\[0\]"),
        ({"a": ones(1)}, OrderedDict(a=ones(1)), "Type mismatch for x: expected <class 'dict'>"),
        ({"a": 1, "b": 2}, {"a": 1}, "x: Missing arguments: b"),
        ({"a": 1}, {"a": 1, "b": 2, "c": 3}, "x: Unexpected arguments: b, c"),
        ({"a": 1}, {"b": 2}, "Missing arguments: a. Unexpected arguments: b"),
        (5, 3, "mismatch for x: expected 5 but got 3"),
        (5, 5.0, "Type mismatch for x: expected <class 'int'> but got <class 'float'>"),
        (1, True, "Type mismatch for x"),
        (None, ones(1), "Type mismatch for x: expected <class 'NoneType'> but got <class 'torch.Tensor'>"),
        (np.arange(2), np.arange(1, 3), "Value mismatch for x"),
    ],
)
def test_calls_that_do_not_match(compiled, called, message):
    signature = Signature(lambda x: x, (compiled,), {})
    with pytest.raises(Error, match=f"{message}.*\n?.*call `destroy"):
        signature.check((called,), {})


def test_the_rest_must_match():
    signature = Signature(variadic, (ones(1), ones(1)), {"mask": ones(1)})
    with pytest.raises(Error, match="Number of positional arguments mismatch: expected 2 arguments but got 3"):
        signature.check((ones(1),) * 3, {"mask": ones(1)})
    with pytest.raises(Error, match="': Keys mismatch for kwargs: Missing arguments: mask. Arguments must match"):
        signature.check((ones(1),) * 2, {})


@pytest.mark.parametrize("constant", [float("nan"), np.array([1.0, np.nan]), "text", len, 1 + 2j])
def test_constants_equal_themselves(constant):
    copied = constant.copy() if isinstance(constant, np.ndarray) else constant
    assert Signature(lambda x: x, (constant,), {}).check((copied,), {}) == []
    assert Signature(lambda x: x, (float("nan"),), {}).check((float("nan"),), {}) == []


def test_arguments_for_a_micro_batch():
    signature = Signature(variadic, (ones(4, 2), 3), {"mask": {"a": ones(4)}, "scale": 2.0})
    args, kwargs = signature.arguments([torch.zeros(2, 2), torch.zeros(2)])
    assert args[0].shape == (2, 2) and args[1] == 3
    assert kwargs["scale"] == 2.0 and kwargs["mask"]["a"].shape == (2,)


def test_dictionaries_warn_when_compiled(warnings):
    signature = Signature(lambda x, y: x, ([{"a": ones(1)}], {"b": 1}), {})
    signature.tell_of_dicts()
    assert warnings() == [
        "Dictionaries among the arguments (x, y): their keys are compiled in; later calls need the same."
    ]
    signature.check(([{"a": ones(1)}], {"b": 1}), {})
    Signature(variadic, (ones(1),), {"mask": 1}).tell_of_dicts()
    assert len(warnings()) == 1


# Rows -----------------------------------------------------------------------------------------------------------------


def batching(D=1, G=1, R=1, S=1, kind=CommGroupType.Consecutive):
    return Batching(D, G, ReplicaGroups.from_type(kind, S, R))


@pytest.mark.parametrize(
    "given, rows, expected",
    [
        (dict(D=10), (10, 1, 5, 6), (1, 1, 5, 6)),
        (dict(D=1000), (1000, 10), (1, 10)),
        (dict(D=2, G=3), (24, 10), (4, 10)),
        (dict(D=2, G=3, R=4), (96, 10), (4, 10)),
        (dict(D=2, G=3, R=8, S=4), (48, 10), (4, 10)),
        (dict(D=4, G=2), (8,), (1,)),
        (dict(), (), ()),
        (dict(R=4, S=4), (), ()),
        (dict(), (7, 2), (7, 2)),
    ],
)
def test_what_forward_sees(given, rows, expected):
    assert batching(**given).micro_batch_shape(rows, "x") == expected


@pytest.mark.parametrize("rows", [(7, 2), (), (3,)])
def test_rows_that_cannot_be_dealt(rows):
    with pytest.raises(AssertionError, match="Invalid batch dimension: the argument x has") as raised:
        batching(D=3, G=2, R=4, S=2).micro_batch_shape(rows, "x")
    for part in (
        "12 micro-batches",
        "deviceIterations (3)",
        "replicationFactor (4)",
        "inputReplicaGrouping (2)",
        "Training.gradientAccumulation (2)",
    ):
        assert part in str(raised.value)


def test_batching_of_options():
    options = Options().deviceIterations(2).replicationFactor(6)
    options.inputReplicaGrouping(3, CommGroupType.Orthogonal).Training.gradientAccumulation(5)
    assert Batching.from_options(options, training=True) == Batching(2, 5, ReplicaGroups(6, 3, 2))
    assert Batching.from_options(options, training=False).gradient_accumulation == 1
    assert Batching.from_options(options, training=True).factor == 20


@pytest.mark.parametrize("D, G, R, B", [(2, 3, 4, 5), (1, 3, 2, 1), (2, 1, 1, 3), (1, 1, 2, 2), (1, 1, 1, 4)])
def test_rows_are_dealt_in_order(D, G, R, B):
    rows = np.arange(D * G * R * B * 2).reshape(-1, 2)
    dealt = batching(D, G, R).deal(rows)
    assert np.shares_memory(dealt, rows)
    full = dealt.reshape(D, G, R, B, 2)
    for d, g, r, b in np.ndindex(D, G, R, B):
        assert full[d, g, r, b].tolist() == rows[((d * G + g) * R + r) * B + b].tolist()
    assert dealt.shape == tuple(n for n in (D * G, R) if n > 1) + (B, 2)
    np.testing.assert_array_equal(Batching.join(dealt, (B, 2)), rows)


@pytest.mark.parametrize(
    "kind, groups", [(CommGroupType.Consecutive, [0, 0, 0, 1, 1, 1]), (CommGroupType.Orthogonal, [0, 1, 0, 1, 0, 1])]
)
def test_replicas_of_a_group_get_the_same_rows(kind, groups):
    rows = np.arange(2 * 2 * 2 * 3).reshape(2, 2, 2, 3)
    dealt = batching(2, 2, 6, 3, kind).deal(rows.reshape(-1))
    assert dealt.shape == (4, 6, 3)
    for r, group in enumerate(groups):
        np.testing.assert_array_equal(dealt[:, r], rows[:, :, group].reshape(4, 3))


@pytest.mark.parametrize(
    "dealt, shape, expected",
    [
        ((6, 4), (), (24,)),
        ((), (), ()),
        ((4,), (), (4,)),
        ((1, 1), (), ()),
        ((1, 3), (3,), (3,)),
        ((6, 4, 0, 2), (0, 2), (0, 2)),
    ],
)
def test_results_without_rows(dealt, shape, expected):
    numbers = np.arange(np.prod(dealt)).reshape(dealt)
    joined = Batching.join(numbers, shape)
    assert joined.shape == expected
    assert joined.ravel().tolist() == numbers.ravel().tolist()


@pytest.mark.parametrize(
    "mode, period, expected",
    [(OutputMode.All, 1, 12), (OutputMode.Final, 1, 1), (OutputMode.Sum, 7, 1), (OutputMode.EveryN, 2, 6)],
)
def test_how_many_results_come_back(mode, period, expected):
    assert batching(D=4, G=3, R=2).returned(mode, period) == expected


@pytest.mark.parametrize("period", [0, -1, 3])
def test_a_period_that_does_not_divide(period):
    with pytest.raises(AssertionError, match=rf"period is {period};.*divisor of deviceIterations \(4\)"):
        batching(D=4).returned(OutputMode.EveryN, period)


# Feeding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, expected",
    [
        (torch.float32, np.float32),
        (torch.float16, np.float16),
        (torch.bfloat16, popxl.bfloat16.as_numpy()),
        (torch.float64, np.float32),
        (torch.int64, np.int32),
        (torch.int32, np.int32),
        (torch.int16, np.int16),
        (torch.int8, np.int8),
        (torch.uint8, np.uint8),
        (torch.bool, np.bool_),
    ],
)
def test_types_on_the_device(given, expected):
    array = Feeder(batching(D=2)).array(ones(4, 3, dtype=given), "x")
    assert array.dtype == expected and array.shape == (2, 2, 3) and (array == 1).all()


def test_a_type_that_the_device_does_not_have():
    with pytest.raises(Error, match="Unsupported dtype torch.float8_e5m2: .*float32, float16.*tensor.to"):
        Feeder(batching()).array(ones(1).to(torch.float8_e5m2), "x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.tensor([3, 2**31]), "x has the number 2147483648, which does not fit in int32"),
        (torch.tensor([-(2**40), 3]), "x has the number -1099511627776, which does not fit in int32"),
        (ones(2, 3).to_sparse(), "x has the layout torch.sparse_coo; expected .*`tensor.to_dense.."),
        (torch.empty(2, 3, device="meta"), "x has no numbers: it is on the device meta; .* on the CPU"),
    ],
)
def test_numbers_that_the_device_cannot_be_given(given, message):
    model = poptorch.inferenceModel(lambda x: x + 1)
    with pytest.raises(Error, match=message):
        model(given)
    fitting = torch.zeros(given.shape, dtype=given.dtype)
    assert (model(fitting) == 1).all()
    with pytest.raises(Error, match=message):
        model(given)
    assert (model(fitting) == 1).all()


@pytest.mark.parametrize("number", [-(2**31), 2**31 - 1])
def test_the_largest_numbers_that_fit(number):
    assert Feeder(batching()).array(torch.tensor([number]), "x").tolist() == [number]


def test_what_is_not_contiguous_is_copied_with_one_warning(warnings):
    feeder, t = Feeder(batching(D=3)), torch.arange(6.0).reshape(2, 3).T
    for _ in range(2):
        array = feeder.array(t, "x")
        np.testing.assert_array_equal(array, t.numpy().reshape(3, 1, 2))
    assert len(warnings()) == 1 and "x is not contiguous" in warnings()[0]


def test_what_requires_a_gradient_is_detached_with_one_warning(warnings):
    feeder, t = Feeder(batching()), ones(2).requires_grad_()
    for _ in range(2):
        array = feeder.array(t, "x")
        assert array.tolist() == [1, 1]
    assert t.requires_grad
    assert len(warnings()) == 1 and "x requires a gradient" in warnings()[0]
