"""Trees of groupings, and groups kept within a process or a link domain."""

import warnings

import pytest

import popxl
from popxl_addons.named_replica_grouping import (
    NamedReplicaGrouping,
    fill_none_group,
    get_ild_replica_grouping,
    get_ild_size_from_popdist,
    get_instance_replica_grouping,
    is_cross_ild,
    is_cross_instance,
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("POPLAR_TARGET_OPTIONS", raising=False)


def link_domain(monkeypatch, size):
    monkeypatch.setenv("POPLAR_TARGET_OPTIONS", f'{{"ipuLinkDomainSize": "{size}", "other": 1}}')


@pytest.fixture
def ir():
    ir = popxl.Ir(replication=8)
    with ir.main_graph:
        yield ir


@pytest.fixture
def two_instances():
    """An Ir of 8 replicas, of which each of two processes drives 4."""
    ir = popxl.Ir(replication=4)
    ir.options.enableDistributedReplicatedGraphs = True
    ir.options.globalReplicationFactor = 8
    with ir.main_graph:
        assert (ir.replication_factor, ir.instance_replication_factor) == (8, 4)
        yield ir


def test_trees(ir):
    pairs, everyone = ir.replica_grouping(group_size=2), ir.replica_grouping()
    groups = NamedReplicaGrouping.build_groups(["w", "fc.b"], pairs)
    assert type(groups) is NamedReplicaGrouping
    assert groups.keys_flat() == ["w", "fc.b"] and groups.fc.b is pairs
    more = groups.copy()
    more.insert("fc.w", everyone, overwrite=True)
    assert "fc.w" not in groups and more.filter_keys(["fc.w", "w"]).fc.w is everyone
    assert "num_groups=4" in repr(groups)


def test_groups_that_were_not_given(ir):
    pairs = ir.replica_grouping(group_size=2)
    assert fill_none_group(None, pairs) is pairs
    assert fill_none_group(pairs, None) is pairs
    assert fill_none_group(None, None) is None
    assert all(bool(group) for group in (pairs, ir.replica_grouping(), ir.replica_grouping(group_size=1)))


def test_one_process_keeps_every_grouping(ir):
    uneven = ir.replica_grouping_from_assignments([0, 1, 1, 0, 2, 2, 3, 3])
    for group in (ir.replica_grouping(), ir.replica_grouping(stride=4), uneven):
        assert get_instance_replica_grouping(group) is group
        assert get_ild_replica_grouping(group) is group
        assert not is_cross_instance(group) and not is_cross_ild(group)
    assert get_instance_replica_grouping() == get_ild_replica_grouping() == ir.replica_grouping()


@pytest.mark.parametrize(
    "stride, size, crosses, cut",
    [
        (1, 8, True, (1, 4)),
        (2, 4, True, (2, 2)),
        (4, 2, True, (4, 1)),
        (1, 4, False, None),
        (2, 2, False, None),
        (1, 2, False, None),
        (1, 1, False, None),
    ],
)
@pytest.mark.parametrize("domain", ["instance", "ild"])
def test_several_domains(two_instances, monkeypatch, domain, stride, size, crosses, cut):
    link_domain(monkeypatch, 4)
    within, across = {
        "instance": (get_instance_replica_grouping, is_cross_instance),
        "ild": (get_ild_replica_grouping, is_cross_ild),
    }[domain]
    group = two_instances.replica_grouping(stride, size)
    assert across(group) is crosses
    assert within(group) == (two_instances.replica_grouping(*cut) if cut else group)
    if not crosses:
        assert within(group) is group


def test_neighbours_in_different_domains(two_instances, monkeypatch):
    link_domain(monkeypatch, 2)
    group = two_instances.replica_grouping(stride=4)
    with pytest.raises(ValueError, match="Assignment pattern is different across link domains: .* 4 replicas apart"):
        get_ild_replica_grouping(group)
    two_instances.options.replicatedGraphCount = 2
    with pytest.raises(ValueError, match="Assignment pattern is different across instances"):
        get_instance_replica_grouping(group)


def test_groups_have_to_be_constant_where_it_matters(two_instances):
    group = two_instances.replica_grouping_from_assignments([0, 1, 1, 0, 2, 2, 3, 3])
    with pytest.raises(NotImplementedError, match="not constant"):
        get_instance_replica_grouping(group)


def test_the_size_of_a_link_domain(ir, monkeypatch):
    assert get_ild_size_from_popdist() == 8
    link_domain(monkeypatch, 16)
    assert get_ild_size_from_popdist() == 16
    monkeypatch.setenv("POPLAR_TARGET_OPTIONS", '{"other": 1}')
    assert get_ild_size_from_popdist() == 8
    for wrong in ("nonsense", "[]", '{"ipuLinkDomainSize": 0}'):
        monkeypatch.setenv("POPLAR_TARGET_OPTIONS", wrong)
        with pytest.raises(ValueError):
            get_ild_size_from_popdist()


def test_at_most_64_replicas_are_taken_to_be_linked():
    ir = popxl.Ir(replication=128)
    with ir.main_graph:
        assert get_ild_size_from_popdist() == 64
        assert get_ild_replica_grouping().assignment == [0] * 64 + [1] * 64
        assert is_cross_ild(ir.replica_grouping())


def test_an_assumed_size_is_told_once(two_instances):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            assert get_ild_size_from_popdist() == 8
    assert [str(w.message).split(":")[0] for w in seen] == ["The size of a link domain is not known"]


def test_a_graph_has_to_be_current():
    group = popxl.Ir(replication=2).replica_grouping()
    for use in (get_instance_replica_grouping, get_ild_replica_grouping, is_cross_instance, is_cross_ild):
        with pytest.raises(RuntimeError, match="no current graph"):
            use(group)
