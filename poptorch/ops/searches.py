"""Searches: for labels of sequences, and for points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy
import torch

from poptorch.capture.tracer import current
from poptorch.ops.declaration import Tensors, op


@op()
def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> Tensors:
    """Beam search for the most likely labels of sequences, from the probabilities of classes at each time (CTC).

    Args:
        probs: logarithms of the probabilities, `[time, batch, classes]`.
        lengths: lengths of the sequences, `[batch]`.
        blank: the class that is not a label.
        beam_width: number of prefixes that the search keeps.
        top_paths: number of results for each sequence.

    Returns:
        Logarithms of the probabilities of the results, `[batch, top_paths]`; their numbers of labels,
        `[batch, top_paths]`; and the labels, `[batch, top_paths, time]`, padded with blanks. The best come first.

    Example:
        >>> probs = torch.tensor([[[0.1, 0.8, 0.1]], [[0.7, 0.2, 0.1]], [[0.1, 0.2, 0.7]]]).log()
        >>> poptorch.ctc_beam_search_decoder(probs, torch.tensor([3]))[2]
        tensor([[[1, 2, 0]]], dtype=torch.int32)
    """
    time, batch, _ = probs.shape
    if current() is not None:
        paths = torch.empty(batch, top_paths, dtype=torch.int32)
        return [torch.empty(batch, top_paths), paths, paths[..., None].expand(-1, -1, time).clone()]
    from poptorch.base.beam_search import compiled_beam_search  # imports JAX, which most hosts need not

    given = probs.detach().numpy(), lengths.numpy().astype("int32")
    decoded = compiled_beam_search(*given, blank=blank, beam_width=beam_width, top_paths=top_paths)
    return [torch.from_numpy(numpy.array(each)) for each in decoded]


@op()
def fps(src: torch.Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """Farthest point sampling: each point has maximum distance from those before it.

    Args:
        src: points of several sets, `[points, coordinates]`, or `[points]` on a line.
        ptr: the start of each set, and the end of the last one.
        ratio: the proportion of each set that is sampled, rounded up.
        random_start: start each set from a random point, not from its first.

    Returns:
        The indices of the points.

    Example:
        >>> poptorch.fps(torch.tensor([[0.0], [1.0], [5.0], [2.0]]), [0, 4])
        tensor([0, 2])
    """
    found = []
    src = src if src.dim() == 2 else src.reshape(len(src), -1)
    for start, stop in itertools.pairwise(int(p) for p in ptr):
        points = src[start:stop]
        count = math.ceil(numpy.float32(ratio) * (stop - start))  # as torch_cluster rounds it: 7 of 100 for 0.07
        if current() is not None:
            found.append(torch.empty(count, dtype=torch.int64))
            continue
        chosen = [int(torch.randint(len(points), ())) if random_start else 0]
        nearest_one = torch.full((len(points),), math.inf)
        while len(chosen) < count:
            nearest_one = torch.minimum(nearest_one, ((points - points[chosen[-1]]) ** 2).sum(-1))
            chosen.append(int(nearest_one.argmax()))
        found.append(torch.tensor(chosen[:count]) + start)
    return torch.cat(found)


@op()
def nearest(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: torch.Tensor | Sequence[int] | None = None,
    batch_y: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """Index of the nearest neighbour of each point.

    Args:
        x: points, `[points, coordinates]`, or `[points]` on a line.
        y: the candidates.
        batch_x, batch_y: the set of each point, as a tensor or a list of numbers; only points of one set are compared.

    Example:
        >>> poptorch.nearest(torch.tensor([[1.0], [7.0]]), torch.tensor([[0.0], [8.0], [9.0]]))
        tensor([0, 1])
    """
    x, y = (each[:, None] if each.dim() == 1 else each for each in (x, y))
    distances = ((x[:, None] - y[None]) ** 2).sum(-1)
    if batch_x is not None and batch_y is not None:
        apart = torch.as_tensor(batch_x)[:, None] != torch.as_tensor(batch_y)[None]
        distances = distances.masked_fill(apart, math.inf)
    return distances.argmin(1)
