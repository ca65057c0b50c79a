"""Every op, by the table in `rows`: what it declares, what it computes, its gradient, and what it refuses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.dtypes import kind_of
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate, store
from tests.popxl.ops.rows import ROWS
from tests.popxl.ops.rows.float8 import FLOAT8
from tests.popxl.ops.rows.schema import Fed, Row, Rule, Sample, function_of, telling, values
from tests.tolerances import assert_near

Array = np.ndarray
rows = pytest.mark.parametrize("row", ROWS, ids=repr)

MAKE = ("arange", "init", "host_load")
"""Ops that make tensors, and are given none."""

TOGETHER = 8
"""So many rows are one program, as each program takes some time to compile whatever is in it."""


def batches(rows: list[Row]) -> Any:
    """The parameter `batch`: some rows at a time. Each is a part of the name of the test."""
    whole = [row for row in rows if row in FLOAT8]
    others = [row for row in rows if row not in FLOAT8]
    parts = [some[i : i + TOGETHER] for some in (others, whole) for i in range(0, len(some), TOGETHER)]
    return pytest.mark.parametrize(
        "batch",
        [
            pytest.param(
                part,
                id=" ".join(map(repr, part)),
                marks=[pytest.mark.compiled_whole] * (part[0] in FLOAT8),
            )
            for part in parts
        ],
    )


def check_together(check: Callable[[list[tuple[Row, list[Sample]]]], None], batch: list[Row], of: Any) -> None:
    """Check some samples, those that `of` says, of rows in one program. If that fails, each row by itself."""
    every = [(row, samples) for row in batch if (samples := of(row))]
    try:
        check(every)
    except Exception:
        for row, samples in every:
            try:
                check([(row, samples)])
            except Exception as problem:
                problem.add_note(f"In the row {row.name!r}.")
                raise
        raise  # none fails by itself


def test_every_op_has_a_row() -> None:
    public = {
        name
        for module in (ops, ops.var_updates, ops.collectives)
        for name, f in vars(module).items()
        if inspect.isfunction(f) and not name.startswith("_")
    }
    named = {n for row in ROWS for n in (row.name, *row.aliases, *([row.inplace.name] if row.inplace else []))}
    assert public - named - {"getitem"} == set(), "ops without a row in tests/popxl/ops/rows"
    assert named - public == set(), "rows of ops that do not exist"


@rows
def test_aliases_and_docstrings(row) -> None:
    assert row.op.__name__ == row.name
    for name in row.aliases:
        assert function_of(name) is row.op
    for name in (row.name, row.inplace.name if row.inplace else row.name):
        documentation = inspect.getdoc(function_of(name))
        assert documentation and "Example" in documentation, f"ops.{name} wants a docstring with an example"


# From arrays to tensors and back ------------------------------------------------------------------------------------


def tensors_for(operands: tuple[Any, ...], feeds: dict[Any, Array] | None = None) -> list[Any]:
    """The operands with a variable for each array, and a stream for what is fed."""

    def tensor(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return popxl.variable(value, name="x")
        if isinstance(value, Fed):
            stream = popxl.h2d_stream(value.data.shape, popxl.dtype.as_dtype(value.data), "x")
            (feeds if feeds is not None else {})[stream] = value.data
            return stream
        if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
            return [tensor(v) for v in value]
        return value

    return list(map(tensor, operands))


def flat(values: Any) -> Iterator[Any]:
    """The members of nested lists and tuples."""
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


def arrays_of(operands: tuple[Any, ...]) -> list[Array]:
    """The arrays among the operands, those in lists too."""
    return [a for a in flat(operands) if isinstance(a, np.ndarray)]


def plain(value: Any) -> Any:
    """An operand as its NumPy meaning gets it: floats and complex numbers in double precision."""
    if isinstance(value, Fed):
        return plain(value.data)
    if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
        return [plain(v) for v in value]
    if not isinstance(value, np.ndarray) or kind_of(value.dtype) not in "fc":
        return value
    return value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)


def meant(row, sample: Sample) -> list[Array]:
    """What the results of an op should be, with their dtypes."""
    expected = sample.expect
    if expected is None:
        with np.errstate(all="ignore"):
            expected = row.meaning(*map(plain, sample.operands), **sample.attributes)
    fed = [value.data for value in sample.operands if isinstance(value, Fed)]
    first = next(iter(fed + arrays_of(sample.operands)), None)
    floating = np.dtype(sample.dtype or (first.dtype if first is not None else np.float32))
    wanted = {"c": np.dtype(np.complex64), "f": np.dtype(np.float32) if floating.kind == "c" else floating}
    results = []
    for result in expected if isinstance(expected, list | tuple) else [expected]:
        result = np.asarray(result)
        results.append(result.astype(wanted.get(kind_of(result.dtype), result.dtype)))
    return results


APART = {popxl.float16.as_numpy(): 2e-3, popxl.bfloat16.as_numpy(): 8e-3}


def assert_close(actual: Array, expected: Array, tolerance: float, what: Any) -> None:
    """Equal spec, and numbers within a tolerance, for halves one of their own, as far as two are apart."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    if kind_of(actual.dtype) not in "fc":
        np.testing.assert_array_equal(actual, expected, err_msg=str(what))
    else:
        near = max(tolerance, APART.get(actual.dtype, 0)) if tolerance else tolerance
        assert_near(plain(actual), plain(expected), near, what)


# What an op declares ------------------------------------------------------------------------------------------------


