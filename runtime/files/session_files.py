"""Session files: compiled programs with Ir and variable values, ready to run in another process.

Reading one traces and compiles nothing. The file holds the Ir as `Ir.save` writes it, and each executable as XLA
serializes it; nothing in it is read as a Python object. But executables are machine code: load files only from sources
that you trust to run programs. They run on the same kind and number of devices, with the same versions of popxl and
JAX.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import jax
from pydantic import BaseModel, ConfigDict

from popxl.base.atomic_files import replace_file
from popxl.base.container import pack, unpack
from popxl.base.log import Logger
from popxl.errors import PopxlError, UnreadableFileError
from popxl.ir import Ir
from popxl.program import reading, writing
from runtime.files.executables import Executable, restored, serialized
from runtime.program.compiled import CompiledProgram, Precompiled, compile_uncached, is_serializable
from runtime.targets.compile_target import VERSIONS, BuildStamp, build_stamp
from runtime.targets.devices import Device, find_device
from runtime.targets.offline import Target

_log = Logger("session")

KIND = "popxl session"
_IR = "ir"
_EXECUTABLE = "executable/"
_ATTENTION = "__cudnn$fmha"
"""Prefix of the names of cuDNN's attention kernels."""


class About(BaseModel):
    """Metadata of a session file.

    Attributes:
        calls: mode of called graphs.
        executables: the executables, in the order of `CompiledProgram.executables`.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    target: BuildStamp
    device: str
    calls: str
    executables: list[Executable]


def write(path: str | os.PathLike[str], ir: Ir, program: CompiledProgram) -> None:
    """Write a compiled program to a file; see `Session.save`."""
    if program.layout.divided is not None:
        raise PopxlError(
            "Session.save: the program runs over several processes, and what is compiled for all of them cannot be "
            "kept. Save its Ir, with `ir.save`."
        )
    keeps = is_serializable(program.layout) and not _lacks_kernels(program)
    if keeps and not program.is_serializable:
        program = compile_uncached(program)
    parts = {_IR: writing.packed(ir)}
    executables = []
    for number, executable in enumerate(program.executables() if keeps else ()):
        about, content = serialized(executable, program.device.jax_devices)
        executables.append(about)
        parts[f"{_EXECUTABLE}{number}"] = content
    header = About(
        target=program.layout.compile_target.build_stamp,
        device=program.device.name if program.device.target is None else program.device.target.kind,
        calls=program.layout.mode,
        executables=executables,
    )
    replace_file(Path(path), pack(KIND, header.model_dump_json(), parts))


def _lacks_kernels(program: CompiledProgram) -> bool:
    """Whether cuDNN has to generate kernels on the machine that loads the program, so that it is compiled again
    there."""
    is_absent = program.device.target is not None
    return is_absent and any(_ATTENTION in executable.as_text() for executable in program.executables())


def load_session(
    path: str | os.PathLike[str], device_desc: str | Device | Target | None
) -> tuple[Ir, Device, Precompiled | None]:
    """Read a compiled program from a file; see `Session.load`. Executables are `None` if compilation is required."""
    try:
        header, parts = unpack(KIND, Path(path).read_bytes())
        if differences := _differences(header["target"], VERSIONS):  # of another version
            raise PopxlError(_compiled(path, "by other versions", differences))
        about = About.model_validate(header)
        contents = [parts[f"{_EXECUTABLE}{number}"] for number in range(len(about.executables))]
        ir = Ir()
        reading.restore(ir, parts[_IR], parts.__getitem__, _IR, traces=False)
    except (OSError, KeyError, ValueError) as problem:
        problem_text = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise UnreadableFileError(
            f"Session.load: {os.fspath(path)!r} holds no session that can be read: {problem_text}"
        ) from problem
    device = find_device(about.device if device_desc is None else device_desc, ir)
    if device.target is not None:
        raise PopxlError(
            f"Session.load: {device.name} is not here, and XLA reads compiled programs back only where they run. Load "
            f"{os.fspath(path)!r} there; to look at the program, compile it again: `popxl.Session(popxl.Ir.load(...))`."
        )
    if differences := _differences(about.target.model_dump(), build_stamp(device.jax_devices).model_dump()):
        raise PopxlError(_compiled(path, f"for something else than {device}", differences))
    if not contents:
        return ir, device, None
    _log.debug(f"Loading serialized PopART executable from {os.fspath(path)}")
    try:
        executables = [restored(*each, device.jax_devices) for each in zip(about.executables, contents, strict=True)]
    except jax.errors.JaxRuntimeError as problem:
        raise PopxlError(_compiled(path, "in a way that XLA does not read here", str(problem))) from problem
    return ir, device, Precompiled(about.calls, executables)


def _differences(in_file: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Text describing mismatches of build stamps. Ignores unknown driver versions of files compiled without
    hardware."""
    return "; ".join(
        f"{name.replace('_', ' ')}: {in_file[name]!r} in the file, {ours!r} here"
        for name, ours in here.items()
        if in_file[name] != ours and (in_file[name] or name != "platform_version")
    )


def _compiled(path: str | os.PathLike[str], how: str, differences: str) -> str:
    return (
        f"Session.load: the program in {os.fspath(path)!r} was compiled {how}: {differences}. Compile it again: "
        "`popxl.Session(ir)`, with the Ir from `Ir.load` or built anew."
    )
