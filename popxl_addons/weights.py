"""Weights in the layout of Hugging Face: a `.safetensors` file, or a folder of several with an index.

Names and layouts of weights in files are data: `Names`. Those of GPT-2, Llama and Qwen, for
`popxl_addons.layers.LanguageModel`, are in `popxl_addons.weight_names`; for another model, write such a table.

Files are mapped into memory, and values are copied once, to the host copy of their variable: if replica groups split a
weight, each group reads its own part, and weights without a variable are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import popxl
from popxl.errors import UnreadableFileError
from popxl.extend.files import replace_file
from popxl.extend.processes import Instance, launched
from popxl.tensor import Variable
from popxl_addons.array_files import DTYPES, InSafetensors, safetensors_in
from popxl_addons.dot_tree import DotTree
from popxl_addons.weight_names import GPT2, LLAMA, QWEN, Names, Stored, pattern

__all__ = ["GPT2", "LLAMA", "QWEN", "Names", "Stored", "load_safetensors", "save_safetensors"]

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Contents of files ----------------------------------------------------------------------------------------------------


def _files_in(folder: Path) -> list[Path]:
    """Weight files in a folder: those of its index, or the only one."""
    if (folder / INDEX).exists():
        try:
            named = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()
            files = sorted(set(named))
            foreign = [name for name in files if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise UnreadableFileError(f"`{folder / INDEX}` is damaged: {problem!r}") from problem
        if foreign:
            raise UnreadableFileError(f"`{folder / INDEX}` names files that are not in its folder: {foreign}.")
        if missing := [name for name in files if not (folder / name).exists()]:
            raise FileNotFoundError(f"`{folder}` is not complete: its index names {missing}, which are not there.")
        return [folder / name for name in files]
    candidates = [folder / FILE] if (folder / FILE).exists() else sorted(folder.glob("*.safetensors"))
    if len(candidates) != 1:
        raise FileNotFoundError(
            f"`{folder}` holds no weights that can be found: expected `{INDEX}`, `{FILE}`, or one file that ends in "
            f"`.safetensors`; found {[path.name for path in candidates]}."
        )
    return candidates


def _weights_at(place: str | os.PathLike[str]) -> dict[str, InSafetensors]:
    path = Path(place).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"load_safetensors: there is no file or folder `{path}`.")
    files = _files_in(path) if path.is_dir() else [path]
    return {name: weight for file in files for name, weight in safetensors_in(file)[0].items()}


# Loading --------------------------------------------------------------------------------------------------------------


def load_safetensors(
    variables: DotTree[Any] | Mapping[str, Variable],
    place: str | os.PathLike[str],
    names: Names | Mapping[str, str | Stored] | None = None,
    *,
    narrow: bool = False,
    partial: bool = False,
    session: popxl.Session | None = None,
) -> None:
    """Read weights of a model from a file or folder, as Hugging Face publishes them, into variables.

    All is looked at before anything changes. A variable with several groups of replicas gets the same for all of them,
    or a part for each, if one axis of the weight is as many times as long.

    Make the graph of a large model within `layers.uninitialized_weights`: otherwise random numbers are drawn in vain.

    Args:
        variables: variables by their names in the model.
        place: a ``.safetensors`` file, or a folder with one, or with several and an index.
        names: names in the file, such as `popxl_addons.weights.LLAMA`; by default those of `variables`.
        narrow: whether numbers may be rounded to the dtype of a variable, as from float32 to bfloat16. None becomes
            infinite. Narrower ones are always widened.
        partial: whether these are the variables of a part of the model, such as a stage: then the file may hold more.
        session: a session that runs the program, if one does: within its ``with`` block the device gets the numbers,
            too, and other variables keep theirs. Variables that it has from another session (`use_variables_of`) are
            loaded there. Without, sessions get the numbers when they upload their variables.

    Raises:
        ValueError: for weights that are missing, left over, or of another shape or dtype, listing all of them; and for
            a session of another program.
        FileNotFoundError: if there are no files.
        UnreadableFileError: if one is damaged.
        TypeError: if `variables` holds something else.

    Example:
        >>> import tempfile, safetensors.numpy
        >>> with popxl.Ir().main_graph:
        ...     v = addons.NamedTensors(fc=addons.NamedTensors(weight=popxl.variable(np.zeros((2, 3)), popxl.float32)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     safetensors.numpy.save_file({"fc.weight": np.ones((3, 2), np.float32)}, f"{folder}/model.safetensors")
        ...     load_safetensors(v, folder, {"fc.weight": Stored("fc.weight", transposed=True)})
        >>> v.fc.weight.data.sum()
        np.float32(6.0)
    """
    by_name = _session_variables("load_safetensors", variables, session)
    loads = _loads(by_name, place, _table(names, by_name), narrow, partial, session)
    owners = () if session is None else dict.fromkeys(session.owner_of(v)[0] for v in by_name.values())
    attached = [owner for owner in owners if owner.is_attached]
    for owner in attached:
        owner.weights_to_host()  # the upload below is of all variables
    copies = {id(each.variable.ir.host_copies): each.variable.ir.host_copies for each in loads}
    with ExitStack() as locked:
        for _, copy in sorted(copies.items()):
            locked.enter_context(copy.lock)
        for each in loads:
            each.copy()
        for copy in copies.values():
            copy.record_write()
    for owner in attached:
        owner.weights_from_host()


class _Load(NamedTuple):
    """A weight of a file, and the variable that takes it."""

    variable: Variable
    weight: InSafetensors
    stored: Stored

    def copy(self) -> None:
        """Copy the weight into the variable's host copy. `_problem` has found nothing wrong."""
        array = _as_ours(self.weight.mapped(), self.stored)
        for target, index in _group_slices(self.variable, array.shape, self.stored.rows) or ():
            np.copyto(target, 0 if index is None else array[index], casting="unsafe")


def _loads(
    by_name: Mapping[str, Variable],
    place: str | os.PathLike[str],
    table: Names,
    narrow: bool,
    partial: bool,
    session: popxl.Session | None,
) -> list[_Load]:
    """What to load into each variable, and into those of other sessions that it stands for. `ValueError` with all
    problems: missing, left over, and unfit weights."""
    weights = _weights_at(place)
    removed_prefix = "" if any(name.startswith(table.prefix) for name in weights) else table.prefix
    missing, unfit, used = [], [], set()
    loads: list[_Load] = []
    for name, v in by_name.items():
        stored = table.stored_form(name)
        file_name = "" if stored is None else stored.name.removeprefix(removed_prefix)
        if stored is None or file_name not in weights:
            missing.append(f"`{name}` (" + (f"`{file_name}`" if file_name else "not among `names`") + ")")
            continue
        used.add(file_name)
        weight = weights[file_name]
        for target in dict.fromkeys([v] if session is None else [v, session.owner_of(v)[1]]):
            if problem := _problem(target, weight, stored, narrow):
                unfit.append(f"`{name}` is {v.dtype.name}{list(v.shape)}, and `{file_name}` is {weight}: {problem}")
            loads.append(_Load(target, weight, stored))
    ignored = {name.removeprefix(removed_prefix) for name in table.ignored}
    ignored |= {
        name for name, other in table.tied.items() if _are_equal(weights, name, other.removeprefix(removed_prefix))
    }
    unused = [] if partial else [f"`{n}`" for n in weights if n not in used and pattern(n)[0] not in ignored]
    problems = {"missing in the file": missing, "left over in the file": unused, "unfit": unfit}
    if any(problems.values()):
        problems_text = "; ".join(f"{kind}: {', '.join(items)}" for kind, items in problems.items() if items)
        raise ValueError(f"load_safetensors: nothing has been loaded from `{os.fspath(place)}`. {problems_text}.")
    return loads


def _are_equal(weights: Mapping[str, InSafetensors], *names: str) -> bool:
    """Whether a file has weights of two names, with the same numbers."""
    arrays = [weights[name].mapped() for name in names if name in weights and weights[name].dtype in DTYPES]
    return len(arrays) == len(names) and all(np.array_equal(arrays[0], array) for array in arrays)


def _session_variables(
    what: str, variables: DotTree[Any] | Mapping[str, Variable], session: popxl.Session | None
) -> dict[str, Variable]:
    by_name = dict(variables.to_dict() if isinstance(variables, DotTree) else variables)
    if invalid := [name for name, v in by_name.items() if not isinstance(v, Variable)]:
        raise TypeError(f"{what}: `variables` are to be variables of the main graph; these are not: {invalid}.")
    if len({v.ir for v in by_name.values()}) > 1:
        raise ValueError(f"{what}: `variables` are of several programs; expected those of one.")
    if session is not None and any(v.ir is not session.ir for v in by_name.values()):
        raise ValueError(f"{what}: `variables` are of another program than `session` runs; pass the session of theirs.")
    return by_name


def _table(names: Names | Mapping[str, str | Stored] | None, by_name: Mapping[str, Variable]) -> Names:
    if isinstance(names, Names):
        return names
    return Names({name: name for name in by_name} if names is None else names)


def _as_ours(array: np.ndarray, stored: Stored) -> np.ndarray:
    """Weight view in variable layout."""
    if stored.transposed:
        array = array.T
    k, n = stored.part
    if n == 1:
        return array
    size = array.shape[-1] // n
    return array[..., k * size : (k + 1) * size]


def _shape_as_ours(shape: tuple[int, ...], stored: Stored) -> tuple[int, ...] | None:
    """Weight shape in variable layout; `None` if indivisible."""
    shape = shape[::-1] if stored.transposed else shape
    n = stored.part[1]
    if n == 1:
        return shape
    return (*shape[:-1], shape[-1] // n) if shape and shape[-1] % n == 0 else None


def _group_slices(v: Variable, shape: tuple[int, ...], count: int | None) -> list[tuple[np.ndarray, Any]] | None:
    """Target rows and weight slice of each replica group, `None` for rows beyond `count`; `None` altogether without a
    fit."""
    groups = v.replica_grouping.num_groups
    rows = [v.data[i, ...] for i in range(groups)] if groups > 1 else [v.data]
    if count is not None:
        return _rows(v, rows, shape, count)
    if shape == v.shape:
        return [(row, ...) for row in rows]
    axes = range(len(v.shape)) if v.group_axis is None else [v.group_axis]
    split = [d for d in axes if shape == (*v.shape[:d], groups * v.shape[d], *v.shape[d + 1 :])]
    if len(split) != 1:
        return None
    (axis,) = split
    size = v.shape[axis]
    lead = (slice(None),) * axis
    return [(row, (*lead, slice(i * size, (i + 1) * size))) for i, row in enumerate(rows)]


def _rows(
    v: Variable, rows: list[np.ndarray], shape: tuple[int, ...], count: int
) -> list[tuple[np.ndarray, Any]] | None:
    """Slice per group of a weight with `count` rows, for larger variables; see `_group_slices`."""
    if not v.shape or shape != (count, *v.shape[1:]):
        return None
    size = v.shape[0]
    is_split = len(rows) > 1 and (v.group_axis == 0 or count > size)
    if count > size * (len(rows) if is_split else 1) or (is_split and v.group_axis not in (None, 0)):
        return None
    targets: list[tuple[np.ndarray, Any]] = []
    for i, row in enumerate(rows):
        start = i * size if is_split else 0
        size_here = min(max(count - start, 0), size)
        targets += [(row[:size_here], slice(start, start + size_here)), (row[size_here:], None)]
    return targets


def _problem(v: Variable, weight: InSafetensors, stored: Stored, narrow: bool) -> str:
    """Reason why a weight cannot fill a variable; empty if compatible."""
    wanted, source = v.dtype.as_numpy(), DTYPES.get(weight.dtype)
    shape = _shape_as_ours(weight.shape, stored)
    if shape is None:
        return f"its last axis cannot be divided into {stored.part[1]} parts"
    if _group_slices(v, shape, stored.rows) is None:
        groups = v.replica_grouping.num_groups
        if stored.rows is not None:
            expected_rows = f"{stored.rows} `rows`, which have to fit into {groups} x {v.shape}"
            return f"as the variable has it, that is the shape {shape}; expected {expected_rows}"
        if shape and v.shape and shape[1:] == v.shape[1:] and shape[0] < groups * v.shape[0]:
            return f"if the variable has more rows on purpose, say so: `Stored(..., rows={shape[0]})`"
        hint = f", or that with one axis {groups} times as long" if groups > 1 else ""
        return f"as the variable has it, that is the shape {shape}; expected {v.shape}{hint}"
    kinds = (v.dtype.is_floating_point, v.dtype.is_complex)
    if source is None or wanted.names or kinds != (weight.dtype in _FLOATS, weight.dtype == "C64"):
        return "one cannot be made of the other"
    if not v.data.flags.writeable:
        return "the variable is a read-only memory map"
    if not narrow and not np.can_cast(source, wanted, "safe"):
        return "numbers would be rounded; say `narrow=True` if they may be"
    if v.dtype.is_floating_point and jnp.finfo(source).max > jnp.finfo(wanted).max:
        largest = float(jnp.finfo(wanted).max)
        if _exceeds(weight.mapped().reshape(-1), largest):
            return f"some numbers are above {largest:g}, the largest of {v.dtype.name}"
    return ""


def _exceeds(numbers: np.ndarray, largest: float) -> bool:
    """Whether any finite element exceeds a limit, tested in chunks to save memory."""
    step = 1 << 20
    chunks = (numbers[start : start + step].astype(np.float64) for start in range(0, len(numbers), step))
    return any((np.isfinite(chunk) & (np.abs(chunk) > largest)).any() for chunk in chunks)


_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

# Saving ---------------------------------------------------------------------------------------------------------------


def save_safetensors(
    variables: DotTree[Any] | Mapping[str, Variable],
    place: str | os.PathLike[str],
    names: Names | Mapping[str, str | Stored] | None = None,
    *,
    session: popxl.Session | None = None,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write weights of a model as `load_safetensors` reads them, and other programs for Hugging Face's layout.

    Each file is replaced when it is complete. If several processes run the program, all have to call this, and the
    first one writes.

    Args:
        variables, names: as for `load_safetensors`.
        place: a file, if it ends in ``.safetensors``; else a folder, which is made if need be. Other files in it stay.
        session: session that has run the program, for the present values; by default the host copies are saved.
        file_bytes: approximate maximal size of a file in a folder. Larger weights are split into several, with an
            index.

    Raises:
        ValueError: for variables that have no name in the file, or of which some parts are missing; or that groups of
            replicas split, if neither `Stored.axis` nor their `group_axis` defines the axis.
        TypeError: if `variables` holds something else.

    Example:
        >>> import tempfile, safetensors.numpy
        >>> with popxl.Ir().main_graph:
        ...     v = addons.NamedTensors(weight=popxl.variable(np.ones((2, 3)), popxl.float32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_safetensors(v, folder, {"weight": Stored("fc.weight", transposed=True)})
        ...     safetensors.numpy.load_file(f"{folder}/model.safetensors")["fc.weight"].shape
        (3, 2)
    """
    by_name = _session_variables("save_safetensors", variables, session)
    stored_parts = _parts_by_name(by_name, _table(names, by_name))
    data = session.values_of(by_name.values()) if session is not None else {v: v.data for v in by_name.values()}
    views = {name: [_merge_replicas(name, v, data[v], s) for v, s in parts] for name, parts in stored_parts.items()}
    transposed = {name: parts[0][1].transposed for name, parts in stored_parts.items()}
    if (launched() or Instance()).instance_index != 0:
        return
    path = Path(place).expanduser()

    def arrays(chosen: Iterable[str]) -> dict[str, np.ndarray]:
        return {name: _as_stored(views[name], transposed[name]) for name in chosen}

    if path.suffix == ".safetensors":
        _write(path, arrays(views))
    else:
        sizes = {name: sum(part.nbytes for part in parts) for name, parts in views.items()}
        _write_folder(path, sizes, file_bytes, arrays)


def _parts_by_name(by_name: Mapping[str, Variable], table: Names) -> dict[str, list[tuple[Variable, Stored]]]:
    """Variables for each file name, in part order. Raises `ValueError`, naming all missing variables and parts."""
    by_part: dict[str, dict[int, tuple[Variable, Stored]]] = {}
    problems = []
    for name, v in by_name.items():
        stored = table.stored_form(name)
        if stored is None:
            problems.append(f"`{name}` is not among `names`")
        elif v.dtype.as_numpy().names:
            problems.append(f"`{name}` is of {v.dtype.name}, which the format has no word for")
        else:
            by_part.setdefault(stored.name, {})[stored.part[0]] = (v, stored)
    for name, by_index in by_part.items():
        (_, first), *_ = by_index.values()
        _, count = first.part
        if absent := [k for k in range(count) if k not in by_index]:
            problems.append(f"parts {absent} of the {count} of `{name}` are missing")
    if problems:
        raise ValueError(f"save_safetensors: nothing has been written. {'; '.join(problems)}.")
    return {name: [by_index[k] for k in sorted(by_index)] for name, by_index in by_part.items()}


def _write_folder(
    path: Path, sizes: Mapping[str, int], file_bytes: int, arrays: Callable[[Iterable[str]], dict[str, np.ndarray]]
) -> None:
    """Write weight files with index, replacing earlier weight files.

    Args:
        file_bytes: about how large a file may get.
        arrays: function that returns the arrays of some names.
    """
    path.mkdir(parents=True, exist_ok=True)
    files = list(_divided(sizes, file_bytes))
    if len(files) == 1:
        _write(path / FILE, arrays(files[0]))
        (path / INDEX).unlink(missing_ok=True)
        new_files = {FILE}
    else:
        file_of: dict[str, str] = {}
        for number, chosen in enumerate(files, 1):
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
            _write(path / file, arrays(chosen))
            file_of |= dict.fromkeys(chosen, file)
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        replace_file(path / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
        new_files = set(file_of.values())
    for old in [path / FILE, *path.glob("model-?????-of-?????.safetensors")]:
        if old.name not in new_files:
            old.unlink(missing_ok=True)


def _merge_replicas(name: str, v: Variable, array: np.ndarray, stored: Stored) -> np.ndarray:
    """Whole value of a variable, merged from replica groups; `rows`, if larger than stored."""
    value = _full_value(name, v, array, stored)
    if stored.rows is not None and len(value) < stored.rows:
        raise ValueError(
            f"save_safetensors: {v!r} has {len(value)} rows, to be written as `{name}`, and `rows` says {stored.rows}."
        )
    return value if stored.rows is None else value[: stored.rows]


def _full_value(name: str, v: Variable, array: np.ndarray, stored: Stored) -> np.ndarray:
    if v.replica_grouping.num_groups == 1:
        return array
    axis = v.group_axis if stored.axis is None else stored.axis
    if axis is not None:
        return np.concatenate(list(array), axis)
    if not (array == array[:1]).all():
        raise ValueError(
            f"save_safetensors: the {len(array)} groups of replicas of {v!r} have different values, to be written as "
            f"`{name}`. Say which axis they split: `Stored(..., axis=...)`, or `group_axis` where the variable is made."
        )
    return array[0]


def _as_stored(arrays: list[np.ndarray], transposed: bool) -> np.ndarray:
    array = np.concatenate(arrays, -1) if len(arrays) > 1 else arrays[0]
    return np.ascontiguousarray(array.T if transposed else array)


def _divided(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in lists whose sizes together stay below a limit, if each by itself does."""
    chosen: list[str] = []
    total = 0
    for name, size in sizes.items():
        if chosen and total + size > limit:
            yield chosen
            chosen, total = [], 0
        chosen.append(name)
        total += size
    yield chosen


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    # Readers of PyTorch's models refuse files that do not say that they are for it.
    replace_file(path, lambda draft: save_file(arrays, draft, metadata={"format": "pt"}))
