"""PyTorch functions that capture preserves: each becomes one op, under its public name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from math import comb
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from poptorch.capture.decompositions import packed
from poptorch.errors import createPoptorchError


@dataclass(frozen=True)
class PreservedFunction:
    """Preserved function: a PyTorch function captured as one op.

    Attributes:
        op: name of the op: that of the function, after `torch.`.
        functions: all functions with this op.
        like: a function with the same parameters, for those that take others than Python or the op says.
        writes: function that returns the arguments to overwrite. They follow the results.
        applies: whether to preserve the function, with these arguments.
        shaped_as: a function that gives results of the right shapes and dtypes for the same arguments, by name, where
            PyTorch's own would look at numbers in tensors. Left out, it is PyTorch's own.
        otherwise: replacement for arguments with which it is not preserved; by default the function itself.
    """

    op: str
    functions: tuple[Callable[..., Any], ...]
    like: Callable[..., Any] | None = None
    writes: Callable[[Mapping[str, Any]], list[torch.Tensor]] = lambda given: []
    applies: Callable[[Mapping[str, Any]], bool] = lambda given: True
    shaped_as: Callable[..., Any] | None = None
    otherwise: Callable[..., Any] | None = None

    def signature(self, function: Callable[..., Any]) -> inspect.Signature:
        """Signature of one of the functions."""
        return _signature(self.like or function)

    def arguments(self, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:
        """Named arguments, including defaults; `None` if the function is not preserved with these arguments."""
        bound = self.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        if isinstance(reduction := named.get("reduction"), int):  # the losses of `torch` itself count them
            named["reduction"] = ("none", "mean", "sum")[reduction]
        return named if self.applies(named) else None


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Parameters of a function: Python's, or those of the op that a builtin function runs."""
    if not inspect.isbuiltin(function) and not inspect.ismethoddescriptor(function):
        return inspect.signature(function)
    op = getattr(torch.ops.aten, function.__name__)
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    parameters = []
    for argument in getattr(op, op.overloads()[0])._schema.arguments:
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        if argument.name == "reduction" and default is not inspect.Parameter.empty:
            default = 0  # in Python, whatever the schema says
        name = "input" if argument.name == "self" else argument.name
        parameters.append(inspect.Parameter(name, kinds[argument.kwarg_only], default=default))
    return inspect.Signature(parameters)


def _preserve(*functions: Callable[..., Any], **settings: Any) -> PreservedFunction:
    return PreservedFunction(f"torch.{functions[0].__name__}", functions, **settings)


def _named(names: str, *owners: Any) -> tuple[Callable[..., Any], ...]:
    """Functions with these names in modules or classes; of several owners, in those that have them."""
    pairs = [(owner, name) for name in names.split() for owner in owners]
    return tuple(getattr(owner, name) for owner, name in pairs if len(owners) == 1 or hasattr(owner, name))


def _has_dim(arguments: Mapping[str, Any]) -> bool:
    return arguments["dim"] is not None


