"""Parts of models with numbers that are easily got wrong, trained beside PyTorch: masks, mixed dtypes, losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import poptorch  # noqa: E402

STEPS = 3


class _WithLoss(nn.Module):
    """A module, and the mean of the squares of what it makes."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(*given)
        return out, F.mse_loss(out, torch.ones_like(out))


def same_training(layers: nn.Module, *given: torch.Tensor, against: nn.Module | None = None) -> None:
    """Layers that are trained here and by PyTorch make the same, and end up the same: finite.

    `against`: what PyTorch trains, if not a copy of them.
    """
    ours, theirs = _WithLoss(layers), _WithLoss(against or copy.deepcopy(layers))
    trained = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(STEPS):
        expected, loss = theirs(*given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out, _ = trained(*given)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
    for name, value in ours.state_dict().items():
        assert value.isfinite().all(), name
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


# Masks that hide all keys of a query ----------------------------------------------------------------------------------


class _PaddedEncoder(nn.Module):
    """A layer of a transformer that is told which tokens are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.layer(x, src_key_padding_mask=padding)


class _LeftPadded(nn.Module):
    """Causal attention among tokens of which the first are padding: these see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & ~padding[:, None, None])
        return self.out(y.transpose(1, 2).flatten(2))


PADDING = {
    "a sequence": torch.tensor([[False] * 4, [True] * 4]),
    "on the left": torch.tensor([[False] * 4, [True, True, False, False]]),
}


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("make", [_PaddedEncoder, _LeftPadded])
@pytest.mark.parametrize("padding", PADDING)
def test_padding_trains_as_in_pytorch(make: Callable[[], nn.Module], padding: str) -> None:
    torch.manual_seed(0)
    same_training(make(), torch.randn(2, 4, 6), PADDING[padding])


# Losses by each of their names ----------------------------------------------------------------------------------------

_SIGNS = [1.0, -1.0, -1.0, 1.0]
_TIMES, _COUNTS = [5, 4], [2, 1]
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "binary_cross_entropy_with_logits": lambda x: torch.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "cosine_embedding_loss": lambda x: torch.cosine_embedding_loss(x, x.detach().cos(), torch.tensor(_SIGNS)),
    "ctc_loss": lambda x: torch.ctc_loss(
        x.T.reshape(6, 2, 2).log_softmax(-1),
        torch.ones(2, 2, dtype=torch.int64),
        torch.tensor(_TIMES),
        torch.tensor(_COUNTS),
    ),
    "hinge_embedding_loss": lambda x: torch.hinge_embedding_loss(x[:, 0], torch.tensor(_SIGNS)),
    "kl_div": lambda x: torch.kl_div(x.log_softmax(1), x.detach().softmax(1).roll(1, 0), 2),
    "margin_ranking_loss": lambda x: torch.margin_ranking_loss(x[:, 0], x[:, 1], torch.tensor(_SIGNS)),
    "poisson_nll_loss": lambda x: torch.poisson_nll_loss(x, x.detach().abs(), True, False, 1e-8, 1),
    "triplet_margin_loss": lambda x: torch.triplet_margin_loss(x, x.detach().cos(), x.detach().sin()),
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(x, x.detach().cos(), torch.tensor([0, 2, 1, 1])),
    "linear_cross_entropy, in chunks": lambda x: F.linear_cross_entropy(
        x, x.detach().cos(), torch.tensor([0, 2, 1, 1]), options=nn.LinearCrossEntropyOptions()
    ),
}


class _Loss(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, 6), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x))


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_found_by_each_of_their_names(name: str) -> None:
    torch.manual_seed(0)
    ours, x = _Loss(LOSSES[name]), torch.randn(4, 5)
    expected = ours(x).detach()
    trained = poptorch.trainingModel(ours)
    torch.testing.assert_close(trained(x), expected, rtol=1e-5, atol=1e-5)


# Integers that do not fit in 32 bits ----------------------------------------------------------------------------------

_MOST, _LEAST = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min


