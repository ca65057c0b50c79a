"""Handwritten digits for the tutorials, as plain NumPy arrays.

Two sources, one form. Without a directory the digits are the 1797 that scikit-learn
carries with it, enlarged from 8x8 to 28x28 pixels, so that a tutorial needs no
download. With a directory they are the four IDX files of the original MNIST data set.
Either way `load` gives a training and a test part whose pixels are normalised by the
mean and the standard deviation of the training part, and `Batches` hands them out in
batches.

Nothing here knows PopXL; any iterable of arrays can feed a session.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SIZE = 28
"""Height and width of every image."""

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The files of MNIST, each of which may carry the suffix `.gz`."""


@dataclass(frozen=True)
class Digits:
    """Images and what they show: `images` is float32 (n, 28, 28), `labels` is int32
    (n,), from 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, n: int) -> Digits:
        """The first `n` digits."""
        return Digits(self.images[:n], self.labels[:n])


class Batches:
    """Full batches of `digits`, in a new order every time they are iterated; the rest
    that fills no batch is left out.

        for images, labels in Batches(digits, 8):   # (8, 28, 28) float32 and (8,) int32
            ...

    The orders follow from `seed`: the first iteration of two equal `Batches` is equal,
    and so is the second. `shuffle=False` keeps the digits in the order they are in.
    ValueError if there are fewer digits than one batch.
    """

    def __init__(
        self, digits: Digits, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ):
        if not 1 <= batch_size <= len(digits):
            raise ValueError(
                f"Batches: a batch of {batch_size} cannot be filled from {len(digits)} "
                "digits. "
                f"Choose a batch size from 1 to {len(digits)}."
            )
        self.digits = digits
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.digits) // self.batch_size

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.arange(len(self.digits))
        if self.shuffle:
            self._random.shuffle(order)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            chosen = order[start : start + self.batch_size]
            yield self.digits.images[chosen], self.digits.labels[chosen]


def load(directory: str | Path | None = None) -> tuple[Digits, Digits]:
    """The training and the test digits: MNIST from `directory` if given, else those of
    scikit-learn.

    FileNotFoundError and ValueError, as in `read_mnist`, if the files in `directory`
    are not what they should be.
    """
    train, test = sklearn_digits() if directory is None else read_mnist(directory)
    mean, deviation = train.images.mean(), train.images.std()
    train, test = (
        Digits((part.images - mean) / deviation, part.labels) for part in (train, test)
    )
    return train, test


# --- the digits of scikit-learn -------------------------------------------------------


def sklearn_digits(test_size: int = 360, seed: int = 0) -> tuple[Digits, Digits]:
    """The digits of scikit-learn, enlarged, with pixels from 0 to 1; `test_size` of
    them are held back for testing.

    The order is shuffled with `seed` before the split, since neighbours in the original
    order have the same writer.
    """
    # here, so that MNIST can be read without scikit-learn
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (
        enlarge(data.images / 16).astype(np.float32),
        data.target.astype(np.int32),
    )
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:test_size], order[test_size:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def enlarge(images: np.ndarray, size: int = SIZE) -> np.ndarray:
    """Square images (n, s, s) drawn with `size` x `size` pixels, by linear
    interpolation along both axes.

    The centre of every new pixel lies between two old ones and takes a share of each,
    the nearer the more. These shares are the rows of a matrix (size, s); it is applied
    from the left to blend rows, from the right to blend columns. What lies beyond the
    outermost centres takes the value of the border.
    """
    old = images.shape[-1]
    centres = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
    shares = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(old)))
    return shares @ images @ shares.T


# --- MNIST ----------------------------------------------------------------------------


def read_mnist(directory: str | Path) -> tuple[Digits, Digits]:
    """The training and the test part of MNIST, with pixels from 0 to 1, from the four
    `FILES` in `directory`.

    FileNotFoundError names every file that is missing. ValueError tells which file is
    not what its name says: truncated, another kind of IDX file, images of another size,
    labels beyond 9, or not one label for each image.
    """
    paths = {name: path for name in FILES if (path := _find(Path(directory), name))}
    if missing := [name for name in FILES if name not in paths]:
        raise FileNotFoundError(
            f"MNIST is not complete in {directory}: missing {', '.join(missing)}. "
            "Put the original files there, plain or with the suffix .gz, or leave "
            "--data out to use the digits "
            f"that come with scikit-learn."
        )
    train_images, train_labels, test_images, test_labels = paths.values()
    return _read_part(train_images, train_labels), _read_part(test_images, test_labels)


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """The bytes of one IDX file as an array of `dimensions` axes; `.gz` files are
    unpacked on the way.

    An IDX file opens with two zero bytes, a byte for the type of the elements (8 means
    unsigned bytes, the only type in MNIST) and a byte for the number of axes; then come
    the sizes, four bytes each with the highest first, and then the elements. ValueError
    if the file says anything else, or holds fewer or more bytes than it announces.
    """
    path = Path(path)
    content = _content(path)
    header = 4 + 4 * dimensions
    if len(content) < 4:
        raise ValueError(
            f"{path} is truncated: an IDX file opens with 4 bytes, and it has "
            f"{len(content)}."
        )
    if content[:2] != b"\0\0":
        raise ValueError(
            f"{path} is not an IDX file: it should open with two zero bytes and opens "
            f"with {content[:2].hex(' ')}."
        )
    if content[2] != 8:
        raise ValueError(
            f"{path} holds elements of type 0x{content[2]:02x}; MNIST has unsigned "
            "bytes, type 0x08."
        )
    if content[3] != dimensions:
        raise ValueError(
            f"{path} holds an array of {content[3]} dimensions; expected {dimensions}."
        )
    if len(content) < header:
        raise ValueError(
            f"{path} is truncated: its header takes {header} bytes, and it has "
            f"{len(content)}."
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        complaint = "is truncated" if len(content) < expected else "has bytes left over"
        raise ValueError(
            f"{path} {complaint}: its header announces an array {shape}, which makes "
            f"{expected} bytes with the "
            f"header, and it has {len(content)}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _find(directory: Path, name: str) -> Path | None:
    return next(
        (
            path
            for path in (directory / name, directory / f"{name}.gz")
            if path.is_file()
        ),
        None,
    )


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be unpacked, so it is truncated or no gzip file: {error}."
        ) from error


def _read_part(images_path: Path, labels_path: Path) -> Digits:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (SIZE, SIZE):
        height, width = images.shape[1:]
        raise ValueError(
            f"{images_path} holds images of {height}x{width} pixels; expected "
            f"{SIZE}x{SIZE}."
        )
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} holds {len(images)} images and {labels_path} holds "
            f"{len(labels)} labels; "
            f"expected one label for each image."
        )
    if labels.max(initial=0) > 9:
        raise ValueError(
            f"{labels_path} holds the label {labels.max()}; expected labels from 0 to "
            "9."
        )
    return Digits(images.astype(np.float32) / 255, labels.astype(np.int32))
