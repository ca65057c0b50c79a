"""The GPT of `model` in PyTorch: an independent source of its losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.popxl_addons.gpt.model import Config


class TorchAttention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.query, self.key, self.value))
        q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class TorchFeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class TorchBlock(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention, self.feed_forward = TorchAttention(config), TorchFeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class TorchGPT(nn.Module):
    """Tokens of shape (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, config: Config):
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.layers = nn.Sequential(*(TorchBlock(config) for _ in range(config.layers)))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(config.width)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers(functional.embedding(tokens, self.table))
        return self.head["norm"](x) @ self.table.T


def rotated(t: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring channels as complex numbers, times those of their positions. (batch, sequence, heads, n)"""
    sequence, channels = t.shape[1], t.shape[3]
    frequencies = 10000.0 ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angles = torch.arange(sequence, dtype=torch.float64)[:, None, None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns.to(t.device)).flatten(-2)


class TorchTraining:
    """AdamW steps; arrays come and go in our layout, under our names."""

    def __init__(self, config: Config, weights: Mapping[str, np.ndarray], device: str = "cpu"):
        self.device = device
        self.model = TorchGPT(config).to(device)
        self.model.load_state_dict({name: torch.tensor(turned(name, array)) for name, array in weights.items()})
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), config.learning_rate, eps=1e-5, weight_decay=config.weight_decay
        )

    def step(self, tokens: np.ndarray, labels: np.ndarray) -> float:
        """The loss before the step."""
        logits = self.model(torch.from_numpy(tokens).to(self.device))
        targets = torch.from_numpy(labels).long().to(self.device)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.item()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: turned(name, p.detach().cpu().numpy()).copy() for name, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, np.ndarray]:
        """Those of the last step."""
        return {name: turned(name, p.grad.cpu().numpy()).copy() for name, p in self.model.named_parameters()}


def turned(name: str, array: np.ndarray) -> np.ndarray:
    """Weights of linear layers are transposed in PyTorch."""
    return array.T if array.ndim == 2 and name != "table" else array
