"""The published introduction (programs/basic_concepts.py) runs here unchanged and prints what was published.

The program downloads MNIST with torchvision. Here a small module of that name gives it the digits of the tutorials
instead, and where PyTorch is not installed a small `torch` serves the few things that the program asks of it.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import popxl_addons  # noqa: F401  (looks for torch when imported, and should find the real one or none)
from digits import Digits, sklearn_digits

PROGRAM = Path(__file__).parent / "programs" / "basic_concepts.py"

LINEAR = """\
Graph : Linear_subgraph(0)
  (%1, weight=%2, bias=%3) -> (%5) {
    MatMul.100 (%1 [(2, 4) float32], %2 [(4, 32) float32]) -> (%4 [(2, 32) float32])
    Add.101 (%4 [(2, 32) float32], %3 [(32,) float32]) -> (%5 [(2, 32) float32])
  }
"""

NET = """\
Graph : Net_subgraph(0)
  (%1, fc1.weight=%2, fc1.bias=%3, fc2.weight=%4, fc2.bias=%5, fc3.weight=%6, fc3.bias=%7, fc4.weight=%8, fc4.bias=%9) -> (%21) {
    Reshape.100 (%1 [(28, 28) float32]) -> (%10 [(1, 784) float32])
    MatMul.101 (%10 [(1, 784) float32], %2 [(784, 512) float32]) -> (%11 [(1, 512) float32])
    Add.102 (%11 [(1, 512) float32], %3 [(512,) float32]) -> (%12 [(1, 512) float32])
    Gelu.103 (%12 [(1, 512) float32]) -> (%13 [(1, 512) float32])
    MatMul.104 (%13 [(1, 512) float32], %4 [(512, 512) float32]) -> (%14 [(1, 512) float32])
    Add.105 (%14 [(1, 512) float32], %5 [(512,) float32]) -> (%15 [(1, 512) float32])
    Gelu.106 (%15 [(1, 512) float32]) -> (%16 [(1, 512) float32])
    MatMul.107 (%16 [(1, 512) float32], %6 [(512, 512) float32]) -> (%17 [(1, 512) float32])
    Add.108 (%17 [(1, 512) float32], %7 [(512,) float32]) -> (%18 [(1, 512) float32])
    Gelu.109 (%18 [(1, 512) float32]) -> (%19 [(1, 512) float32])
    MatMul.110 (%19 [(1, 512) float32], %8 [(512, 10) float32]) -> (%20 [(1, 10) float32])
    Add.111 (%20 [(1, 10) float32], %9 [(10,) float32]) -> (%21 [(1, 10) float32])
  }
"""  # noqa: E501

OUTLINED = """\
Graph : NetOutlined_subgraph(0)
  (%1, fc1.weight=%2, fc1.bias=%3, fc2.weight=%4, fc2.bias=%5, fc3.weight=%6, fc3.bias=%7, fc4.weight=%8, fc4.bias=%9) -> (%19) {
    Reshape.100 (%1 [(28, 28) float32]) -> (%10 [(1, 784) float32])
    MatMul.101 (%10 [(1, 784) float32], %2 [(784, 512) float32]) -> (%11 [(1, 512) float32])
    Add.102 (%11 [(1, 512) float32], %3 [(512,) float32]) -> (%12 [(1, 512) float32])
    Gelu.103 (%12 [(1, 512) float32]) -> (%13 [(1, 512) float32])
    Call.106(Linear_subgraph(1)) (%13 [(1, 512) float32], %4 [(512, 512) float32], %5 [(512,) float32]) -> (%14 [(1, 512) float32])
    Gelu.107 (%14 [(1, 512) float32]) -> (%15 [(1, 512) float32])
    Call.108(Linear_subgraph(1)) (%15 [(1, 512) float32], %6 [(512, 512) float32], %7 [(512,) float32]) -> (%16 [(1, 512) float32])
    Gelu.109 (%16 [(1, 512) float32]) -> (%17 [(1, 512) float32])
    MatMul.110 (%17 [(1, 512) float32], %8 [(512, 10) float32]) -> (%18 [(1, 10) float32])
    Add.111 (%18 [(1, 10) float32], %9 [(10,) float32]) -> (%19 [(1, 10) float32])
  }
