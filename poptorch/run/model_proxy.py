"""`ModelProxy`: a wrapper with the attributes of its model.

Reading an attribute of the wrapper reads the model's, and setting one that the model has sets the model's.
`HostModel.setting` records what is set, for the compilation. Base class of `PoplarExecutor`.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch

from poptorch.base.logging_ import logger
from poptorch.base.replica_groups import GroupedParameter, ParameterProxy
from poptorch.options import Options
from poptorch.placement.blocks import module_repr
from poptorch.run.host_model import HostModel, Model


class ModelProxy:
    """Object that adds a model's attributes to its own.

    Names with a leading underscore, names declared by the classes, and names unknown to the model are its own.
    """

    _compiled: Any = None  # the program, once there is one

    def __init__(self, host: HostModel, user_model: Model, options: Options) -> None:
        self._user_model, self._host, self._options = user_model, host, options

    @property
    def model(self) -> Model:
        """The wrapped user model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options."""
        return self._options

    def __repr__(self) -> str:
        return (
            module_repr(self._user_model) if isinstance(self._user_model, torch.nn.Module) else repr(self._user_model)
        )

    def __getattr__(self, attr: str) -> Any:
        if "_user_model" not in self.__dict__:  # during construction
            raise AttributeError(attr)
        value = getattr(self.__dict__["_user_model"], attr)
        if isinstance(value, torch.nn.Parameter):

            def group(grouped: GroupedParameter | None) -> None:
                if self._compiled is not None and grouped != self._host.grouped.get(attr):
                    logger.warning(
                        f"replicaGrouping: the model is compiled, so the groups of {attr} have no effect until it is "
                        "compiled again. Call `destroy()` after it, or group parameters before the first call."
                    )
                self._host.grouped.pop(attr, None)
                if grouped is not None:
                    self._host.grouped[attr] = grouped

            return ParameterProxy(value, attr, self._options.replication_factor, group)
        if isinstance(value, torch.nn.Module):
            self._host.reach(value)
        owner: Any = value.__self__ if inspect.ismethod(value) else None
        if isinstance(owner, torch.nn.Module):

            @wraps(value)
            def method(*args: Any, **kwargs: Any) -> Any:
                if attr in _HANDING_OUT:
                    self._host.reach(owner)
                with self._host.setting():
                    return value(*args, **kwargs)

            return method
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_user_model")
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not is_own and isinstance(module, torch.nn.Module) and hasattr(module, name):
            with self._host.setting():
                setattr(module, name, value)
        else:
            object.__setattr__(self, name, value)


_HANDING_OUT = frozenset({"modules", "named_modules", "children", "named_children", "get_submodule"})
"""Methods of modules by which a wrapper hands out the modules within."""
