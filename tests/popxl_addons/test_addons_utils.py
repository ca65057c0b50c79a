"""The small helpers."""

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import popxl
from popxl_addons.utils import (
    OrderedDict,
    WeightsDict,
    duplicate_items,
    null_context,
    overrides,
    suffix_graph_name,
    timer,
)


def test_ordered_dict_prints_one_item_a_line():
    d = OrderedDict([("w", 1), ("b", "two")])
    assert repr(d) == str(d) == "{\nw: 1,\nb: two,\n}"
    assert repr(OrderedDict()) == "{}"


def test_ordered_dict_positions():
    d = OrderedDict(a=1, b=2, c=3)
    assert (d.idx(0), d.idx(2), d.idx(-1), d.idx(idx=-3)) == (1, 3, 3, 1)
    for outside in (3, -4):
        with pytest.raises(IndexError, match="3 items"):
            d.idx(outside)


def test_ordered_dict_keys_look_like_those_of_a_dict():
    d = OrderedDict(a=1, b=2)
    assert str(d.keys()) == "dict_keys(['a', 'b'])"
    assert d.keys() == {"a", "b"} and "a" in d.keys() and len(d.keys()) == 2
    assert list(reversed(d.keys())) == ["b", "a"]
    d.move_to_end("a")
    assert list(d.keys()) == list(d) == ["b", "a"]
    assert dict(d) == {**d} == {"b": 2, "a": 1}


def test_weights_dict(ir):
    w = popxl.variable(np.zeros((2, 3)), popxl.float32, "w")
    b = popxl.variable(np.zeros(3), popxl.float16, "b")
    weights = WeightsDict({w: np.ones((2, 3), np.float32)})
    weights.update({b: np.ones(3, np.float16)})
    assert list(weights) == [w, b] and len(weights) == 2
    assert weights[b].dtype == np.float16
    with pytest.raises(ValueError, match="`b` is of float32, expected float16"):
        weights[b] = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"`w` has shape \(3, 2\), expected \(2, 3\)"):
        weights[w] = np.ones((3, 2), np.float32)
    del weights[w]
    assert w not in weights
    with pytest.raises(ValueError):
        WeightsDict({w: np.ones(4, np.float32)})


def test_weights_dict_of_a_grouped_variable():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        v = popxl.variable(np.zeros((2, 3), np.float32), name="v", replica_grouping=ir.replica_grouping(group_size=2))
    weights = WeightsDict({v: np.ones((2, 3), np.float32)})
    with pytest.raises(ValueError, match=r"expected \(2, 3\)"):
        weights[v] = np.ones(3, np.float32)


def test_weights_dict_can_be_written(ir):
    w = popxl.variable(np.zeros(3), popxl.float32, "w")
    out = popxl.d2h_stream((3,), popxl.float32)
    popxl.ops.host_store(out, w * 2.0)
    with popxl.Session(ir, "cpu") as session:
        session.write_variables_data(WeightsDict({w: np.array([1, 2, 3], np.float32)}))
        np.testing.assert_array_equal(session.run()[out], [2, 4, 6])


def test_timer_logs_minutes(caplog):
    with caplog.at_level(logging.INFO):
        with timer("Build It"):
            pass
        with timer():
            pass
    assert caplog.messages == ["Starting Build It", "Build It duration: 0.00 mins", "Duration: 0.00 mins"]


def test_timer_logs_no_duration_after_an_exception(caplog):
    with caplog.at_level(logging.INFO), pytest.raises(KeyError), timer("Build"):
        raise KeyError
    assert caplog.messages == ["Starting Build"]


def test_timer_tells_wandb(monkeypatch):
    summary = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(summary=summary)))
    with timer("Graph Building"):
        pass
    with timer("Quiet", log_to_wandb=False):
        pass
    with timer():
        pass
    assert list(summary) == ["graph_building_mins"]
    for no_run in (SimpleNamespace(run=None), SimpleNamespace()):  # the latter is a folder of that name
        monkeypatch.setitem(sys.modules, "wandb", no_run)
        with timer("No run"):
            pass


def test_null_context():
    with null_context() as value:
        assert value is None
    with pytest.raises(KeyError, match="passed on"), null_context():
        raise KeyError("passed on")


@pytest.mark.parametrize(
    "name, expected",
    [("Net_subgraph(3)_bwd", "Net_bwd_recomp"), ("f.g_subgraph(12)", "f.g_recomp"), ("plain", "plain_recomp")],
)
def test_suffix_graph_name(name, expected):
    assert suffix_graph_name(name, "recomp") == expected


def test_overrides():
    class Base:
        def f(self): ...

    class Same(Base): ...

    class Own(Base):
        def f(self): ...

    class Inherited(Own): ...

    assert [overrides(cls, Base, "f") for cls in (Base, Same, Own, Inherited)] == [False, False, True, True]


def test_duplicate_items():
    assert duplicate_items([3, 1, 3, 2, 1]) == [3, 1]
    assert duplicate_items("abc") == []
