"""What the package offers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (torch may not be there)


def test_allclose() -> None:
    pair = [torch.ones(2), (torch.zeros(3),)]
    assert poptorch.testing.allclose(pair, [torch.ones(2) + 1e-7, (torch.zeros(3),)])
    assert not poptorch.testing.allclose(pair, [torch.ones(2), (torch.ones(3),)])
    with pytest.raises(AssertionError, match="expected a list of 2; got"):
        poptorch.testing.allclose(pair, pair[:1])
    with pytest.raises(AssertionError, match=r"expected a tensor of \[2\]"):
        poptorch.testing.allclose(pair[0], torch.ones(3))


def test_names() -> None:
    assert all(hasattr(poptorch, name) for name in poptorch.__all__)
    assert poptorch.options.ConfigFileError is poptorch.ConfigFileError
    assert poptorch.enums.OutputMode is poptorch.OutputMode
    for name in ("Attribute", "BeginBlock", "Block", "BlockFunction", "MultiConv", "NameScope", "removeBlocks"):
        assert getattr(poptorch.ops, name) is getattr(poptorch, name)
    assert poptorch.logger.name == "poptorch::python"
    assert poptorch._poplar_executor.PoplarExecutor is poptorch.PoplarExecutor
    assert poptorch.poptorch_core.Error is poptorch.Error
