"""Models of PyTorch that `tests.targets.grid` trains by `poptorch`: of `transformers`, and a ResNet-50."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Classifier(nn.Module):
    """A model of `transformers` with labels: gives its loss."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(**{self.name: x, "labels": labels}).loss


def _sizes(layers: int, width: int) -> dict[str, int]:
    """What a configuration of `transformers` calls the sizes of a model with heads of 64 channels."""
    inside = {"hidden_size": width, "intermediate_size": 4 * width}
    return inside | {"num_hidden_layers": layers, "num_attention_heads": max(2, width // 64)}


def bert(layers: int, width: int) -> Made:
    """A BERT for texts in four classes, and two texts of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=512, num_labels=4, max_position_embeddings=128, **_sizes(layers, width))
    model = BertForSequenceClassification(config)
    return Classifier(model, "input_ids"), (torch.randint(0, 512, (2, 128)), torch.tensor([1, 3]))


def vit(layers: int, width: int) -> Made:
    """A ViT for images in four classes, and two images of 8 × 8 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=128, patch_size=16, num_labels=4, **_sizes(layers, width))
    model = ViTForImageClassification(config)
    return Classifier(model, "pixel_values"), (torch.randn(2, 3, 128, 128), torch.tensor([1, 3]))


class Bottleneck(nn.Module):
    """A block of a ResNet: 1 × 1, 3 × 3 and 1 × 1 filters, added to what goes in."""

    def __init__(self, before: int, inside: int, stride: int) -> None:
        super().__init__()
        after = 4 * inside
        self.filters = nn.Sequential(
            *(nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, inside, 3, stride, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        same = stride == 1 and before == after
        past = (nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.past = nn.Identity() if same else nn.Sequential(*past)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.filters(x) + self.past(x))


class ResNet(nn.Module):
    """A ResNet with bottlenecks for images in 16 classes: gives its loss.

    See also: He et al., "Deep Residual Learning for Image Recognition" (2015).
    """

    def __init__(self, blocks: tuple[int, ...], width: int) -> None:
        super().__init__()
        made: list[nn.Module] = [
            *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        ]
        before = width
        for i, count in enumerate(blocks):
            for j in range(count):
                made.append(Bottleneck(before, width << i, 2 if i and not j else 1))
                before = 4 * width << i
        self.body, self.head = nn.Sequential(*made), nn.Linear(before, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)


def resnet50(layers: int, width: int) -> Made:
    """A ResNet-50, a quarter as wide at its start as it is after its first stage, and two images."""
    return ResNet((3, 4, 6, 3), width // 4), (torch.randn(2, 3, 64, 64), torch.tensor([1, 3]))


MADE: dict[str, Callable[[int, int], Made]] = {"BERT": bert, "ViT": vit, "ResNet-50": resnet50}