@rows
def test_declaration(row) -> None:
    """Kind of the ops, names of the results, number of tensors."""
    forms = [(row.build or row.op, row.kinds, row.result)]
    if row.inplace:
        forms.append((function_of(row.inplace.name), row.inplace.kind, row.inplace.result))
    for form, kinds, names in forms:
        sample = row.samples[0]
        ir = popxl.Ir()
        with ir.main_graph as main:
            operands = tensors_for(sample.operands)
            first = next((t for t in flat(operands) if isinstance(t, popxl.Tensor)), None)
            before = len(main.tensors)
            results = [t for t in flat(form(*operands, **sample.attributes)) if isinstance(t, popxl.Tensor)]
        made = [op.op_type for op in main.ops]
        assert made == kinds.split()
        wanted = names.replace("{0}", first.name if first is not None else "x").split()
        if wanted:
            stems = [t.name.partition("__t")[0] for t in results] if "repeat" in row.name else [t.name for t in results]
            assert stems == (wanted[: len(stems)] if row.build else wanted)
            streams = sum(isinstance(t, popxl.HostToDeviceStream) for t in operands)
            assert len(main.tensors) - before == (row.adds if row.adds is not None else len(results))
            assert all(type(t) is popxl.Tensor for t in results) and streams <= 1


# What it computes ---------------------------------------------------------------------------------------------------


def check_numbers(every: list[tuple[Row, list[Sample]]]) -> None:
    """Samples of rows, and their in-place forms, in one program."""
    ir = popxl.Ir()
    feeds: dict[Any, Array] = {}
    expected: list[tuple[Row, Array, Any]] = []
    streams: list[popxl.DeviceToHostStream] = []

    def expect(row: Row, results: Any, values: list[Array], what: Any) -> None:
        tensors = list(flat(results))
        assert len(tensors) == len(values), what
        streams.extend(store(tensors))
        expected.extend((row, value, what) for value in values)

    with ir.main_graph, popxl.in_sequence():
        for row, sample, is_first in ((row, s, s is samples[0]) for row, samples in every for s in samples):
            operands = tensors_for(sample.operands, feeds)
            results = (row.build or row.op)(*operands, **sample.attributes)
            values = meant(row, sample)
            expect(row, results, values, (row.name, sample))
            if row.overwrites:
                expect(row, operands[0], values, (row.name, sample, "overwritten"))
            elif is_first and any(isinstance(t, popxl.Tensor) for t in flat(operands)):
                untouched = [t for t in flat(operands) if isinstance(t, popxl.Tensor)]
                expect(row, untouched, arrays_of(sample.operands), (row.name, sample, "not to be touched"))
            if row.inplace and fits(sample, values):
                operands = tensors_for(sample.operands)
                results = function_of(row.inplace.name)(*operands, **sample.attributes)
                expect(row, results, values, (row.inplace.name, sample))
                if not row.inplace.view:
                    expect(row, operands[0], values, (row.inplace.name, sample, "overwritten"))
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run(feeds)
    for stream, (row, value, what) in zip(streams, expected, strict=True):
        assert_close(outputs[stream], value, row.tolerance, what)


def others(row: Row) -> list[Sample]:
    """The samples that are not telling: one more dtype, one more mode, one more shape."""
    found = telling(row.samples)
    return [sample for sample in row.samples if not any(sample is other for other in found)]


@pytest.mark.filterwarnings("ignore::popxl.errors.RepeatedSeedWarning")  # of rows that train nothing
@batches(ROWS)
def test_numbers(batch) -> None:
    """Of the samples, one for each kind of dtypes."""
    check_together(check_numbers, batch, lambda row: telling(row.samples))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::popxl.errors.RepeatedSeedWarning")  # of rows that train nothing
@batches([row for row in ROWS if others(row)])
def test_numbers_of_all_samples(batch) -> None:
    check_together(check_numbers, batch, others)


def fits(sample: Sample, values: list[Array]) -> bool:
    """Whether the result can be written over the first operand; views are views of anything."""
    first = sample.operands[0]
    return not isinstance(first, np.ndarray) or first.dtype == values[0].dtype


views = pytest.mark.parametrize("row", [row for row in ROWS if row.inplace and row.inplace.view], ids=repr)


@views
def test_views_keep_what_is_put_into_them(row) -> None:
    """What is written to a view is read from it, and nothing else of its bases has changed."""
    written: list[Array] = []
    samples = [s for s in row.samples if not any(a.dtype == bool for a in arrays_of(s.operands))]

    def build() -> Iterator[popxl.Tensor]:
        with popxl.in_sequence():
            for sample in samples:
                operands = tensors_for(sample.operands)
                view = function_of(row.inplace.name)(*operands, **sample.attributes)
                new = np.arange(100, 100 + view.nelms).reshape(view.shape).astype(view.dtype.as_numpy())
                written.append(new)
                ops.var_updates.copy_var_update_(view, popxl.constant(new))
                yield from [view, *flat(operands[:1])]

    results = iter(evaluate(build))
    for sample, new in zip(samples, written, strict=True):
        np.testing.assert_array_equal(next(results), new, err_msg=str(sample))
        before = arrays_of(sample.operands)
        after = [next(results) for _ in before]
        bases = after if isinstance(sample.operands[0], list | tuple) else after[0]
        seen = row.meaning(bases, *sample.operands[1:], **sample.attributes)
        np.testing.assert_array_equal(seen, new, err_msg=str(sample))
        changed = sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))
        assert changed == new.size, sample


