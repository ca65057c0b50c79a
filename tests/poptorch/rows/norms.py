"""Normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, positive

_STATISTICS = (normal(3), positive(3))
_AFFINE = (normal(3) + 1, normal(3))


def _batch(title: str, *shape: int, affine: bool = True, tracked: bool = True, **how: Any) -> Row:
    """With running statistics, which are results, too."""

    def function(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        running = tuple(t.detach().clone() for t in given[:2]) if tracked else (None, None)
        out = F.batch_norm(x, *running, *given[2:], **how)
        return out, *(running if tracked else ())

    return Row(f"batch_norm {title}", function, (normal(*shape), *_STATISTICS, *(_AFFINE if affine else ())))


def _instance(title: str, *shape: int, **how: Any) -> Row:
    def function(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, *affine: torch.Tensor) -> Any:
        running = (mean.detach().clone(), var.detach().clone())
        return F.instance_norm(x, *running, *affine, **how), *running

    # PyTorch wants its statistics in the dtype of the input, and then sums them in that.
    return Row(f"instance_norm {title}", function, (normal(*shape), *_STATISTICS, *_AFFINE), half_tolerance=1e-2)


def _of_module(title: str, module: torch.nn.Module, x: torch.Tensor, **settings: Any) -> Row:
    """A module that computes its parameter of others."""
    names, tensors = zip(*module.named_parameters(), strict=True)

    def function(x: torch.Tensor, *given: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, given, strict=True)), (x,))

    return Row(title, function, (x, *(t.detach() for t in tensors)), half=False, **settings)


def _native_batch(training: bool) -> Any:
    def function(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        running = mean.detach().clone(), var.detach().clone()
        results = torch.native_batch_norm(x, w, b, *running, training, 0.3, 1e-2)
        return results[: 3 if training else 1], running

    return function


ROWS = [
    _batch("training", 4, 3, training=True, eps=1e-2),
    _batch("training, 1d", 2, 3, 5, training=True),
    _batch("training, 2d, momentum", 2, 3, 4, 5, training=True, momentum=0.3),
    _batch("training, 3d, not affine", 2, 3, 4, 2, 3, training=True, affine=False),
    _batch("training, not tracked", 2, 3, 4, 5, training=True, tracked=False),
    _batch("evaluation", 2, 3, 4, 5, training=False),
    _batch("evaluation, not affine", 4, 3, affine=False),
    _instance("with statistics", 2, 3, 4, 5, use_input_stats=True),
    _instance("by statistics", 2, 3, 5, use_input_stats=False),
    Row(
        "batch_norm, torch",
        lambda x, mean, var, w, b: torch.batch_norm(x, w, b, mean.detach(), var.detach(), False, 0.1, 1e-5, False),
        (normal(2, 3, 5), *_STATISTICS, *_AFFINE),
    ),
    Row(
        "instance_norm, torch",
        lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        (normal(2, 3, 5),),
    ),
    Row("instance_norm", lambda x: F.instance_norm(x), (normal(2, 3, 5),)),
    Row(
        "instance_norm, affine",
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.1),
        (normal(2, 3, 5, 4), *_AFFINE),
    ),
    Row("layer_norm", lambda x: F.layer_norm(x, (3, 4)), (normal(2, 3, 4),)),
    Row(
        "layer_norm, affine",
        lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3),
        (normal(2, 3, 4), normal(4), normal(4, seed=1)),
    ),
    Row("layer_norm, weight", lambda x, w: torch.layer_norm(x, (3, 4), w), (normal(2, 3, 4), normal(3, 4))),
    Row("group_norm", lambda x: F.group_norm(x, 2), (normal(2, 6, 4),)),
    Row(
        "group_norm, affine",
        lambda x, w, b: F.group_norm(x, 3, w, b),
        (normal(2, 6, 4, 2), normal(6), normal(6, seed=1)),
    ),
    Row(
        "group_norm, torch", lambda x, w, b: torch.group_norm(x, 2, w, b), (normal(2, 6), normal(6), normal(6, seed=1))
    ),
    Row("rms_norm", lambda x: F.rms_norm(x, (4,)), (normal(2, 3, 4),)),
    Row("rms_norm, affine", lambda x, w: F.rms_norm(x, (3, 4), w, eps=0.1), (normal(2, 3, 4), normal(3, 4))),
    Row("large numbers", lambda x: F.layer_norm(x, (5,)), (normal(2, 5) / 8 + 100,), half=False, tolerance=2e-3),
    Row("local_response_norm", lambda x: F.local_response_norm(x, 2), (normal(2, 5, 4, 3),), half=False),
    Row("normalize", lambda x: [F.normalize(x), F.normalize(x, p=1, dim=-1)], (normal(2, 3, 4),)),
    Row("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), (normal(3, 4),)),
    _of_module("weight_norm", torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4)), normal(2, 3)),
    _of_module(
        "orthogonal", torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 4)), normal(2, 3), tolerance=1e-4
    ),
    _of_module(
        "spectral_norm", torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4)).eval(), normal(2, 3)
    ),
    Row(
        "native_layer_norm",
        lambda x, w, b: torch.native_layer_norm(x, (4, 5), w, b, 1e-2),
        (normal(3, 4, 5), normal(4, 5), normal(4, 5)),
        half=False,
    ),
    Row(
        "native_group_norm",
        lambda x, w, b: torch.native_group_norm(x, w, b, 2, 6, 20, 3, 1e-2),
        (normal(2, 6, 4, 5), normal(6), normal(6)),
        half=False,
    ),
    *(
        Row(
            f"native_batch_norm, {said}", _native_batch(training), (normal(4, 3, 5), *_STATISTICS, *_AFFINE), half=False
        )
        for said, training in (("training", True), ("evaluation", False))
    ),
    Row(
        "native_batch_norm without statistics",
        lambda x, w, b: torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-2),
        (normal(4, 3, 5), *_AFFINE),
        half=False,
    ),
    Row(
        "native_batch_norm, no training",
        lambda x, mean, var, w, b: torch.ops.aten._native_batch_norm_legit_no_training(
            x, w, b, mean.detach(), var.detach(), 0.1, 1e-2
        )[0],
        (normal(4, 3, 5), *_STATISTICS, *_AFFINE),
        gradient=False,
        half=False,
    ),
]
