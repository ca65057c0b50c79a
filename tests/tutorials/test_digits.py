"""The tutorials' data: IDX files written by the test, the digits of scikit-learn, and batches of either."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from digits import FILES, Batches, Digits, enlarge, load, read_idx, read_mnist, sklearn_digits


def idx(array: np.ndarray, *, element: int = 8) -> bytes:
    """`array` as the content of an IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, element, array.ndim, *array.shape) + array.tobytes()


def images(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, 28, 28), np.uint8)


def labels(n: int) -> np.ndarray:
    return (np.arange(n) % 10).astype(np.uint8)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A directory with a small MNIST: 7 digits to train, 3 to test; one of the files is packed."""
    for name, array in zip(FILES, (images(7), labels(7), images(3), labels(3)), strict=True):
        (tmp_path / name).write_bytes(idx(array))
    plain = tmp_path / FILES[2]
    (tmp_path / f"{FILES[2]}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return tmp_path


# --- reading MNIST --------------------------------------------------------------------------------------------------


def test_read_mnist(mnist: Path) -> None:
    train, test = read_mnist(mnist)
    for part, n in ((train, 7), (test, 3)):
        np.testing.assert_array_equal(part.images, images(n).astype(np.float32) / 255)
        np.testing.assert_array_equal(part.labels, labels(n))
        assert (part.images.dtype, part.labels.dtype) == (np.float32, np.int32)


def test_load_normalises_by_the_training_part(mnist: Path) -> None:
    train, test = load(mnist)
    assert train.images.mean() == pytest.approx(0, abs=1e-5)
    assert train.images.std() == pytest.approx(1, abs=1e-5)
    raw_train, raw_test = read_mnist(mnist)
    expected = (raw_test.images - raw_train.images.mean()) / raw_train.images.std()
    np.testing.assert_allclose(test.images, expected, rtol=1e-5)
    assert test.images.dtype == np.float32


def test_plain_goes_before_packed(mnist: Path) -> None:
    (mnist / FILES[2]).write_bytes(idx(images(3)))
    (mnist / f"{FILES[2]}.gz").write_bytes(b"never read")
    train, test = read_mnist(mnist)
    assert (len(train.images), len(test.images)) == (7, 3)
    np.testing.assert_array_equal(test.images, images(3).astype(np.float32) / 255)


def test_missing_files_are_named_at_once(mnist: Path) -> None:
    (mnist / FILES[0]).unlink()
    (mnist / f"{FILES[2]}.gz").unlink()
    with pytest.raises(FileNotFoundError, match=f"missing {FILES[0]}, {FILES[2]}\\."):
        read_mnist(mnist)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=", ".join(FILES)):
        read_mnist(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", r"is truncated: an IDX file opens with 4 bytes, and it has 2\."),
        (b"<html></html>", r"is not an IDX file: .* opens with 3c 68\."),
        (idx(labels(2), element=13), r"elements of type 0x0d; MNIST has unsigned bytes, type 0x08"),
        (idx(images(2)), r"holds an array of 3 dimensions; expected 1"),
        (idx(labels(2))[:6], r"is truncated: its header takes 8 bytes, and it has 6\."),
        (idx(labels(5))[:-2], r"is truncated: .* \(5,\), which makes 13 bytes with the header, and it has 11\."),
        (idx(labels(5)) + b"\0", r"has bytes left over: .* makes 13 bytes with the header, and it has 14\."),
    ],
    ids=["no-header", "magic", "element-type", "dimensions", "short-header", "short", "long"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_bad_files(tmp_path: Path, content: bytes, message: str, packed: bool) -> None:
    path = tmp_path / ("labels.gz" if packed else "labels")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path, 1)
    assert str(path) in str(caught.value)


def test_a_size_beyond_all_memory_is_only_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3))
    with pytest.raises(ValueError, match="is truncated"):
        read_idx(path, 3)


@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"plain" + packed])
def test_bad_packing(tmp_path: Path, damage) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(damage(gzip.compress(idx(labels(500)))))
    with pytest.raises(ValueError, match="cannot be unpacked"):
        read_idx(path, 1)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (FILES[1], labels(6), "holds 7 images and .* holds 6 labels; expected one label for each image"),
        (FILES[0], np.zeros((7, 8, 9), np.uint8), "holds images of 8x9 pixels; expected 28x28"),
        (FILES[3], np.array([1, 10, 2], np.uint8), "holds the label 10; expected labels from 0 to 9"),
    ],
    ids=["counts", "size", "label"],
)
def test_files_that_do_not_fit(mnist: Path, name: str, array: np.ndarray, message: str) -> None:
    (mnist / name).write_bytes(idx(array))
    with pytest.raises(ValueError, match=message):
        read_mnist(mnist)


# --- the digits of scikit-learn -------------------------------------------------------------------------------------


def test_sklearn_digits() -> None:
    train, test = sklearn_digits()
    assert (len(train), len(test)) == (1437, 360)
    for part in (train, test):
        assert part.images.shape == (len(part), 28, 28)
        assert (part.images.min(), part.images.max()) == (0, 1)
        assert set(part.labels) == set(range(10))
        assert (part.images.dtype, part.labels.dtype) == (np.float32, np.int32)
    again, _ = sklearn_digits()
    np.testing.assert_array_equal(train.labels, again.labels)
    other, _ = sklearn_digits(seed=1)
    assert (train.labels != other.labels).any()


def test_held_back_digits_are_not_trained_with() -> None:
    train, test = sklearn_digits()
    seen = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in seen for image in test.images)


def test_enlarge_draws_lines_between_the_pixels() -> None:
    across = np.broadcast_to(np.arange(8.0), (1, 8, 8))  # a ramp stays a ramp, flat beyond the outermost centres
    expected = np.clip((np.arange(28) + 0.5) * 8 / 28 - 0.5, 0, 7)
    np.testing.assert_allclose(enlarge(across)[0], np.broadcast_to(expected, (28, 28)))
    np.testing.assert_allclose(enlarge(across.swapaxes(1, 2))[0], np.broadcast_to(expected, (28, 28)).T)


def test_enlarge_keeps_what_need_not_change() -> None:
    some = np.random.rand(3, 8, 8)
    np.testing.assert_allclose(enlarge(some, 8), some)
    np.testing.assert_allclose(enlarge(np.ones((2, 8, 8)), 5), np.ones((2, 5, 5)))


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.fixture
def eleven() -> Digits:
    return Digits(images(11).astype(np.float32), np.arange(11, dtype=np.int32))


def test_batches_are_full_and_each_digit_comes_once(eleven: Digits) -> None:
    batches = list(Batches(eleven, 4))
    assert len(batches) == len(Batches(eleven, 4)) == 2
    chosen = np.concatenate([labels for _, labels in batches])
    assert len(set(chosen)) == 8
    for pictures, numbers in batches:
        np.testing.assert_array_equal(pictures, eleven.images[numbers])
        assert (pictures.dtype, numbers.dtype) == (np.float32, np.int32)


def test_every_epoch_has_its_own_order_and_the_seed_decides(eleven: Digits) -> None:
    def epochs(seed: int) -> list[list[int]]:
        batches = Batches(eleven, 11, seed=seed)
        return [labels.tolist() for _ in range(2) for _, labels in batches]

    assert epochs(0)[0] != epochs(0)[1]
    assert epochs(0) == epochs(0) != epochs(1)


def test_batches_in_order(eleven: Digits) -> None:
    assert [labels.tolist() for _, labels in Batches(eleven, 3, shuffle=False)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("size", [0, 12])
def test_a_batch_that_cannot_be_filled(eleven: Digits, size: int) -> None:
    with pytest.raises(ValueError, match=f"a batch of {size} cannot be filled from 11 digits.*from 1 to 11"):
        Batches(eleven, size)


def test_head(eleven: Digits) -> None:
    assert eleven.head(4).labels.tolist() == [0, 1, 2, 3]
    assert eleven.head(4).images.shape == (4, 28, 28)