@pytest.mark.parametrize("row", [row for row in ROWS if row.torch], ids=repr)
def test_torch(row) -> None:
    """Where torch has the op, it means the same."""
    torch = pytest.importorskip("torch")

    def tensors(value: Any) -> Any:
        if isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray):
            return [tensors(v) for v in value]
        return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value

    compared = 0
    for sample in row.samples:
        arrays = arrays_of(sample.operands)
        hints = {"output_type", "partials_type", "available_memory_proportion"} & sample.attributes.keys()
        if (
            sample.torch
            and sample.expect is None
            and not hints
            and all(a.dtype in ("float32", "int32", "complex64") for a in arrays)
        ):
            (expected,) = meant(row, sample)
            actual = row.torch(*map(tensors, sample.operands), **sample.attributes).resolve_conj().numpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=str(sample))
            compared += 1
    assert compared


# Its gradient -------------------------------------------------------------------------------------------------------


def gradients(calls: list[tuple[Callable[..., Any], Sample | Rule, list[int], list[Array]]]) -> list[list[Array]]:
    """For calls of an op: the gradients of some operands, for given gradients of the results. In one program."""

    def build() -> Iterator[popxl.Tensor]:
        ir = popxl.gcg().ir
        for form, sample, wanted, gs in calls:
            operands = tensors_for(sample.operands)
            tensors = [t for t in flat(operands) if isinstance(t, popxl.Tensor)]
            graph = ir.create_graph(lambda *ts: nested(form, sample, ts), *tensors)  # noqa: B023  # called at once
            info = autodiff(graph, grads_required=[graph.inputs[i] for i in wanted])
            site = ops.call_with_info(graph, *tensors)
            given = [popxl.variable(g) for g in gs]
            results = ops.call(info.graph, *given, inputs_dict=info.inputs_dict(site))
            for i, g in zip(wanted, results, strict=True):
                assert g.spec == graph.inputs[i].spec, sample
            yield from results

    found = iter(evaluate(build))
    return [[next(found) for _ in wanted] for _, _, wanted, _ in calls]


