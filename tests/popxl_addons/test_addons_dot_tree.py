"""Trees: keys, reading, writing, printing. The leaves are plain numbers; nothing here depends on what they are."""

import copy
import pickle

import numpy as np
import pytest

from popxl_addons.dot_tree import DotTree, sanitise, to_mapping


class Other(DotTree):
    pass


@pytest.fixture
def tree() -> DotTree:
    return DotTree.from_dict({"enc.w": 1, "enc.b": 2, "head": 3})


def test_reading(tree):
    assert (tree.enc.w, tree["enc.b"], tree.get("head")) == (1, 2, 3)
    assert tree.keys() == ["enc", "head"]
    assert tree.values() == [tree.enc, 3]
    assert tree.len() == 2
    assert tree.keys_flat() == ["enc.w", "enc.b", "head"]
    assert tree.values_flat() == [1, 2, 3]
    assert tree.len_flat() == 3
    assert list(tree.to_dict().items()) == [("enc.w", 1), ("enc.b", 2), ("head", 3)]
    assert list(tree.unpack()) == [("enc.b", "enc.w", "head"), (2, 1, 3)]
    assert "enc" in tree and "enc.w" in tree and "enc.x" not in tree and "head.w" not in tree


def test_mixed_construction():
    tree = DotTree(a=1, sub=DotTree(**{"0": 2}))
    tree.insert("more.deep.leaf", 3)
    tree.insert(7, 4)
    assert dict(tree.to_dict()) == {"a": 1, "sub.0": 2, "more.deep.leaf": 3, "7": 4}
    assert tree.sub["0"] == tree.sub[0] == getattr(tree.sub, "0") == 2  # noqa: B009
    assert tree._map["7"] == 4


def test_numbers_of_numpy_are_keys():
    tree = DotTree.from_dict({k: str(k) for k in np.arange(3)})
    assert tree.keys() == ["0", "1", "2"] and np.int64(2) in tree
    assert (tree[np.int64(0)], tree[np.int32(-1)]) == ("0", "2")
    with pytest.raises(ValueError, match="key -1 is negative"):
        tree.insert(np.int64(-1), "x")


def test_entries_hidden_by_methods():
    tree = DotTree(keys=1)
    assert tree["keys"] == 1
    assert tree.keys() == ["keys"]
    assert dict(DotTree.from_dict({"copy.x": 1}).to_dict()) == {"copy.x": 1}


def test_negative_keys_count_from_the_largest_number():
    tree = DotTree()
    for key, value in ((0, "p"), (1, "q"), (3, "r")):
        tree.insert(key, value)
    assert (tree[-1], tree[-3], tree[-4]) == ("r", "q", "p")
    for missing in (-2, -5):
        with pytest.raises(KeyError):
            tree[missing]
    assert -2 not in tree
    assert "-1" not in tree
    with pytest.raises(ValueError, match="no key is a number"):
        DotTree(a=1).get(-1)


@pytest.mark.parametrize("key", ["nope", "enc.nope", "head.w", "enc.w.x", "enc.", ""])
def test_missing_keys(tree, key):
    with pytest.raises(KeyError):
        tree.get(key)


def test_assigning_an_attribute_replaces_an_entry(tree):
    """As it looks: an attribute of Python's would hide the entry from who reads it as one, and from nobody else."""
    tree.head = 4
    tree.enc.w += 10
    assert dict(tree.to_dict()) == {"enc.w": 11, "enc.b": 2, "head": 4}
    tree.insert("head", 6, overwrite=True)
    assert tree.head == 6


def test_other_attributes_are_no_entries():
    class Counted(DotTree):
        count = 0

        def __init__(self, **kwargs):
            self.early = True
            super().__init__(**kwargs)

    tree = Counted(w=1)
    tree.count, tree.note = 3, "of mine"
    assert (tree.early, tree.count, tree.note, tree.keys()) == (True, 3, "of mine", ["w"])


@pytest.mark.parametrize("numbered", [{}, {0: "p", 1: "q"}])
def test_loops_are_told_what_to_go_over(numbered):
    with pytest.raises(KeyError, match=r"values_flat\(\)"):
        list(DotTree.from_dict(numbered))


