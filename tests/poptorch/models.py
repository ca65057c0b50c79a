"""Whole models, small: what people train, in the ways they write it. Each returns its output and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, ...]


class WithLoss(nn.Module):
    """A classifier with its loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers(x)
        return scores, F.cross_entropy(scores, labels)


def mlp(widths: tuple[int, ...] = (7, 6, 5, 4)) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers = [[nn.Linear(n, m), nn.ReLU()] for n, m in zip(widths, widths[1:], strict=False)]
    return WithLoss(*sum(layers, [])[:-1])


def lenet(size: int = 12, channels: tuple[int, int] = (3, 4), classes: int = 5) -> nn.Module:
    """Two convolutions with pooling, two linear layers, for square images of one channel."""
    a, b = channels
    pixels = (size // 4) ** 2
    return WithLoss(
        nn.Conv2d(1, a, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(b * pixels, 2 * b), nn.ReLU(), nn.Linear(2 * b, classes),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, n: int, m: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, 1, 1, bias=False), nn.BatchNorm2d(m)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or n != m:
            self.around = nn.Sequential(nn.Conv2d(n, m, 1, stride, bias=False), nn.BatchNorm2d(m))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet(classes: int = 5) -> nn.Module:
    """A ResNet of three blocks, one of which halves the image."""
    stem = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    blocks = (Residual(4, 4), Residual(4, 6, stride=2), Residual(6, 6))
    return WithLoss(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))


class LSTMClassifier(nn.Module):
    """An LSTM of two layers, the last state of which is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, (hidden, _) = self.lstm(x)
        scores = self.head(hidden[-1])
        return scores, F.cross_entropy(scores, labels)


class Encoder(nn.Module):
    """A transformer encoder as PyTorch has it, whose mean is classified."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 2, wide: int = 16, classes: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, wide, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.encoder(x).mean(1))
        return scores, F.cross_entropy(scores, labels)


class CausalBlock(nn.Module):
    """Attention to what came before, written out, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        shares = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        shares = shares.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = (F.softmax(shares, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A small GPT: embeddings of tokens and of positions, causal blocks, and a head tied to the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8, heads: int = 2, layers: int = 2, longest: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads, longest) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        scores = self.head(self.norm(y))
        return scores, F.cross_entropy(scores.view(-1, scores.size(-1)), labels.view(-1), ignore_index=-1)


class SelfAttention(nn.Module):
    """Attention with a mask that is added, in the way of BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        def by_head(t: torch.Tensor) -> torch.Tensor:
            return t.view(*t.size()[:-1], self.heads, -1).permute(0, 2, 1, 3)

        q, k, v = by_head(self.query(x)), by_head(self.key(x)), by_head(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / (q.size(-1) ** 0.5) + mask
        y = torch.matmul(F.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous()
        return self.norm(self.out(y.view(*y.size()[:-2], -1)) + x)


class BertBlock(nn.Module):
    """Attention, and a feed-forward layer, each followed by a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, mask)
        return self.norm(self.down(F.gelu(self.up(x))) + x)


class Bert(nn.Module):
    """An encoder in the way of BERT: embeddings, an attention mask, and scores for where an answer begins and ends.

    Where there is no answer the label is the length of the sequence, which is ignored.
    """

    def __init__(self, vocabulary: int = 11, width: int = 8, heads: int = 2, layers: int = 2, longest: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions, self.types = nn.Embedding(longest, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layer = nn.ModuleList(BertBlock(width, heads) for _ in range(layers))
        self.answers = nn.Linear(width, 2)
        self.register_buffer("position_ids", torch.arange(longest).expand((1, -1)))

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor, start: torch.Tensor, end: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(ids) + self.types(types) + self.positions(self.position_ids[:, : ids.size(1)])
        added = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        x = self.norm(x)
        for layer in self.layer:
            x = layer(x, added)
        starts, ends = (scores.squeeze(-1) for scores in self.answers(x).split(1, dim=-1))
        loss = nn.CrossEntropyLoss(ignore_index=starts.size(1))
        return starts, poptorch_loss((loss(starts, start) + loss(ends, end)) / 2)


def poptorch_loss(t: torch.Tensor) -> torch.Tensor:
    """The loss to train by, of several."""
    import poptorch  # here, so that the models need PyTorch alone

    return poptorch.identity_loss(t, reduction="none")


# Data -----------------------------------------------------------------------------------------------------------------


def classified(*shape: int, classes: int = 4) -> Callable[[torch.Generator, int], Batch]:
    """Numbers of a shape, and labels."""
    return lambda random, rows: (
        torch.randn((rows, *shape), generator=random),
        torch.randint(classes, (rows,), generator=random),
    )


def text(random: torch.Generator, rows: int, length: int = 6, vocabulary: int = 11) -> Batch:
    """Tokens, and what follows each; some of that is not to be learnt."""
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=random)
    labels = tokens[:, 1:].clone()
    labels[:, 0] = -1
    return tokens[:, :-1].clone(), labels


def questions(random: torch.Generator, rows: int, length: int = 6, vocabulary: int = 11) -> Batch:
    """Texts of two parts, filled up with padding; where an answer begins and ends, if there is one."""
    ids = torch.randint(1, vocabulary, (rows, length), generator=random)
    mask = (torch.arange(length) < torch.randint(3, length + 1, (rows, 1), generator=random)).long()
    start, end = torch.randint(length + 1, (2, rows), generator=random)
    start[0] = end[0] = 1
    return ids * mask, mask, (torch.arange(length) > 2).long().expand(rows, -1).contiguous(), start, end


@dataclass(frozen=True)
class Case:
    """A model to be trained.

    Attributes:
        make: makes it, with weights that are random.
        data: makes so many rows of arguments.
    """

    make: Callable[[], nn.Module]
    data: Callable[[torch.Generator, int], Batch]


CASES = {
    "MLP": Case(mlp, classified(7)),
    "LeNet": Case(lenet, classified(1, 12, 12, classes=5)),
    "ResNet": Case(resnet, classified(3, 8, 8, classes=5)),
    "LSTM": Case(LSTMClassifier, classified(6, 5)),
    "encoder": Case(Encoder, classified(6, 8)),
    "GPT": Case(GPT, text),
    "BERT": Case(Bert, questions),
}