def nested(form: Callable[..., Any], sample: Any, tensors: tuple[Any, ...]) -> Any:
    """Call an op with tensors in place of the arrays of a sample."""
    rest = iter(tensors)

    def operand(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
            return [operand(v) for v in value]
        return next(rest) if isinstance(value, np.ndarray) else value

    return form(*map(operand, sample.operands), **sample.attributes)


def directions(size: int) -> Array:
    """Along each element; or, where these are many, along a few random mixtures of all of them. One in each row."""
    if size <= 24:
        return np.eye(size)
    return np.random.default_rng(size).choice([-1, 1], (8, size)) / np.sqrt(size)


def differences(row, sample: Sample, wanted: list[int], gs: list[Array]) -> list[Array]:
    """Central differences of the NumPy meaning along `directions`, in double precision.

    Of complex numbers they are those along the real parts, and i times those along the imaginary ones.
    """
    exact = [plain(a) for a in arrays_of(sample.operands)]

    def total(i: int, changed: Array) -> float:
        operands = (*exact[:i], changed.reshape(exact[i].shape), *exact[i + 1 :])
        results = nested(row.meaning, sample, operands)
        several = results if isinstance(results, list) else [results]
        return sum(float(np.real(r * np.conj(g)).sum()) for r, g in zip(several, gs, strict=True))

    def slope(i: int, direction: Array) -> float:
        return (total(i, exact[i].ravel() + 1e-6 * direction) - total(i, exact[i].ravel() - 1e-6 * direction)) / 2e-6

    def slopes(i: int) -> Array:
        along = directions(exact[i].size)
        parts = [
            np.array([slope(i, way * d) for d in along]) for way in ([1, 1j] if exact[i].dtype.kind == "c" else [1])
        ]
        return sum(part * way for part, way in zip(parts, [1, 1j], strict=False))

    return list(map(slopes, wanted))


def smooth(row, sample: Sample) -> bool:
    """Whether differences say something: only floats or complex numbers, all finite, and no result stated."""
    arrays = arrays_of(sample.operands)
    return (
        sample.expect is None
        and all(np.isfinite(a).all() for a in arrays)
        and all(kind_of(r.dtype) in "fc" for r in meant(row, sample))
    )


def check_gradients(every: list[tuple[Row, list[Sample]]]) -> None:
    """Against differences; halves roughly. The view forms, too."""
    calls: list[tuple[Callable[..., Any], Sample, list[int], list[Array]]] = []
    rows = []
    for row, sample in ((row, sample) for row, samples in every for sample in samples):
        gs = [given_gradient(i, r) for i, r in enumerate(meant(row, sample))]
        forms = [row.build or row.op, *([function_of(row.inplace.name)] if row.inplace and row.inplace.view else [])]
        calls += [(form, sample, wanted_of(row, sample), gs) for form in forms]
        rows += [row] * len(forms)
    for row, (_, sample, wanted, gs), found in zip(rows, calls, gradients(calls), strict=True):
        expected = differences(row, sample, wanted, gs)
        for g, wish in zip(found, expected, strict=True):
            near = max(row.tolerance, 2e-5, *(5 * APART.get(a.dtype, 0) for a in (g, gs[0])))
            found_slopes = directions(g.size) @ plain(g.ravel())
            np.testing.assert_allclose(found_slopes, wish, rtol=near, atol=near, err_msg=f"{row.name}{sample}")


def given_gradient(seed: int, like: Array) -> Array:
    """A gradient for a result."""
    random = np.random.default_rng(seed)
    g = random.uniform(-2, 2, like.shape)
    return (g + 1j * random.uniform(-2, 2, like.shape) if like.dtype.kind == "c" else g).astype(like.dtype)


def wanted_of(row: Row, sample: Sample) -> list[int]:
    """The operands whose gradients are asked for."""
    arrays = arrays_of(sample.operands)
    return [i for i in row.differentiable if i < len(arrays) and kind_of(arrays[i].dtype) in "fc"]


def with_gradient(row: Row, samples: list[Sample]) -> list[Sample]:
    """Those of the samples whose gradients differences tell."""
    return [s for s in samples if wanted_of(row, s) and smooth(row, s) and not kinked(row, s)]


def telling_gradients(row: Row) -> list[Sample]:
    """Some, also of ops that have many: what they have in common is tested by the numbers of all."""
    found = with_gradient(row, telling(row.samples))
    assert found, row
    return found[:: -(-len(found) // MOST_GRADIENTS)]


MOST_GRADIENTS = 3


def other_gradients(row: Row) -> list[Sample]:
    usual = telling_gradients(row)
    return [s for s in with_gradient(row, row.samples) if not any(s is other for other in usual)]


DIFFERENTIABLE = [row for row in ROWS if row.differentiable and not row.steps]


@batches(DIFFERENTIABLE)
def test_gradient(batch) -> None:
    check_together(check_gradients, batch, telling_gradients)


@pytest.mark.thorough
@batches([row for row in DIFFERENTIABLE if len(row.samples) > 1])
def test_gradient_of_all_samples(batch) -> None:
    if not any(map(other_gradients, batch)):
        pytest.skip("`test_gradient` has all samples of these")
    check_together(check_gradients, batch, other_gradients)


def kinked(row, sample: Sample) -> bool:
    """Samples at a place where the op has no derivative, which `rules` speak of."""
    return any((a == 0).any() for a in arrays_of(sample.operands) if kind_of(a.dtype) == "f")


def check_rules(every: list[tuple[Row, list[Rule]]]) -> None:
    calls = [
        (row.op, r, [i for i, g in enumerate(r.gives) if g is not None], [np.asarray(r.g)])
        for row, rules in every
        for r in rules
    ]
    names = [row.name for row, rules in every for _ in rules]
    for name, (_, r, _, _), found in zip(names, calls, gradients(calls), strict=True):
        for g, wish in zip(found, [g for g in r.gives if g is not None], strict=True):
            assert_close(g, wish, 1e-6, (name, r))


@batches([row for row in ROWS if row.rules])
def test_gradient_where_it_is_a_choice(batch) -> None:
    check_together(check_rules, batch, lambda row: row.rules)


@pytest.mark.parametrize("row", [row for row in ROWS if row.keeps is not None], ids=repr)
def test_what_a_gradient_keeps_alive(row) -> None:
    sample = row.samples[0]
    with popxl.Ir().main_graph:
        tensors = [t for t in flat(tensors_for(sample.operands)) if isinstance(t, popxl.Tensor)]
        graph = popxl.gcg().ir.create_graph(lambda *ts: nested(row.build or row.op, sample, ts), *tensors)
        provided = len(graph.outputs)
        info = autodiff(graph, grads_required=graph.inputs[: len(row.differentiable)])
    assert len(info.graph.inputs) - provided == row.keeps, str(info.graph)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if not row.differentiable and not row.build and row.name not in MAKE],
    ids=repr,
)
def test_no_gradient(row) -> None:
    """Autodiff says so: that none flows, or that it must not be asked for."""
    sample = row.samples[0]
    message = "which has none" if row.refused else "contains a modifying op" if row.overwrites else "Unable to provide"
    with popxl.Ir().main_graph:
        tensors = [t for t in flat(tensors_for(sample.operands)) if isinstance(t, popxl.Tensor)]
        graph = popxl.gcg().ir.create_graph(lambda *ts: nested(row.op, sample, ts), *tensors)
        with pytest.raises(PopxlError, match=message):
            autodiff(graph)


@pytest.mark.parametrize("row", [row for row in ROWS if row.inplace and not row.inplace.view], ids=repr)
def test_no_gradient_of_an_inplace_form(row) -> None:
    sample = row.samples[0]
    with popxl.Ir().main_graph:
        tensors = [t for t in flat(tensors_for(sample.operands)) if isinstance(t, popxl.Tensor)]
        graph = popxl.gcg().ir.create_graph(lambda *ts: nested(function_of(row.inplace.name), sample, ts), *tensors)
        with pytest.raises(PopxlError, match=rf"^The graph {graph.id.replace('(', '.').replace(')', '.')} contains"):
            autodiff(graph)


# What it refuses ----------------------------------------------------------------------------------------------------

refusals = [(row, b) for row in ROWS for b in row.bad]


@pytest.mark.parametrize(("row", "refused"), refusals, ids=[f"{row}-{b.message}" for row, b in refusals])
def test_refuses(row, refused) -> None:
    """The stated error, from the op and from its in-place form; nothing is added to the graph."""
    for name in [row.name, *([row.inplace.name] if row.inplace else [])]:
        with popxl.Ir().main_graph as main:
            operands = tensors_for(refused.operands)
            before = list(main.tensors)
            with pytest.raises(refused.error, match=refused.message):
                function_of(name)(*operands, **refused.attributes)
            assert main.ops == []
            assert list(main.tensors) == before


def _forms() -> Iterator[Any]:
    for row in ROWS:
        if row.build is None and row.name not in MAKE:
            for name in [row.name, *([row.inplace.name] if row.inplace else [])]:
                yield pytest.param(row, function_of(name), id=name)


FORMS = list(_forms())


@pytest.mark.parametrize(("row", "form"), FORMS)
def test_operands_are_tensors_of_the_current_graph(row, form) -> None:
    sample = max(row.samples, key=lambda s: len(arrays_of(s.operands)))
    count = len(arrays_of(sample.operands))
    ir = popxl.Ir()
    with ir.main_graph:
        inside = [t for t in flat(tensors_for(sample.operands)) if isinstance(t, popxl.Tensor)]
    with ir.create_empty_graph():
        other = [t for t in flat(tensors_for_inputs(sample)) if isinstance(t, popxl.Tensor)]
    with pytest.raises(RuntimeError, match="There is no current graph"):
        nested(form, sample, tuple(inside))
    with ir.main_graph as main:
        for i in range(count):
            if i not in row.numbers:
                with pytest.raises(TypeError, match=r"must be a Tensor; got 2 \(int\)"):
                    nested(form, sample, (*inside[:i], 2, *inside[i + 1 :]))
            with pytest.raises(ValueError, match="is not in the main graph, the current graph"):
                nested(form, sample, (*inside[:i], other[i], *inside[i + 1 :]))
        assert main.ops == []


def tensors_for_inputs(sample: Sample) -> list[Any]:
    """Inputs of the current graph like the arrays of a sample."""
    return [popxl.graph_input(a.shape, popxl.dtype.as_dtype(a)) for a in arrays_of(sample.operands)]


@pytest.mark.parametrize(
    ("row", "form"),
    [p for p in FORMS if p.values[0].colocated and len(arrays_of(p.values[0].samples[0].operands)) > 1],
)
def test_operands_are_in_one_place(row, form) -> None:
    sample = row.samples[0]
    with popxl.Ir().main_graph:
        first, *others = (t for t in flat(tensors_for(sample.operands)) if isinstance(t, popxl.Tensor))
        here = ops.identity(first)
        with popxl.ipu(1):
            elsewhere = [ops.identity(t) for t in others]
        with pytest.raises(ValueError, match="different IPUs: 0 and 1"):
            nested(form, sample, (here, *elsewhere))
        with popxl.io_tiles():
            elsewhere = [ops.identity(t) for t in others]
        with pytest.raises(ValueError, match="different tile sets"):
            nested(form, sample, (here, *elsewhere))


# Complex numbers ----------------------------------------------------------------------------------------------------


def made_complex(value: Any) -> Any:
    """An operand with complex numbers for floats of several elements; single ones are factors, and lengths."""
    if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
        return [made_complex(v) for v in value]
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.size == 1:
        return value
    return np.stack([value, np.roll(value, 1)], -1).view(np.complex64)[..., 0]


def complex_sample(row: Row) -> Sample | None:
    """A sample of a row that speaks of real numbers, made complex."""
    for sample in row.samples:
        operands = tuple(map(made_complex, sample.operands))
        arrays = arrays_of(operands)
        usual = {np.dtype(name) for name in ("complex64", "float32", "int32", "uint32", "bool")}
        if sample.expect is None and any(a.dtype == "complex64" for a in arrays) and {a.dtype for a in arrays} <= usual:
            if not any(a.dtype == "complex64" for a in arrays_of(sample.operands)):
                return Sample(operands, sample.attributes)
    return None


OF_COMPLEX = {
    row.name: (row, sample)
    for row in ROWS
    if (sample := complex_sample(row)) and row not in FLOAT8 and not row.build and row.name not in MAKE
}
REFUSING_COMPLEX = set(
    "ceil floor erf softplus gelu geluerf relu sign fmod greater greater_equal less less_equal clip increment_mod "
    "maximum minimum max min sumsquare l1 l2 std var logsumexp median lamb_square argmax argmin topk histogram softmax "
    "log_softmax attention nll_loss nll_loss_with_softmax_grad linear_cross_entropy batch_norm_inference group_norm "
    "layer_norm conv conv_transpose max_pool roi_align interpolate accumulate_square_ adam_updater "
    "accumulate_moving_average_square_ lamb_updater adamax_updater adam_var_update complex polar view_as_complex rfft "
    "cast".split()
)
"""Those that need an order, or the square of a length, or would make real numbers of complex ones."""


@pytest.mark.parametrize("name", [name for name in OF_COMPLEX if name in REFUSING_COMPLEX])
def test_refuses_complex_numbers(name) -> None:
    row, sample = OF_COMPLEX[name]
    with popxl.Ir().main_graph as main:
        operands = tensors_for(sample.operands)
        with pytest.raises((TypeError, PopxlError), match="complex|real numbers alone"):
            row.op(*operands, **sample.attributes)
        assert main.ops == []


COMPLEX_ROWS = [row for name, (row, _) in OF_COMPLEX.items() if name not in REFUSING_COMPLEX]


@pytest.mark.filterwarnings("ignore::popxl.errors.RepeatedSeedWarning")  # of rows that train nothing
def test_numbers_of_complex_numbers() -> None:
    """All other ops take them, and mean what NumPy means."""
    check_together(check_numbers, COMPLEX_ROWS, lambda row: [OF_COMPLEX[row.name][1]])


def test_gradients_of_complex_numbers() -> None:
    rows = [row for row in COMPLEX_ROWS if row.differentiable and not row.steps]
    check_together(check_gradients, rows, lambda row: with_gradient(row, [OF_COMPLEX[row.name][1]]))


# What concerns several ops ------------------------------------------------------------------------------------------

F8 = pytest.mark.parametrize("f8", [popxl.float8_143, popxl.float8_152], ids=lambda dtype: dtype.name)


@pytest.mark.compiled_whole
@F8
def test_float8_is_moved_byte_by_byte(f8) -> None:
    """NaN included. Every bit pattern goes through each op that moves elements."""
    every = np.arange(256, dtype=np.uint8)
    moves: list[tuple[Callable[[Any], Any], Callable[[Array], Array]]] = [
        (lambda t: ops.concat([t[:5], t]), lambda a: np.concatenate([a[:5], a])),
        (lambda t: ops.concat_([t, ops.identity(t)]), lambda a: np.concatenate([a, a])),
        (lambda t: ops.gather(t, popxl.constant([7, 255, 7])), lambda a: a[[7, 255, 7]]),
        (ops.detach, lambda a: a),
        (lambda t: ops.transpose(ops.reshape(t, (2, 128))), lambda a: a.reshape(2, 128).T),
        (lambda t: ops.transpose_(ops.reshape_(t, (2, 128))), lambda a: a.reshape(2, 128).T),
        (lambda t: ops.slice(t, 200, 100, -1), lambda a: a[200:100:-1]),
        (lambda t: ops.flatten(ops.slice_(t, -30)), lambda a: a[-30:]),
        (lambda t: ops.squeeze(ops.reshape(t, (1, 256))), lambda a: a),
        (lambda t: ops.subsample(t, 3), lambda a: a[::3]),
        (lambda t: ops.call(popxl.gcg().ir.create_graph(lambda t: t[3:], t), t)[0], lambda a: a[3:]),
    ]
    results = evaluate(lambda t: [move(t) for move, _ in moves], every.view(f8.as_numpy()))
    for result, (_, meaning) in zip(results, moves, strict=True):
        assert result.dtype == f8.as_numpy()
        np.testing.assert_array_equal(result.view(np.uint8), meaning(every))


@pytest.mark.compiled_whole
@F8
def test_float8_through_inplace_ops(f8) -> None:
    """Writing through a view of float8, and overwriting it."""

    def build(a, b):
        with popxl.in_sequence():
            ops.var_updates.copy_var_update_(
                ops.slice_(ops.reshape_(a, (4, 64)), 1, 3, axis=0), ops.reshape(b, (2, 64))
            )
        return a

    every = np.arange(256, dtype=np.uint8)
    (result,) = evaluate(build, every.view(f8.as_numpy()), every[:128].view(f8.as_numpy()))
    expected = np.concatenate([every[:64], every[:128], every[192:]])
    np.testing.assert_array_equal(result.view(np.uint8), expected)


def test_two_float8_dtypes_do_not_mix() -> None:
    with popxl.Ir().main_graph:
        a, b = (ops.init((2,), dtype) for dtype in (popxl.float8_143, popxl.float8_152))
        with pytest.raises(TypeError, match="^All inputs to a concat operation must have the same type"):
            ops.concat([a, b])
        with pytest.raises(TypeError, match="`t` is float8_143"):
            ops.cast(a, popxl.float16)


@pytest.mark.parametrize(
    "build",
    [
        lambda t, s: [op(s) for op in (ops.abs, ops.swish, ops.relu, ops.lamb_square, ops.exp, ops.log, ops.gelu)],
        lambda t, s: [op(t) for op in (ops.abs, ops.swish, ops.relu, ops.lamb_square, ops.sqrt, ops.tanh, ops.sin)],
        lambda t, s: [op(t) for op in (ops.swish_, ops.relu_, ops.exp_, ops.gelu_, ops.isnan, ops.isinf, ops.isfinite)],
        lambda t, s: [ops.div(s, s), ops.fmod(s, s), ops.increment_mod(s, 1.5, 2), ops.increment_mod_(s, 1, 3)],
        lambda t, s: [ops.gather(t, s), ops.greater(t, t), ops.equal(t, ops.cast(t, popxl.float32)), ops.log2(t)],
        lambda t, s: [op(t, axis=0) for op in (ops.l2, ops.logsum, ops.logsumexp, ops.mean, ops.median)],
        lambda t, s: [ops.greater(ops.cast(t, popxl.float16), t), ops.softmax(t, -1), ops.clip(t, 0.5)],
        lambda t, s: [ops.var_updates.accumulate_(t, t, 0.5), ops.scaled_add(t, t, 0.5), ops.scaled_add_(t, t, b=0.1)],
        lambda t, s: [ops.scaled_add(t, ops.cast(s, popxl.float16)), ops.add_(s, t), ops.pow(t, 2), 2 - t, t % 2],
        lambda t, s: ops.nll_loss_with_softmax_grad(*[ops.cast(v, popxl.float32) for v in (t, t[:, 0])]),
        lambda t, s: [
            ops.matmul(f, f, output_type=popxl.float16, partials_type=partials)
            for f in [ops.cast(t[0], popxl.float32)]
            for partials in (popxl.float16, popxl.float32)
        ],
        lambda t, s: [ops.gather(t, ops.cast(t, popxl.float32)), ops.ipu_copy(ops.identity(t), 0)],
    ],
)
def test_builds_what_is_not_run(build) -> None:
    """Programs that are only built say many things; dtypes and extents are not judged before they have to be."""
    with popxl.Ir().main_graph:
        matrix, scalar = popxl.variable([[1, 2, 3], [4, 5, 6]]), popxl.variable(1)
        assert matrix.dtype is scalar.dtype is popxl.int32
        results = build(matrix, scalar)
        assert all(isinstance(t, popxl.Tensor) for t in results)


def test_integers_of_numpy() -> None:
    """They are as good as Python's wherever an argument is an integer; attributes hold Python's."""
    one, two, three = np.int64(1), np.int32(2), np.array(3)
    pairs: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda t: ops.sum(t, one), lambda t: ops.sum(t, 1)),
        (lambda t: ops.max(t, np.array([0, 1])), lambda t: ops.max(t, (0, 1))),
        (lambda t: ops.slice(t, np.int64(0), one), lambda t: ops.slice(t, 0, 1)),
        (
            lambda t: ops.slice(t, [None, two], [one, None], axis=(one, 0)),
            lambda t: ops.slice(t, (None, 2), (1, None), axis=(1, 0)),
        ),
        (lambda t: ops.slice_(t, step=np.int64(-1), axis=one), lambda t: ops.slice_(t, step=-1, axis=1)),
        (lambda t: ops.split(t, three, np.int64(0)), lambda t: ops.split(t, 3)),
        (lambda t: ops.split(t, np.array([1, 2])), lambda t: ops.split(t, [1, 2])),
        (lambda t: ops.subsample(t, two), lambda t: ops.subsample(t, 2)),
        (lambda t: ops.concat([t, t], one), lambda t: ops.concat([t, t], 1)),
        (lambda t: ops.softmax(t, one), lambda t: ops.softmax(t, 1)),
        (lambda t: ops.gather(t, t, one), lambda t: ops.gather(t, t, 1)),
        (
            lambda t: ops.squeeze(ops.reshape(t, np.array([3, 1, -1])), [one]),
            lambda t: ops.squeeze(ops.reshape(t, (3, 1, -1)), [1]),
        ),
        (lambda t: ops.transpose(t, np.array([1, 0])), lambda t: ops.transpose(t, (1, 0))),
    ]
    texts = []
    for side in (0, 1):
        with popxl.Ir().main_graph as main:
            t = popxl.variable(np.arange(6, dtype=np.int32).reshape(3, 2), name="t")
            for pair in pairs:
                pair[side](t)
        texts.append([str(main), [{**op.attributes} for op in main.ops]])
    assert texts[0] == texts[1] and "int64" not in repr(texts[0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda t: ops.sum(t, 1.0), "sum: `axis` must be an integer or a sequence of integers; got 1.0 (float)."),
        (lambda t: ops.max(t, [0, 1.0]), "max: `axis` must hold integers; got 1.0 (float)."),
        (lambda t: ops.slice(t, 0.0), "slice: `start` must be an integer or a sequence of integers; got 0.0 (float)."),
        (lambda t: ops.slice(t, 0, [1.5]), "slice: `stop` must hold integers"),
        (lambda t: ops.slice(t, step=1.0), "slice: `step`"),
        (lambda t: ops.slice(t, [0], axis=[None]), "slice: `axis` must hold integers"),
        (lambda t: ops.slice_(t, 0, axis=0.0), "slice: `axis`"),
        (lambda t: ops.split(t, 3.0), "split: `splits` must be an integer or a sequence of integers; got 3.0 (float)."),
        (lambda t: ops.split(t, [1, 2.0]), "split: `splits` must hold integers"),
        (lambda t: ops.split(t, 3, 0.0), "split: `axis` must be an integer; got 0.0 (float)."),
        (lambda t: ops.subsample(t, 2.0), "subsample: `strides` must be an integer or a sequence of integers"),
        (lambda t: ops.subsample(t, "2"), "subsample: `strides` must hold integers"),
        (lambda t: ops.concat([t, t], None), "concat: `axis` must be an integer; got None (NoneType)."),
        (lambda t: ops.concat_([t, t], 0.0), "concat_: `axis`"),
        (lambda t: ops.softmax(t, 1.0), "softmax: `axis`"),
        (lambda t: ops.gather(t, t, 0.0), "gather: `axis`"),
        (lambda t: ops.reshape_(t, 6), "reshape: `shape` must be a sequence of integers; got 6 (int)."),
        (lambda t: ops.squeeze(t, 0), "squeeze: `axes` must be a sequence of integers; got 0 (int)."),
        (lambda t: ops.transpose(t, 1), "transpose: `permutation` must be a sequence of integers; got 1 (int)."),
        (lambda t: ops.transpose(t, (1.0, 0)), "transpose: `permutation` must hold integers"),
    ],
)
def test_what_is_no_integer(build, message) -> None:
    with popxl.Ir().main_graph as main:
        t = popxl.variable(values("float32", (3, 2)))
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            build(t)
        assert main.ops == []


