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
    for module in (poptorch.enums, poptorch.ops, poptorch.options):
        shared = set(module.__all__) & set(poptorch.__all__)
        assert all(getattr(module, name) is getattr(poptorch, name) for name in shared)
    assert {"Attribute", "BeginBlock", "Block", "BlockFunction", "MultiConv"} <= set(poptorch.ops.__all__)
    assert {"Phase", "PipelinedExecution", "ShardedExecution", "Stage"} <= set(poptorch.options.__all__)
    assert poptorch.logger.name == "poptorch::python"
    assert poptorch._poplar_executor.PoplarExecutor is poptorch.PoplarExecutor
    assert poptorch.poptorch_core.Error is poptorch.Error
