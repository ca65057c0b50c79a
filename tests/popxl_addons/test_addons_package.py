"""What the package offers, and whether the examples in its documentation are true."""

import doctest
import importlib
import inspect
import pkgutil

import numpy as np
import pytest

import popxl
import popxl_addons as addons

MODULES = sorted(module.name for module in pkgutil.walk_packages(addons.__path__, "popxl_addons."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"np": np, "popxl": popxl, "addons": addons})
    assert results == (0, inspect.getsource(module).count(">>> ")), "some examples fail, or were not found"


@pytest.mark.parametrize("name", [name for name in addons.__all__ if name != "GIT_COMMIT"])  # a text, or None
def test_everything_public_is_documented(name):
    assert getattr(addons, name).__doc__


def test_submodules_are_attributes():
    for name in ("dot_tree", "graph", "module", "named_tensors", "ops", "streams", "transforms", "utils"):
        assert getattr(addons, name) is importlib.import_module(f"popxl_addons.{name}")
    assert addons.ops is not popxl.ops