@pytest.mark.parametrize("dtype", [np.float32, "float32", np.dtype("float32"), None], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: popxl.h2d_stream((2,), dtype, "x"),
        lambda dtype: popxl.d2h_stream((2,), dtype, "x"),
        lambda dtype: popxl.graph_input((2,), dtype, "x"),
        lambda dtype: ops.init((2,), dtype, "x"),
    ],
    ids=["h2d_stream", "d2h_stream", "graph_input", "init"],
)
def test_dtypes_are_ours(make, dtype) -> None:
    """What NumPy calls a dtype is refused where it is said, and leaves nothing behind."""
    ir = popxl.Ir()
    with ir.main_graph, ir.create_empty_graph() as graph:
        with pytest.raises(
            TypeError, match=r"popxl dtype such as popxl\.float32; got .*(Write `popxl\.float32`|There are .*)\."
        ):
            make(dtype)
        assert not (graph.ops or graph.inputs or graph.tensors or ir.main_graph.tensors)


# 64 bits ------------------------------------------------------------------------------------------------------------


def wide(array: Array) -> popxl.Tensor:
    return popxl.variable(array, downcast=False)


def test_casts_of_floats_to_64_bits() -> None:
    """What does not fit becomes the nearest integer that does, though no float is equal to it."""
    numbers = np.array([2.7, -2.7, 2.0**40, 1e30, -1e30, np.inf, -np.inf])

    def build() -> list[Any]:
        tensors = [wide(numbers), wide(numbers.astype(np.float32))]
        return [ops.cast(t, to) for t in tensors for to in (popxl.uint64, popxl.int64)]

    unsigned, signed = [2, 0, 2**40, 2**64 - 1, 0, 2**64 - 1, 0], [2, -2, 2**40, *[2**63 - 1, -(2**63)] * 2]
    results = evaluate(build)
    assert [r.dtype.name for r in results] == ["uint64", "int64"] * 2
    assert [r.tolist() for r in results] == [unsigned, signed] * 2


