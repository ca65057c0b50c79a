"""Options in files of compiled models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poptorch.options import Options
from poptorch.placement.strategies import _IExecutionStrategy
from poptorch.run.serialization import from_data, to_data
from poptorch.settings.setting import OptionsDict, Setting
from popxl.options import OF_THE_RUN

_PROCESS_OPTIONS = ("Distributed.",)  # set by the environment
_SESSION_OPTIONS = "_Popart.options"


def options_to_data(options: Options) -> dict[str, Any]:
    """Serialize options. The execution strategy is omitted: the program already contains block placement.

    Options of the machine are omitted, too: they belong to the process that runs the model.
    """
    values = {
        name: value
        for name, value in options._dotted()
        if not (isinstance(value, _IExecutionStrategy) or name.startswith(_PROCESS_OPTIONS) or _is_run_option(name))
    }
    session_options = values[_SESSION_OPTIONS]
    values[_SESSION_OPTIONS] = {name: value for name, value in session_options.items() if name not in OF_THE_RUN}
    return {name: to_data(value, f"options.{name}") for name, value in values.items()}


def _is_run_option(name: str) -> bool:
    declared = Options._declared().get(name)
    return isinstance(declared, Setting) and declared.of_the_run


def options_from_data(data: Mapping[str, Any]) -> Options:
    """Deserialize `options_to_data` output.

    Raises:
        ValueError, AttributeError, AssertionError: if they are no options.
    """
    options = Options()
    for name, value in data.items():
        if _is_run_option(name) or (name == _SESSION_OPTIONS and OF_THE_RUN & from_data(value).keys()):
            raise ValueError(f"the option {name} is for who runs the model")
        path, _, last = name.rpartition(".")
        group: OptionsDict = options._values()[path] if path else options
        group._set(**{last: from_data(value)})
    return options
