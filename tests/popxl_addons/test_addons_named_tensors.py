"""Trees of tensors."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.named_tensors import NamedTensorData, NamedTensors, TensorMap, print_named_tensors


@pytest.fixture
def wbc(ir):
    return [popxl.variable(i, popxl.float32, name) for i, name in enumerate("wbc")]


def test_the_tree_of_the_specification(wbc):
    w, b, c = wbc
    nt = addons.NamedTensors.pack(["w", "b"], [w, b])
    nt.insert("extra.c", c)
    assert nt.named_tensors == {"w": w, "b": b, "extra.c": c}
    assert type(nt.named_tensors) is dict
    names, tensors = nt.unpack()
    assert names == ("b", "extra.c", "w")
    assert tensors == (b, c, w)


def test_tensors_are_sorted_by_their_own_names(ir):
    bias, weight, second = (popxl.variable(0.0, name=name) for name in ("bias", "weight", "bias"))
    nt = NamedTensors.from_dict({"a.weight": weight, "z.bias": bias, "b.bias": second})
    assert second.name == "bias__t0"
    assert nt.tensors == (bias, second, weight)
    assert repr(nt.tensors).startswith("(Variable[bias popxl.dtypes.float32 ()], Variable[bias__t0 ")


def test_leaves_that_are_no_tensors_are_named():
    with pytest.raises(TypeError, match=r"NamedTensors.tensors: \['a', 'c'\] are no tensors"):
        _ = NamedTensors(a=np.ones(2), c=[3]).tensors


def test_remap(wbc):
    w, b, c = wbc
    nt = NamedTensors.from_dict({"x": w, "sub.y": b})
    mapping: TensorMap = {w: c, b: b}
    remapped = nt.remap(mapping)
    assert remapped.x == c and remapped.sub.y == b and type(remapped) is NamedTensors
    with pytest.raises(KeyError, match="sub.y"):
        nt.remap({w: c})


def test_printing(wbc):
    nt = NamedTensors.pack(["w", "deep.b"], wbc)
    assert repr(nt) == (
        "NamedTensors({\nw: Variable[w popxl.dtypes.float32 ()],\ndeep.b: Variable[b popxl.dtypes.float32 ()],\n})"
    )
    assert repr(NamedTensors()) == "NamedTensors({})"


def test_print_named_tensors(wbc, evaluate, capfd):
    w, b, _ = wbc
    printed = print_named_tensors(NamedTensors.from_dict({"first": w, "deep.second": b}))
    assert printed.keys_flat() == ["first", "deep.second"]
    assert printed.deep.second != b
    values = evaluate(*printed.values_flat())
    np.testing.assert_array_equal(values, [0, 1])
    text = capfd.readouterr().err
    assert "first" in text and "deep.second" in text


def test_named_tensor_data():
    data = NamedTensorData.from_dict({"a.w": np.ones(2)})
    assert data.map(lambda array: array * 3).a.w.tolist() == [3, 3]