def test_clip_of_64_bits() -> None:
    """Bounds that are no float, from Python and from NumPy."""
    array = np.array([2**62 + 1, -(2**62) - 3, 5], np.int64)
    (result,) = evaluate(lambda: ops.clip(wide(array), np.int64(-(2**62) - 1), 2**62 - 1))
    assert result.tolist() == [2**62 - 1, -(2**62) - 1, 5]


@pytest.mark.parametrize("far", [np.array([2**32 + 1, -(2**32)]), np.array([2**32 + 1, 2**63], np.uint64)], ids=str)
def test_gather_with_indices_of_64_bits(far) -> None:
    """Beyond 2**32 they are out of range, for the gradient too."""
    table, indices = values("float32", (3, 2)), np.array([2, *far, 0], far.dtype)

    def build() -> list[Any]:
        ids, t = wide(indices), popxl.variable(table)
        graph = popxl.gcg().ir.create_graph(lambda t, i: ops.gather(t, i, zero_OOR=True), t, ids)
        forward = ops.call_with_info(graph, t, ids)
        back = autodiff(graph, grads_required=graph.inputs[:1])
        g = popxl.constant(np.ones((4, 2), np.float32))
        return [*forward.outputs, *ops.call(back.graph, g, inputs_dict=back.inputs_dict(forward))]

    taken, gradient = evaluate(build)
    np.testing.assert_array_equal(taken, [table[2], [0, 0], [0, 0], table[0]])
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [1, 1]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_in_double_precision(reduction) -> None:
    """To the last digits, gradients included."""
    probs, labels = np.random.default_rng(0).dirichlet(np.ones(5), 7), np.arange(7, dtype=np.int32) % 5
    rows, count = np.arange(7), 7 if reduction == "mean" else 1

    def reduced(losses: Array) -> Array:
        return losses if reduction == "none" else losses.sum() / count

    def build() -> list[Any]:
        p, y = wide(probs), popxl.variable(labels)
        graph = popxl.gcg().ir.create_graph(lambda p, y: ops.nll_loss(p, y, reduction=reduction), p, y)
        forward = ops.call_with_info(graph, p, y)
        back = autodiff(graph, grads_required=graph.inputs[:1])
        g = wide(np.full(forward.outputs[0].shape, 0.1))
        gradients = ops.call(back.graph, g, inputs_dict=back.inputs_dict(forward))
        fused = ops.nll_loss_with_softmax_grad(p, y, loss_grad=0.1, reduction=reduction)
        return [*forward.outputs, *gradients, *fused]

    picked, hot = probs[rows, labels], np.eye(5)[labels]
    expected = [reduced(-np.log(picked)), -hot / probs * 0.1 / count]
    expected += [reduced(-np.log(picked + 1e-7)), (probs - hot) * 0.1 / count]
    for result, wish in zip(evaluate(build), expected, strict=True):
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, wish, rtol=1e-13)