class _Hashed(nn.Module):
    """Places in a table of 1024 rows, by the bits of products."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("primes", torch.tensor([1, 2654435761, 805459861]))
        self.register_buffer("limit", torch.tensor(_MOST))

    def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = i * self.primes
        return (places[:, 0] ^ places[:, 1] ^ places[:, 2]) % 1024, torch.minimum(i, self.limit)


FITTING: dict[str, Callable[..., Any]] = {
    "the largest of all": lambda i, mask: torch.where(mask, i, _MOST).amin(0),
    "the smallest of all": lambda i, mask: i.masked_fill(mask, _LEAST).amax(0),
    "a tensor of the largest": lambda i, mask: torch.full((2, 3), _MOST).minimum(i),
    "a constant, the largest": lambda i, mask: torch.tensor([_MOST, -_MOST, 7]).clamp(-9, 9) + i,
    "comparisons": lambda i, mask: (i > 2**33, i >= -(2**40), i == 2**32, i != 2**32, i < 2**31, i <= -(2**32)),
    "bounds": lambda i, mask: (i.clamp(-(2**40), 2**40), i.clamp(max=2**33), i.clamp(min=3, max=2**35)),
    "bits": lambda i, mask: (i.abs() & 0xFFFFFFFF, (i ^ 0xDEADBEEF) & 0xFFFF),
}


@pytest.mark.parametrize("name", FITTING)
def test_integers_beyond_those_of_the_device_mean_what_they_mean_in_pytorch(name: str) -> None:
    i, mask = torch.tensor([[-4, 5, 2], [7, -3, 1]]), torch.tensor([[True, False, True], [False, True, False]])
    result = poptorch.inferenceModel(FITTING[name])(i, mask)
    torch.testing.assert_close(result, FITTING[name](i, mask), check_dtype=False)


def test_bits_of_buffers_count_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module, i = _Hashed(), torch.tensor([[3, 1, 8], [6, 5, 2]])
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(i), module(i), check_dtype=False)
    model.copyWeightsToDevice()
    told = [record.getMessage() for record in caplog.records if "does not fit" in record.getMessage()]
    assert len(told) == 1 and "`primes` has the number 2654435761" in told[0] and "-1640531535" in told[0]


REFUSED: dict[str, Callable[..., Any]] = {
    "aten.add": lambda i: i + 2**33,
    "aten.mul": lambda i: i * -(2**40),
    "aten.full": lambda i: torch.full((2,), 2**33) + i,
    "aten.arange": lambda i: torch.arange(2**33, 2**33 + 2) - i,
    "aten.masked_fill": lambda i: i.masked_fill(i > 0, 10**18),
    "constant": lambda i: torch.tensor([5, 2**33])[i],
}


@pytest.mark.parametrize("name", REFUSED)
def test_integers_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(
        poptorch.Error, match=rf"{name} at test_numbers_of_models.py:\d+ has the number .* does not fit"
    ):
        poptorch.inferenceModel(REFUSED[name])(torch.tensor([0, 1]))


@pytest.mark.parametrize("divided", [lambda i: i // 0, lambda i: i % 0, lambda i: torch.fmod(i, 0)])
def test_integers_are_not_divided_by_0(divided: Callable[..., Any]) -> None:
    with pytest.raises(poptorch.Error, match="ZeroDivisionError"):
        poptorch.inferenceModel(divided)(torch.tensor([0, 1]))


def test_integers_have_no_negative_powers() -> None:
    whole = torch.tensor([1, 2, -1, 0])
    with pytest.raises(poptorch.Error, match="Integers to negative integer powers are not allowed"):
        poptorch.inferenceModel(lambda i: i**-1)(whole)
    with pytest.raises(poptorch.Error, match="Integers to negative integer powers are not allowed"):
        poptorch.inferenceModel(lambda i: i.bool().pow(-2))(whole)
    powers = poptorch.inferenceModel(lambda i, n: (i**-1.0, i**n))(whole, torch.tensor(-3))
    torch.testing.assert_close(powers, (whole**-1.0, whole ** torch.tensor(-3)), check_dtype=False)


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    module = _Hashed()
    module.limit.fill_(2**40)
    with pytest.raises(poptorch.Error, match="`limit` has the number 1099511627776, which does not fit in int32"):
        poptorch.inferenceModel(module)(torch.tensor([[3, 1, 8]]))


def test_integers_that_are_added_to_floats_are_scaled_as_floats() -> None:
    def averaged(mean: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        following = mean.clone().mul_(0.9).add_(count, alpha=0.1)
        return following, torch.sub(mean, count, alpha=0.25), torch.rsub(count, mean, alpha=0.5), count.add(2, alpha=3)

    given = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([3, 0, 1])
    result = poptorch.inferenceModel(averaged)(*given)
    torch.testing.assert_close(result, averaged(*given), check_dtype=False)


# Halves beside floats -------------------------------------------------------------------------------------------------

_PLACES = [0, 1, 1]
PROMOTING: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "matmul": (lambda x, y: x @ y, ((2, 3), (3, 4))),
    "mm": (torch.mm, ((2, 3), (3, 4))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "bmm, method": (lambda x, y: x.bmm(y), ((2, 3, 4), (2, 4, 5))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "addmv": (torch.addmv, ((3,), (3, 4), (4,))),
    "dot": (torch.dot, ((3,), (3,))),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), ((2, 3), (3, 4))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), ((2, 3), (3, 4))),
    "multi_dot": (lambda x, y: torch.linalg.multi_dot([x, y, y]), ((2, 3), (3, 3))),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, y, y), ((2, 3, 4), (2, 5, 4))),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), ((3,), (3,))),
    "cdist": (torch.cdist, ((2, 3), (4, 3))),
    "scatter_add": (lambda x, y: x.scatter_add(0, torch.tensor(_PLACES), y), ((3,), (3,))),
    "index_add": (lambda x, y: torch.index_add(x, 0, torch.tensor(_PLACES), y), ((3,), (3,))),
    "prelu": (F.prelu, ((2, 3), (3,))),
}


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", PROMOTING)
def test_operands_of_two_dtypes_are_promoted(name: str, half: int) -> None:
    function, shapes = PROMOTING[name]
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    given[half] = given[half].half()
    result = poptorch.inferenceModel(function)(*given)
    torch.testing.assert_close(result, function(*(t.float() for t in given)), rtol=1e-5, atol=1e-5)


def test_what_is_updated_in_place_keeps_its_dtype() -> None:
    x, y = torch.randn(3).half(), torch.randn(3)
    result = poptorch.inferenceModel(lambda x, y: x.clone().scatter_add_(0, torch.tensor(_PLACES), y))(x, y)
    torch.testing.assert_close(result, x.scatter_add(0, torch.tensor(_PLACES), y.half()), rtol=5e-3, atol=5e-4)


def test_a_number_beside_halves_is_one() -> None:
    x, y = torch.randn(3).half(), torch.randn(3).half()
    result = poptorch.inferenceModel(lambda x, y: torch.lerp(x, y, torch.tensor(0.25)))(x, y)
    torch.testing.assert_close(result, torch.lerp(x, y, 0.25), rtol=5e-3, atol=5e-4)


def test_a_mask_may_be_more_precise_than_what_it_masks() -> None:
    x, mask = torch.randn(2, 3, 4).half(), torch.randn(3, 3)
    result = poptorch.inferenceModel(lambda x, mask: F.scaled_dot_product_attention(x, x, x, mask))(x, mask)
    expected = F.scaled_dot_product_attention(*[x.float()] * 3, mask)
    assert result.dtype is torch.float16
    torch.testing.assert_close(result.float(), expected, rtol=5e-3, atol=5e-3)


class _OfItself(nn.Module):
    """Attention of a sequence to itself, without the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(x, x, x)[0]


