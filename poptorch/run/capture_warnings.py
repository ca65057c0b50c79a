"""Warnings about host effects of `forward` that its program does not repeat in each run."""

from __future__ import annotations

import pickle
import random
import re
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from poptorch.base.logging_ import Warned, logger
from poptorch.capture.host_state import HostState
from poptorch.capture.model import Captured
from poptorch.run.host_model import HostModel

_warned: weakref.WeakKeyDictionary[torch.nn.Module, Warned] = weakref.WeakKeyDictionary()
"""Warnings given, by module."""


def warn_of_host_changes(captured: Captured, module: torch.nn.Module) -> None:
    """Warn, once per item, about host state changed by `forward`."""
    warned = _warned.setdefault(module, Warned())
    for text, line in captured.formatted_numbers.items():
        warned.once(
            f"text of {text}",
            "`forward` makes a text of %s (%s), or of what it computes with it. The program carries the number from "
            "run to run, but the text stays that of the first one.",
            text,
            line,
        )
    if names := [text for text in captured.carried if text not in warned]:
        warned.update(names)
        places = [f"{text} ({line})" if (line := captured.carried[text]) else text for text in names]
        logger.warning(
            "`forward` changes %s. A program carries parameters, buffers and numbers that `forward` only computes with "
            "from run to run, and nothing else: each run begins with what was there when the model was wrapped. Have "
            "the module own it as a buffer (`register_buffer`), and overwrite that: `self.x.copy_(...)`, "
            "`self.step.add_(1)`. What the host changes from call to call is to be an argument of `forward`, and what "
            "you want to look at a result.",
            ", ".join(places),
        )


def host_generators() -> dict[str, Any]:
    """States of the random number generators of Python and NumPy."""
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}


def warn_of_draws(generators: Sequence[str], module: torch.nn.Module) -> None:
    """Warn, once per generator, about random numbers that `forward` draws on the host."""
    warned = _warned.setdefault(module, Warned())
    for name in generators:
        warned.once(
            f"draws of {name}",
            "`forward` draws random numbers of `%s`. They are drawn once, and a part of the program: each run has the "
            "same. Draw them on the device, as `torch.rand(())`, and choose by them with `torch.where`; or give them "
            "to the model as tensors.",
            name,
        )


def warn_of_changed_arguments(names: Sequence[str], model: HostModel) -> None:
    """Warn, once per name, about arguments whose lists and dictionaries `forward` changes."""
    module = model.module
    warned = _warned.setdefault(module, Warned())
    for name in names:
        if f"argument {name}" not in warned:
            line = HostState(module, model.call).line_of(name)
            warned.once(
                f"argument {name}",
                "`forward` changes its argument `%s`%s. It has a copy of the lists and dictionaries among its "
                "arguments: the caller's stay as they were. Return what you need; tensors may be written to, and "
                "attributes of objects set.",
                name,
                line and f" ({line})",
            )


def warn_of_host_tensors(captured: Captured, warned: Warned) -> None:
    """Warn, once per text, about host tensors: those used on the device, and outputs computed entirely on the host."""
    for text in _host_tensor_warnings(captured):
        warned.once(text, "%s", text)


_MAX_WARNINGS = 3
"""Maximum number of an object's further tensors with a warning each."""


def _host_tensor_warnings(captured: Captured) -> Iterator[str]:
    """Texts for `warn_of_host_tensors`, one for many tensors of an object."""
    frozen = [each for each in captured.frozen if each.first_use is not None and not each.of_module]
    for holder, group in groupby(frozen, lambda each: re.split(r"[.\[]", each.text, maxsplit=1)[0]):
        first, *others = group
        if len(others) > _MAX_WARNINGS:
            yield (
                f"`{first.text}` and {len(others)} other tensors of `{holder}` are tensors of the host, and used on "
                f"the device ({first.first_use}): their numbers are frozen, a part of the program from now on. If they "
                "are those of a layer, wrap the layer, or a module that has it: a function has no parameters."
            )
            continue
        for each in (first, *others):
            yield (
                f"`{each.text}` is a tensor of the host, and used on the device ({each.first_use}): its numbers are "
                "frozen, a part of the program from now on. If that is meant, move it: "
                f"`{each.text}.to(x.device)`, where `x` is an input. If they are to change, give it to the model as an "
                "argument, or have the module own it as a buffer (`register_buffer`)."
            )
    if any(value.is_on_host for value in captured.trace.outputs):
        yield (
            "Output expected to be on the IPU but is on cpu: it is made of tensors of the host alone, and comes back "
            "as it is. Move them, if the device is to make it: `t.to(x.device)`, where `x` is an input."
        )