"""  # noqa: E501

NET_KEYS = (
    "dict_keys(['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias', "
    "'fc3.weight', 'fc3.bias', 'fc4.weight', 'fc4.bias'])"
)
OUTLINED_KEYS = (
    "dict_keys(['fc1.weight', 'fc1.bias', 'fc4.weight', 'fc4.bias', "
    "'fc2.weight', 'fc2.bias', 'fc3.weight', 'fc3.bias'])"
)


# --- stand-ins ------------------------------------------------------------------------------------------------------


class ArrayTensor(np.ndarray):
    """An array with the methods that the program calls on tensors."""

    def float(self) -> np.ndarray:
        return self.astype(np.float32)

    def int(self) -> np.ndarray:
        return self.astype(np.int32)

    def detach(self) -> "ArrayTensor":
        return self

    def numpy(self) -> np.ndarray:
        return self.view(np.ndarray)


class DataLoader:
    """Shuffled batches of a data set whose items are an array and a number; the rest is dropped."""

    def __init__(self, dataset, batch_size: int, shuffle: bool, drop_last: bool):
        assert shuffle and drop_last
        self.dataset, self.batch_size = dataset, batch_size
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for chosen in self.random.permutation(len(self.dataset))[: len(self) * self.batch_size].reshape(len(self), -1):
            images, labels = zip(*(self.dataset[i] for i in chosen), strict=True)
            yield np.stack(images).view(ArrayTensor), np.array(labels).view(ArrayTensor)


def torch_module() -> ModuleType:
    """A `torch` with a data loader and without tensors: those of the stand-in are arrays to everybody else."""
    module = ModuleType("torch")
    module.Tensor = module.dtype = type("NotHere", (), {})  # type: ignore[attr-defined]
    module.utils = SimpleNamespace(data=SimpleNamespace(DataLoader=DataLoader))  # type: ignore[attr-defined]
    return module


def torchvision_module(train: Digits, test: Digits, to_tensor: Callable) -> ModuleType:
    """A `torchvision` whose MNIST is these digits; `to_tensor` makes a tensor of an image with values from 0 to 1."""

    class MNIST:
        def __init__(self, root: str, train: bool, download: bool, transform: Callable):
            self.digits, self.transform = parts[train], transform

        def __len__(self) -> int:
            return len(self.digits)

        def __getitem__(self, i: int):
            return self.transform(self.digits.images[i]), int(self.digits.labels[i])

    def compose(transforms: Iterable[Callable]) -> Callable:
        def transformed(image):
            for transform in transforms:
                image = transform(image)
            return image

        return transformed

    parts = {True: train, False: test}
    module = ModuleType("torchvision")
    module.datasets = SimpleNamespace(MNIST=MNIST)  # type: ignore[attr-defined]
    module.transforms = SimpleNamespace(  # type: ignore[attr-defined]
        Compose=compose,
        ToTensor=lambda: lambda image: to_tensor(image[None]),
        Normalize=lambda mean, std: lambda image: (image - mean[0]) / std[0],
    )
    return module


# --- the program ----------------------------------------------------------------------------------------------------


def printed() -> str:
    """What the program prints. One epoch over the few training digits is short, so they are there twice."""
    train, test = sklearn_digits()
    train = Digits(np.tile(train.images, (2, 1, 1)), np.tile(train.labels, 2))
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        if importlib.util.find_spec("torch"):
            import torch

            torch.manual_seed(0)
            to_tensor = torch.from_numpy
        else:
            patch.setitem(sys.modules, "torch", torch_module())
            to_tensor = np.asarray
        patch.setitem(sys.modules, "torchvision", torchvision_module(train, test, to_tensor))
        runpy.run_path(str(PROGRAM))
    return out.getvalue()


@pytest.mark.thorough
def test_what_is_printed() -> None:
    """Schedules, keys, collections and the accuracy. (One test, as the program takes long.)"""
    text = printed()
    for schedule in (LINEAR, NET, OUTLINED):
        found = text[text.index(schedule.splitlines()[0]) :]
        assert found[: len(schedule)] == schedule
    assert [line for line in text.splitlines() if line.startswith("dict_keys")] == [NET_KEYS, OUTLINED_KEYS]
    for name in ("bias", "weight"):
        shape = {"bias": "(32,)", "weight": "(4, 32)"}[name]
        assert re.search(rf"'layer1\.{name}': \w+\[{name} popxl\.dtypes\.float32 {re.escape(shape)}\]", text)
    assert text.index("layer1.bias") < text.index("layer1.weight") < text.index("layer2.bias")
    assert "[bias__t0 popxl.dtypes.float32 (32,)]" in text
    assert "[weight__t1 popxl.dtypes.float32 (4, 32)]" in text
    assert "Epoch 1/1" in text
    last = text.splitlines()[-1]
    assert (match := re.fullmatch(r"Accuracy on test set: (\d+\.\d\d)%", last)), last
    assert float(match[1]) > 90
