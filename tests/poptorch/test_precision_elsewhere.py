"""What models of halves multiply on GPUs: halves, for which these have units, forward and backward."""

import re

import pytest
import torch
from torch.nn import functional as F

import poptorch
from tests.popxl.elsewhere import lowered_text


class Network(torch.nn.Module):
    """Linear layers with biases and without, a convolution, a product and a sum over products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, bias=False)
        self.third = torch.nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.third(self.second(F.gelu(self.first(x))))
        h = torch.einsum("blc,bmc->blm", h, x) @ x
        return poptorch.identity_loss(((h - y) ** 2).float().mean(), "none")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_halves_multiply_halves_on_gpus(dtype: torch.dtype) -> None:
    """XLA for TPUs sees it through conversions to float32."""
    model = Network().to(dtype)
    wrapped = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.ones(2, 5, 3, dtype=dtype), torch.ones(2, 5, 3, dtype=dtype)
    wrapped.compile(x, y)
    text = lowered_text(wrapped._executable.session.ir, "cuda")
    kinds = re.findall(
        r"(?:dot_general |convolution\().*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\) -> tensor<[\dx]*x(\w+)>",
        text,
    )
    half = "f16" if dtype is torch.float16 else "bf16"
    assert len(kinds) >= 13
    assert {kind[:2] for kind in kinds} == {(half, half)}
    assert [kind[2] for kind in kinds].count("f32") == 1  # to which the bias is added before it is rounded