def test_a_missing_key_lists_the_others(tree):
    with pytest.raises(KeyError, match=r"no 'x' here; available keys: \['w', 'b'\]"):
        tree.get("enc.x")
    with pytest.raises(AttributeError, match="no attribute or entry 'nope'"):
        _ = tree.nope
    with pytest.raises(AttributeError, match="strings or integers"):
        tree.get(1.5)


def test_attributes_are_keys(tree):
    assert getattr(tree, "enc.w") == 1  # noqa: B009
    assert not hasattr(tree, "enc.x") and not hasattr(tree, "-1")


def test_trees_can_be_copied_and_pickled_by_python(tree):
    for other in (copy.copy(tree), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert other.to_dict() == tree.to_dict()


def test_a_tree_that_is_filled_after_it_was_inserted():
    variables, part = DotTree(), DotTree()
    variables.insert("transformer", part)
    for i in range(2):
        part.insert(f"decoder.{i}.fwd", DotTree(w=i), overwrite=True)
    assert variables.keys_flat() == ["transformer.decoder.0.fwd.w", "transformer.decoder.1.fwd.w"]
    assert variables.transformer.decoder[1].fwd.w == 1


def test_identity(tree):
    assert tree != tree.copy()
    assert tree.copy().to_dict() == tree.to_dict()
    assert bool(DotTree())
    with pytest.raises(TypeError):
        len(tree)
    with pytest.raises(KeyError):
        list(tree)


def test_unpack_sorts_flat_names_as_text():
    names, leaves = DotTree.from_dict({"a1": 1, "a.z": 2}).unpack()
    assert (names, leaves) == (("a.z", "a1"), (2, 1))
    assert DotTree().unpack() == ([], [])
    assert list(zip(*DotTree().unpack(), strict=True)) == []
    assert DotTree.pack(["x", "y.z"], [1, 2, 3]).to_dict() == {"x": 1, "y.z": 2}


@pytest.mark.parametrize("key", ["", "a b", "x-y", ".a", "a..b", "a.", "a.x-y"])
def test_invalid_keys(key):
    with pytest.raises(ValueError, match="neither an identifier nor a number"):
        DotTree().insert(key, 1)
    with pytest.raises(ValueError):
        DotTree.from_dict({key: 1})


def test_keywords_are_valid_keys():
    assert DotTree.from_dict({"class": 1})["class"] == 1


def test_from_dict_conflicts():
    with pytest.raises(ValueError, match="'0' already exists"):
        DotTree.from_dict({0: "a", "0": "b"})
    with pytest.raises(AttributeError, match="'a' is a leaf"):
        DotTree.from_dict({"a": 1, "a.b": 2})
    with pytest.raises(ValueError):
        DotTree.from_dict({-1: "a"})


def test_from_dict_with_trees():
    inner = DotTree(x=1)
    tree = DotTree.from_dict({0: inner, "dec.1": inner})
    assert tree[0] is inner
    inner.insert("y", 2)
    assert tree.keys_flat() == ["0.x", "0.y", "dec.1.x", "dec.1.y"]
    merged = DotTree.from_dict({"a": inner, "a.z": 3})
    assert merged.keys_flat() == ["a.x", "a.y", "a.z"]
    assert inner.keys() == ["x", "y"]


def test_insert():
    tree = DotTree()
    tree.insert("blk.w", 1)
    with pytest.raises(ValueError, match="'blk' already exists"):
        tree.insert("blk.b", 2)
    before = tree.blk
    tree.insert("blk.b", 2, overwrite=True)
    assert tree.to_dict() == {"blk.w": 1, "blk.b": 2}
    assert before.keys() == ["w"]
    tree.insert("blk", DotTree(c=3), overwrite=True)
    assert tree.to_dict() == {"blk.c": 3}
    tree.insert("blk.c.d", 4, overwrite=True)
    assert tree.to_dict() == {"blk.c.d": 4}
    with pytest.raises(ValueError, match="negative"):
        tree.insert(-1, 0)


def test_a_failed_insert_changes_nothing(tree):
    before = tree.enc
    with pytest.raises(ValueError):
        tree.insert("enc.x-y", 1, overwrite=True)
    with pytest.raises(ValueError):
        tree.insert("new.x-y", 1)
    assert tree.enc is before
    assert tree.keys_flat() == ["enc.w", "enc.b", "head"]


def test_update(tree):
    more = DotTree.from_dict({"dec.w": 4})
    tree.update(more)
    more.dec.insert("b", 5)
    assert tree.keys_flat() == ["enc.w", "enc.b", "head", "dec.w"]
    with pytest.raises(ValueError, match="'head' already exists"):
        tree.update(DotTree(fresh=1, head=2))
    assert tree.fresh == 1
    tree.update(DotTree.from_dict({"enc.x": 6}), overwrite=True)
    assert tree.enc.keys() == ["x"]


def test_update_takes_trees(tree):
    with pytest.raises(TypeError, match="`values` is a dict, expected a tree.*DotTree.from_dict"):
        tree.update({"b": 2})


def test_pop(tree):
    holder = tree.enc
    assert tree.pop("enc.w") == 1
    assert holder.keys() == ["b"]
    assert tree.enc.pop("b") == 2
    assert tree.keys() == ["enc", "head"]
    assert tree.pop("head") == 3
    for missing in ("head", "enc.w", "no.where", "-1"):
        with pytest.raises(KeyError):
            tree.pop(missing)
    tree.insert("leaf", 4)
    with pytest.raises(KeyError, match="'leaf' is a leaf"):
        tree.pop("leaf.w")
    with pytest.raises(AttributeError, match="must be a string"):
        tree.pop(0)


def test_copy_filter_and_map(tree):
    copy = tree.copy()
    copy.enc.insert("x", 4)
    assert "enc.x" not in tree
    assert tree.map(lambda leaf: leaf * 10).values_flat() == [10, 20, 30]

    tree.insert("foo.bar.hee", 5)
    tree.insert("foo.bar.hoo", 6, overwrite=True)
    filtered = tree.filter_keys(["foo.bar.hee", "head"])
    assert filtered.to_dict() == {"foo.bar.hee": 5, "head": 3}
    assert filtered.len() == 2
    assert tree.filter_keys(["enc"]).enc is tree.enc
    with pytest.raises(KeyError):
        tree.filter_keys(["enc.nope"])
    with pytest.raises(ValueError, match=r"repeated: \['0'\]"):
        DotTree.from_dict({0: 1}).filter_keys([0, "0"])


def test_clear_keeps_the_subtrees(tree):
    inner = tree.enc
    tree._clear()
    assert tree.keys() == ["enc"]
    assert tree.enc is inner and inner.len() == 0


class Third(DotTree):
    pass


def test_subtrees_of_another_class():
    tree = Third(other=Other(x=1))
    assert tree.other.x == 1
    assert tree.keys_flat() == ["other.x"]
    assert isinstance(tree.copy().other, Other)
    assert tree.get("other") is tree.other
    with pytest.raises(KeyError, match="'other' is a Other, which is asked by itself"):
        tree.get("other.x")
    assert "other.x" not in tree
    assert Other.from_dict({"a.b": 1}).a.__class__ is Other

    tree.insert("other.y", 2, overwrite=True)  # merges, as into any subtree
    assert isinstance(tree.other, Other) and tree.keys_flat() == ["other.x", "other.y"]
    assert tree.pop("other.x") == 1
    assert tree.map(str).other.y == "2"
    tree._clear()
    assert isinstance(tree.other, Other) and tree.keys_flat() == []
    assert Third.from_dict({"o": Other(x=1), "o.y": 2}).keys_flat() == ["o.x", "o.y"]


def test_to_mapping():
    mine, theirs = DotTree.from_dict({"a": "x", "b": "y"}), DotTree.from_dict({"b": 1, "c": 2})
    assert mine.to_mapping(theirs) == to_mapping(mine, theirs) == {"y": 1}


def test_printing(tree):
    assert repr(tree) == str(tree) == "DotTree({\nenc.w: 1,\nenc.b: 2,\nhead: 3,\n})"
    assert repr(Other()) == "Other({})"


@pytest.mark.parametrize(
    "name, expected", [("a/b.c 1", "a_b_c_1"), ("1x", "_1x"), ("word_embedding", "word_embedding"), ("é²", "é_")]
)
def test_sanitise(name, expected):
    assert sanitise(name) == expected