def _statistics(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Running statistics that a norm overwrites in training mode."""
    learns = arguments["training"] if "training" in arguments else arguments["use_input_stats"]
    return [t for t in (arguments["running_mean"], arguments["running_var"]) if learns and t is not None]


_LOSSES = _named(
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy hinge_embedding_loss "
    "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss "
    "smooth_l1_loss soft_margin_loss triplet_margin_loss",
    F,
)


def _shaped_as_margin(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Shape function of a multi-class margin loss; corrects vector inputs, where fake tensors have wrong shapes."""

    def shaped(input: torch.Tensor, target: torch.Tensor, reduction: str, **others: Any) -> torch.Tensor:
        if input.dim() > 1:
            return function(input, target, reduction=reduction, **others)
        wanted = reduction == "none" and function is F.multi_margin_loss
        return input.sum().expand(target.shape if wanted else ()).clone()

    return shaped


def _shaped_as_gaussian_nll(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, reduction: str, **others: Any
) -> torch.Tensor:
    losses = (input - target) * (var.sum() if isinstance(var, torch.Tensor) else var)
    return losses if reduction == "none" else losses.sum()


def _shaped_as_ctc(log_probs: torch.Tensor, targets: torch.Tensor, reduction: str, **others: Any) -> torch.Tensor:
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if targets.dim() not in (1, 2) or (targets.dim() == 2 and len(targets) != batch):
        raise RuntimeError(f"ctc_loss: the targets have the shape {tuple(targets.shape)}, for a batch of {batch}.")
    losses = log_probs.sum((0, -1))
    return losses if reduction == "none" else losses.sum()


_LOSSES_OF_TORCH = _named(
    "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss kl_div margin_ranking_loss "
    "poisson_nll_loss triplet_margin_loss",
    torch,
)
"""Losses in `torch` named as in `torch.nn.functional`, but with other parameters. The reduction is a number."""

_PRESERVED_LOSSES = (
    *(_preserve(loss) for loss in (*_LOSSES, *_LOSSES_OF_TORCH)),
    _preserve(F.gaussian_nll_loss, shaped_as=_shaped_as_gaussian_nll),
    _preserve(F.ctc_loss, torch.ctc_loss, shaped_as=_shaped_as_ctc),
    *(_preserve(loss, shaped_as=_shaped_as_margin(loss)) for loss in (F.multilabel_margin_loss, F.multi_margin_loss)),
    # Options only select the algorithm.
    _preserve(F.linear_cross_entropy, shaped_as=lambda options, **given: F.linear_cross_entropy(**given)),
)

LOSSES = frozenset(each.op for each in _PRESERVED_LOSSES)
"""Names of the ops that are losses."""

COMPOSED_LOSSES = (F.triplet_margin_with_distance_loss,)
"""Losses that call a user function: their ops are captured separately, and the result is marked."""


def _shaped_as_combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    count = comb(len(input) + r - 1 if with_replacement else len(input), r)
    return input.sum().expand(count, r).clone()  # of the input, so that gradients are known to flow


_RECURRENT = _named("lstm gru rnn_tanh rnn_relu", torch)
_CELLS = _named("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", torch)


def _with_rows(arguments: Mapping[str, Any]) -> bool:
    """Whether a recurrent layer received a plain tensor rather than a packed sequence."""
    return isinstance(arguments["has_biases"], bool)


def _shaped_as_recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shape function of a recurrent layer: repeats one time step's output, as PyTorch runs all steps op by op."""

    def shaped(input: torch.Tensor, batch_first: bool, **given: Any) -> tuple[torch.Tensor, ...]:
        time = 1 if batch_first else 0
        out, *last = function(input.narrow(time, 0, min(1, input.shape[time])), *given.values(), batch_first)
        sizes = list(out.shape)
        sizes[time] = input.shape[time]
        return out.expand(sizes).clone(), *last

    return shaped


def _shaped_as_bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if minlength == 0:
        raise createPoptorchError(
            "Bincount `minlength` must be specified and must be a constant. Without it the shape of the result depends "
            "on the numbers in the tensor. Give one that is larger than all of them."
        )
    wide = weights is not None and weights.dtype is not torch.float32
    return torch.zeros(minlength, dtype=torch.int64 if weights is None else torch.float64 if wide else torch.float32)


def _shaped_as_cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    input = input * 1.0  # integers have a mean between them
    rows = input.reshape(-1, input.shape[-1]) if input.dim() else input.reshape(1, 1)
    return rows.sum() if len(rows) == 1 else rows @ rows.T


def _shaped_as_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shape function of `grouped_mm` for any dtype: PyTorch's own covers only its fastest kernel."""
    if bias is not None:
        raise createPoptorchError("grouped_mm: `bias` is not supported, as in PyTorch. Add it to the result.")
    if mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        return (mat_a @ mat_b).expand(len(offs), -1, -1).to(out_dtype or mat_a.dtype, copy=True)
    first, second = (t[0] if t.dim() > other.dim() else t for t, other in ((mat_a, mat_b), (mat_b, mat_a)))
    return (first @ second).to(out_dtype or mat_a.dtype)


def _shaped_as_lstsq(
    input: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Results for a matrix of full rank, as only this case has residuals. The driver determines which results exist."""
    vectors = b.dim() == input.dim() - 1
    solution, none = torch.matmul(input.mT, b.unsqueeze(-1) if vectors else b), input.new_empty(0)
    has_residuals = driver not in (None, "gelsy") and input.shape[-2] > input.shape[-1]
    residuals = solution.sum(-2) if has_residuals else none
    rank = input.new_empty(input.shape[:-2] if driver != "gels" else 0, dtype=torch.int64)
    values = input.new_empty(*input.shape[:-2], min(input.shape[-2:])) if driver in ("gelsd", "gelss") else none
    solution = solution.squeeze(-1) if vectors else solution
    results = (solution, residuals, rank, values)
    return torch.return_types.linalg_lstsq(results)  # type: ignore[attr-defined]


PRESERVED_FUNCTIONS: tuple[PreservedFunction, ...] = (
    *_PRESERVED_LOSSES,
    _preserve(
        F.batch_norm,
        writes=_statistics,
        shaped_as=lambda momentum, **given: F.batch_norm(momentum=0.0, **given),  # it may be a tensor
    ),
    _preserve(F.instance_norm, torch.instance_norm, writes=_statistics),
    _preserve(torch.native_batch_norm, writes=_statistics),
    _preserve(torch.batch_norm, writes=_statistics),
    *(_preserve(*_named(name, F, torch)) for name in ("layer_norm", "group_norm", "rms_norm")),
    _preserve(F.pad),
    *(_preserve(*_named(name, torch, torch.Tensor)) for name in ("quantile", "nanquantile")),
    _preserve(torch.bincount, torch.Tensor.bincount, shaped_as=_shaped_as_bincount),
    _preserve(torch.cov, torch.Tensor.cov, shaped_as=_shaped_as_cov),
    _preserve(torch.corrcoef, torch.Tensor.corrcoef, shaped_as=_shaped_as_cov),
    PreservedFunction("aten.linalg_lstsq", (torch.linalg.lstsq,), shaped_as=_shaped_as_lstsq),
    _preserve(F.grouped_mm, torch._grouped_mm, like=_shaped_as_grouped_mm, shaped_as=_shaped_as_grouped_mm),
    _preserve(torch.combinations, shaped_as=_shaped_as_combinations),
    _preserve(F.linear),
    _preserve(F.bilinear),
    _preserve(
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.linalg.matmul,
        like=lambda input, other, *, out=None: None,
        applies=lambda given: given["out"] is None,
    ),
    _preserve(
        torch.einsum, like=lambda equation, *operands: None, applies=lambda given: isinstance(given["equation"], str)
    ),
    _preserve(F.softmax, torch.softmax, torch.Tensor.softmax, applies=_has_dim),
    _preserve(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, applies=_has_dim),
    _preserve(F.scaled_dot_product_attention),
    _preserve(F.multi_head_attention_forward),
    *(_preserve(f, applies=_with_rows, shaped_as=_shaped_as_recurrent(f), otherwise=packed(f)) for f in _RECURRENT),
    *(_preserve(f) for f in _CELLS),
    _preserve(F.dropout),
    _preserve(F.embedding, applies=lambda given: given["max_norm"] is None),
)

# Dtypes ---------------------------------------------------------------------------------------------------------------

_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
_OF_THE_ACTIVATION = (*_named(f"linear bilinear linear_cross_entropy {_CONVOLUTIONS}", F), *_RECURRENT, *_CELLS)
"""Functions computed in the dtype of their first argument. (PyTorch requires equal dtypes.)"""

_OF_QUERY_KEY_AND_VALUE = (F.multi_head_attention_forward, F.scaled_dot_product_attention)
"""Functions computed in the promoted dtype of query, key and value, regardless of weights and masks."""


_PRODUCTS = "addbmm addmm addmv addr baddbmm lerp"
_UPDATES = "index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add scatter_reduce"
_PROMOTING = (
    *_named(f"{_PRODUCTS} {_UPDATES}", torch, torch.Tensor),
    *_named("bmm cdist chain_matmul dot einsum inner isclose matmul mm mv prelu tensordot vdot", torch, torch.Tensor),
    *_named("cross matmul multi_dot solve solve_triangular vecdot", torch.linalg),
    *_named("__matmul__ __rmatmul__ cross", torch.Tensor),
    *_named("embedding_bag", F),
    torch.cross,
)
"""Functions of several tensors that PyTorch does not promote to one dtype, unlike those of one element at a time."""

_IN_PLACE = _named(" ".join(f"{name}_" for name in f"{_PRODUCTS} {_UPDATES}".split()), torch.Tensor)


def as_activation(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Function arguments; where all tensors must share one dtype, cast to the computation dtype."""
    deciding = [t for t in pytree.tree_leaves(_deciding(function, args, kwargs)) if _is_float(t)]
    if not deciding:
        return args, kwargs
    counting = [t.dtype for t in deciding if t.dim()] or [t.dtype for t in deciding]  # numbers do not count
    wanted = reduce(torch.promote_types, counting)
    return pytree.tree_map_only(_is_float, lambda t: t.to(wanted), (args, kwargs))


def _deciding(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments that determine a function's computation dtype; none if it accepts mixed dtypes."""
    if any(function is each for each in (*_OF_THE_ACTIVATION, *_IN_PLACE)):
        return args[0] if args else kwargs["input1" if function is F.bilinear else "input"]
    if any(function is each for each in _OF_QUERY_KEY_AND_VALUE):
        return args[:3], [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
    return (args, kwargs) if any(function is each for each in _PROMOTING) else None


def _is_float(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


# Masks ----------------------------------------------------------------------------------------------------------------

_MASKS: dict[Any, tuple[int, str]] = {
    **dict.fromkeys(
        _named("masked_fill masked_fill_ masked_scatter masked_scatter_", torch, torch.Tensor), (1, "mask")
    ),
    **dict.fromkeys(_named("index_put index_put_", torch, torch.Tensor), (1, "indices")),
    torch.where: (0, "condition"),
    torch.Tensor.where: (1, "condition"),
}
"""Functions with a mask: its position among their arguments, and its name."""


def with_masks_of_bools(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Function arguments, with uint8 masks, which PyTorch accepts, converted to bool."""
    position, name = _MASKS.get(function, (None, "")) if getattr(function, "__hash__", None) else (None, "")
    if position is None:
        return args, kwargs
    if position < len(args):
        return (*args[:position], _of_bools(args[position]), *args[position + 1 :]), kwargs
    return args, {key: _of_bools(value) if key == name else value for key, value in kwargs.items()}


def with_plain_sizes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Function arguments, with scalar tensors in lists of sizes, as in `F.pad(x, (0, n))`, converted to integers.

    PyTorch reads them, and the recorded op must hold the values read.
    """
    if function is torch.einsum:  # its operands may be numbers, and are none of sizes
        return args, kwargs
    return tuple(map(_plain_sizes, args)), {name: _plain_sizes(value) for name, value in kwargs.items()}


def _plain_sizes(sizes: Any) -> Any:
    is_read = lambda t: isinstance(t, torch.Tensor) and t.dim() == 0 and not _is_float(t)  # noqa: E731
    if type(sizes) not in (list, tuple) or not all(isinstance(size, int) or is_read(size) for size in sizes):
        return sizes
    return type(sizes)(map(int, sizes)) if any(map(is_read, sizes)) else sizes


def _of_bools(masks: Any) -> Any:
    is_mask = lambda leaf: isinstance(leaf, torch.Tensor) and leaf.dtype is torch.uint8  # noqa: E731
    return pytree.tree_map(lambda leaf: leaf.bool() if is_mask(leaf) else leaf, masks)