class _Sequence(nn.Module):
    """What a recurrent layer makes of a sequence, without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": _OfItself,
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0),
    "lstm": lambda: _Sequence(nn.LSTM(6, 4, 2, bidirectional=True)),
    "lstm, projected": lambda: _Sequence(nn.LSTM(6, 4, proj_size=3)),
    "gru": lambda: _Sequence(nn.GRU(6, 4)),
    "rnn": lambda: _Sequence(nn.RNN(6, 4)),
}


@pytest.mark.thorough(but_each=4)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_in_the_dtype_of_their_input_and_learn_in_that_of_their_weights(name: str) -> None:
    torch.manual_seed(0)
    ours = _WithLoss(LAYERS[name]())
    theirs = copy.deepcopy(ours)
    x = torch.randn(5, 2, 6)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    expected, loss = theirs(x.half().float())
    loss.backward()
    optimizer.step()
    trained = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    out, _ = trained(x.half())
    assert out.dtype is torch.float16
    torch.testing.assert_close(out.float(), expected.detach(), rtol=1e-2, atol=1e-2)
    for key, value in ours.state_dict().items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, theirs.state_dict()[key], rtol=1e-2, atol=1e-2, msg=key)
    assert not any("check_input" in vars(each) for each in ours.modules())


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_compute_in_the_dtype_of_their_input(cell: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = cell(6, 4), torch.randn(2, 6).half()
    state, expected = poptorch.inferenceModel(layer)(x), layer(x.float())
    if isinstance(expected, tuple):
        state, expected = state[0], expected[0]
    assert state.dtype is torch.float16
    torch.testing.assert_close(state.float(), expected.detach(), rtol=5e-3, atol=5e-3)


# Optimisers on the CPU ------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "alpha": 0.5, "eps": 1e-3},
    ],
)
@pytest.mark.parametrize("variant", [False, True])
def test_rmsprop_takes_the_same_steps_on_the_cpu(numbers: dict[str, Any], variant: bool) -> None:
    torch.manual_seed(0)
    ours = _WithLoss(nn.Linear(5, 3))
    theirs = copy.deepcopy(ours)
    optimizers = [
        poptorch.optim.RMSprop(each.parameters(), lr=0.05, use_tf_variant=variant, **numbers) for each in (ours, theirs)
    ]
    trained, x, seen = poptorch.trainingModel(ours, optimizer=optimizers[0]), torch.randn(4, 5), []
    optimizers[1].register_step_post_hook(lambda *given: seen.append(given))
    for _ in range(STEPS):
        trained(x)

        def computed() -> torch.Tensor:
            optimizers[1].zero_grad()
            loss = theirs(x)[1]
            loss.backward()
            return loss

        assert optimizers[1].step(computed) is not None
    assert len(seen) == STEPS
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)


# Windows at random places ---------------------------------------------------------------------------------------------


def test_fractional_pools_draw_windows_of_their_own() -> None:
    pool = poptorch.inferenceModel(nn.FractionalMaxPool2d(2, output_ratio=0.6), poptorch.Options().randomSeed(3))
    x = torch.arange(400.0).reshape(1, 1, 20, 20).expand(1, 30, 20, 20)
    out = pool(x)
    assert out.shape == (1, 30, 12, 12)
    assert all(torch.isin(out, x).flatten())
    assert len({tuple(map(float, channel.flatten())) for channel in out[0]}) > 20
    assert (out.diff(dim=-1) > 0).all() and (out[..., -1, -1] == 399).all()


# What there is not ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:Guards may run slower on Python 3.13.0")
def test_flex_attention_with_scores_and_masks_of_ones_own() -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(4, 6, 6))

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
            near = lambda score, b, h, i, j: torch.where((i - j).abs() < 3, score + self.bias[h, i, j], score / 2)  # noqa: E731
            later = create_block_mask(lambda b, h, i, j: i > j, None, None, 6, 6, device="cpu")  # one row is empty
            out, aux = flex_attention(q, k, k, near, later, enable_gqa=True, return_aux=AuxRequest(lse=True))
            return out, aux.lse

    torch.manual_seed(0)
    model, q, k = Model(), torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    for ours, expected in zip(poptorch.inferenceModel(model)(q, k), model(q, k), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_of_queries_that_need_a_gradient() -> None:
    """PyTorch has no kernel for it on CPUs: the steps are those of the same attention, written out."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.bias = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return self.attend(q, k, v).transpose(1, 2).flatten(2)

        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen = torch.ones(6, 6, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, k, v, self.bias.masked_fill(~seen, -torch.inf))

    class Flex(Written):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            earlier = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
            biased = lambda score, b, h, i, j: score + self.bias[h, i, j]  # noqa: E731
            return flex_attention(q, k, v, biased, earlier)

    torch.manual_seed(0)
    theirs, ours, x = Written(), Flex(), torch.randn(2, 6, 8)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(poptorch.inferenceModel(copy.deepcopy(ours))(x), theirs(x), rtol=1e-5, atol=1e-5)
    same_training(ours, x, against=theirs)