def test_scaled_add_broadcasts_nothing() -> None:
    """Found out when the program is compiled; it may be built."""
    with pytest.raises(PopxlError, match=r"`X` and `Y` have the shapes \(2, 3\) and \(3,\)"):
        evaluate(ops.scaled_add, values("float32", (2, 3)), values("float32", (3,)))


@pytest.mark.filterwarnings("ignore::popxl.errors.NarrowedNumberWarning")  # of 2.7 in int32
def test_operators_are_these_ops() -> None:
    """Numbers on either side, in the dtype of the tensor; only `+=` is in place."""
    x, n, m = values("float32", (2, 3)), values("int32", (3,)), np.array([True, False, True])

    def build(x: Any, n: Any, m: Any) -> list[Any]:
        y = z = x
        y -= 1
        results = [y, x + 2, 2 + x, x - 2, 2 - x, x * 2, 2 * x, x / 2, 2 / x, x % 2, 2 % x, x**2, x**2.0, 2.0**x, -x]
        results += [x @ np.ones((3, 2)), np.ones((4, 2)) @ x, np.float32([1, 2, 3]) - x, n + 2.7, n**2, n % 3]
        results += [m & True, False | m, ~m, x.T, x.reshape((3, 2)), x.flatten(), x.transpose((1, 0)), x.diag()]
        views = [x.T_, x.reshape_((3, 2)), x.flatten_(), x.transpose_((1, 0))]
        z += 1
        assert z is x
        return [*results, *views, z]

    expected = [x - 1, x + 2, 2 + x, x - 2, 2 - x, x * 2, 2 * x, x / 2, 2 / x, np.fmod(x, 2), np.fmod(2, x), x**2, x**2]
    expected += [2**x, -x, x @ np.ones((3, 2)), np.ones((4, 2)) @ x, np.float32([1, 2, 3]) - x, n + 2, n**2]
    expected += [np.fmod(n, 3), m & True, False | m, ~m, x.T, x.reshape((3, 2)), x.ravel(), x.T, np.diag(x)]
    x = x + 1
    expected += [x.T, x.reshape((3, 2)), x.ravel(), x.T, x]
    for result, wish in zip(evaluate(build, *(values("float32", (2, 3)), n, m)), expected, strict=True):
        np.testing.assert_allclose(result, wish, rtol=1e-5, atol=1e-6)
