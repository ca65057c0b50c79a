"""Seeds: what they are for given arguments, and the two words of a 64-bit number."""

import numpy as np
import pytest

from popxl.random_seed import MAX_UINT64, create_seeds, two_uint32_to_uint64, uint64_to_two_uint32

FOUR = [[2684764585, 4058335883], [3853503932, 2938530453], [3331544671, 2483747170], [967257515, 3580503874]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, FOUR[0]),
        ({"offset": 1}, [1404335234, 3090441204]),
        ({"replicas": 3}, FOUR[:3]),
        ({"batches_per_step": 3}, FOUR[:3]),
        ({"gradient_accumulation_factor": 3}, FOUR[:3]),
        ({"batches_per_step": 2, "replicas": 2}, [FOUR[:2], FOUR[2:]]),
    ],
)
def test_values(arguments, expected):
    seeds = create_seeds(7, **arguments)
    assert seeds.dtype == np.uint32
    assert seeds.tolist() == expected


def test_offset_is_added_to_the_seed():
    assert create_seeds(7, offset=1).tolist() == create_seeds(8).tolist()
    assert create_seeds(-3, 10).tolist() == create_seeds(7).tolist()


def test_axes_are_batches_accumulation_replicas_words():
    assert create_seeds(0, batches_per_step=3, gradient_accumulation_factor=5, replicas=4).shape == (3, 5, 4, 2)
    assert create_seeds(0, 0, 3, 5, 4).shape == (3, 5, 4, 2)


def test_a_longer_request_begins_with_a_shorter_one():
    assert create_seeds(7, replicas=12)[:5].tolist() == create_seeds(7, replicas=5).tolist()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"seed": -1}, "`seed` + `offset` is -1 + 0 = -1"),
        ({"seed": 3, "offset": -5}, "= -2"),
        ({"seed": 3, "replicas": 0}, "`replicas` is 0"),
        ({"seed": 3, "batches_per_step": 0}, "`batches_per_step` is 0"),
        ({"seed": 3, "gradient_accumulation_factor": -1}, "`gradient_accumulation_factor` is -1"),
    ],
)
def test_errors(arguments, fragment):
    with pytest.raises(ValueError) as error:
        create_seeds(**arguments)
    assert str(error.value).startswith("create_seeds: ")
    assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, (0, 0)),
        (5, (0, 5)),
        (2**32 + 5, (1, 5)),
        (2**32 - 1, (0, 2**32 - 1)),
        (MAX_UINT64, (2**32 - 1, 2**32 - 1)),
        (np.uint64(2**63), (2**31, 0)),
    ],
)
def test_words(number, words):
    assert uint64_to_two_uint32(number) == words
    assert two_uint32_to_uint64(*words) == number
    assert two_uint32_to_uint64(*np.array(words, np.uint32)) == number


@pytest.mark.parametrize("number", [-1, MAX_UINT64 + 1])
def test_a_number_that_does_not_fit(number):
    with pytest.raises(ValueError, match=f"`num` is {number}"):
        uint64_to_two_uint32(number)


@pytest.mark.parametrize("word", [-1, 2**32])
def test_a_word_that_does_not_fit(word):
    with pytest.raises(ValueError, match=f"`a` is {word}"):
        two_uint32_to_uint64(word, 0)
    with pytest.raises(ValueError, match=f"`b` is {word}"):
        two_uint32_to_uint64(0, word)


@pytest.mark.parametrize("name", ["batches_per_step", "gradient_accumulation_factor", "replicas"])
def test_counts_that_are_no_integers(name) -> None:
    for wrong in (None, "2", 2.0):
        with pytest.raises(TypeError, match=f"^create_seeds: `{name}` must be an integer; got"):
            create_seeds(7, **{name: wrong})
    assert create_seeds(7, **{name: np.int64(3)}).shape == (3, 2)
