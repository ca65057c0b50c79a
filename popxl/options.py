"""`SessionOptions`: options that a user can set on an Ir before making a session from it. Available as `ir.options`."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from popxl.base.edit_counter import EditCounter
from popxl.base.log import Logger

__all__ = ["MOST_REPLICAS", "OF_THE_RUN", "SessionOptions"]

MOST_REPLICAS = 2**16

OfTheRun = object()
"""Marker of machine-specific options, such as folders. Saved programs leave them out, and loaded ones take them from
the environment."""


class SessionOptions(BaseModel):
    """Settings of an Ir, under the names that PopART gave them.

    Unless the description says otherwise a setting has no effect here: it belongs to hardware that programs ran on
    before, and is accepted so that they run unchanged.
    """

    model_config = ConfigDict(validate_assignment=True, extra="forbid")

    replicatedGraphCount: int = Field(
        default=1,
        ge=1,
        le=MOST_REPLICAS,
        description="Number of replicas of this process; see `Ir.replication_factor`.",
    )
    enableReplicatedGraphs: bool = Field(default=False, description="Whether `replicatedGraphCount` counts.")
    enableDistributedReplicatedGraphs: bool = Field(
        default=False, description="Whether `globalReplicationFactor` counts."
    )
    globalReplicationFactor: int = Field(
        default=1, ge=1, le=MOST_REPLICAS, description="Number of replicas over all processes."
    )
    globalReplicaOffset: int = Field(
        default=0, ge=0, le=2**16, description="Number of the first replica of this process."
    )
    enableEngineCaching: Annotated[bool, OfTheRun] = Field(
        default_factory=lambda: bool(_cache_dir()),
        description="Keep compiled programs in `cachePath`, for sessions on hardware (`'ipu_hw'`); on at first if an "
        "environment variable names a folder.",
    )
    cachePath: Annotated[str, OfTheRun] = Field(
        default_factory=lambda: _chosen_cache_dir(),
        description="Folder of compiled programs; at first what `POPXL_CACHE_DIR` or `POPART_CACHE_DIR` says.",
    )
    dotChecks: Annotated[set[str], OfTheRun] = Field(
        default_factory=set, description="Active checkpoints of `Ir.dot_checkpoint`."
    )
    logDir: Annotated[str, OfTheRun] = Field(default=".", description="Folder that `Ir.dot_checkpoint` writes to.")
    enableInplaceAmbiguityChecking: bool = Field(
        default=True, description="Refuse programs whose in-place ops and readers of the same storage are not ordered."
    )
    throwIfLog2ScaleTensorNotInRange: bool = Field(
        default=True, description="Raise from `run` where the scale of a float8 op is outside [-32, 32)."
    )
    calledGraphs: Literal["auto", "kept", "dispatched", "rolled", "batched", "inlined"] = Field(
        default="auto",
        description="How called graphs are compiled. 'kept': in one program, in which each graph that is called from "
        "several places is compiled once (but on TPUs written out). 'dispatched': each such graph by itself, "
        "and the host runs them one after the other; compile time does not grow with the number of calls. "
        "'rolled': in one program, in which calls that differ only in what they are given are iterations of a loop, "
        "with their updates; variables that take the same part lie in one array. 'batched': likewise, but updates come "
        "after the loops, for all iterations: on GPUs they move fewer bytes, but all gradients are in memory at once. "
        "'inlined': every call as if it had been written out. "
        "'auto': on CPUs dispatched, where much would be compiled again and again, or rolled if calls are "
        "small; kept otherwise. Elsewhere rolled, if repeated calls offload activations, and else inlined, batched or "
        "rolled, whichever is faster by what XLA makes of it: see `compareSeconds`.",
    )
    plannedCalls: Literal["", "inlined", "rolled", "batched"] = Field(
        default="",
        description="How called graphs are compiled for GPUs and TPUs where `calledGraphs` is 'auto': as the memory "
        "plan that the program has was made for. The plan sets it.",
    )
    compareSeconds: Annotated[float, OfTheRun] = Field(
        default=600,
        ge=0,
        description="Where `calledGraphs` is 'auto', and loops would save the compiler of an accelerator much, the "
        "program is compiled with loops and written out, and the faster is taken, by what is read off both. That is "
        "left out where it would take longer than so many seconds for what is written out, by a count of ops. Then "
        "it is written out, which is nearly always faster; loops are taken if it would take hours to compile, or does "
        "not fit into memory. With 0 nothing is compared.",
    )
    memoryBudget: int = Field(
        default=0,
        ge=0,
        description="Bytes of a device's memory that a program shall need at most; 0 if it may have all. Where the "
        "compiler of a TPU or GPU has a choice, it orders ops so that they need no more, in place of overlapping "
        "copies and exchanges with them. A memory plan within a budget sets it. A session warns about a program that "
        "needs more, and runs it; `session.memory()` says what needs it.",
    )
    placement: Literal["auto", "several", "one"] = Field(
        default="auto",
        description="Where ops run that are on several IPUs (`popxl.ipu`). 'several': each IPU is a device of its own, "
        "if there are enough for all replicas, and works at the same time as others, as far as it does not need their "
        "results. 'one': one device stands for all IPUs. 'auto': several; but on CPUs only if there is enough work, as "
        "it has to be shared out. The numbers are the same.",
    )
    remoteBuffers: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Which memory remote buffers are in. 'host': the host's; a load or store moves one slot, and a "
        "load comes after all stores before it, also of other buffers. 'device': the device's, which is faster, as "
        "long as there is room. 'auto': the host's; but a CPU has only one memory, and is quicker without asking for "
        "it. A TPU cannot move numbers of 64 bits, which it has as pairs: it has to be 'device' then, and a session "
        "says so.",
    )
    precision: Literal["highest", "high", "default"] = Field(
        default="highest",
        description="How exactly float32 numbers are multiplied in matrix products and convolutions: JAX's three "
        "levels. 'highest': as float32, on every machine. 'high' and 'default': with fewer digits, where the machine "
        "is quicker then. A TPU takes six passes of bfloat16 for 'highest', three for 'high', one for 'default'; a GPU "
        "takes TensorFloat-32 for the last two. A CPU always computes with all digits. Sums are made in float32 in any "
        "case. What an op says of itself, as `ops.matmul(..., partials_type=popxl.float16)` does, comes first.",
    )
    engineOptions: dict[str, str] = Field(
        default_factory=dict, description="A program compiled under other engine options is another one to the cache."
    )
    numIOTiles: int = 0
    enableStochasticRounding: bool = Field(
        default=False,
        description="In-place ops that write float16 or bfloat16 (variables, their pieces, accumulators) compute in "
        "float32, and round up or down at random, with the probabilities that make the mean exact. The seed is a "
        "variable of the program (`Ir.rounding_seed`), which each run replaces. What ops return is rounded to nearest.",
    )
    stochasticRoundingSeed: int = Field(
        default=0, ge=0, description="What the seed of stochastic rounding is made of, by `popxl.create_seeds`."
    )
    partialsTypeMatMuls: Literal["", "half", "float"] | str = Field(
        default="",
        description="'half': products that `ops.matmul` makes from now on are computed at the precision 'default', "
        "unless they ask for another `partials_type`.",
    )
    useHostCopyOps: bool = True
    aliasZeroCopy: bool = True
    enableExplicitMainLoops: bool = True
    explicitRecomputation: bool = True
    constantWeights: bool = True
    virtualGraphMode: Any = None
    enableVariablesCaching: bool = True
    decomposeGradSum: bool = False

    _edits: EditCounter = PrivateAttr(default_factory=EditCounter)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields and name != "_edits":
            raise _unknown(name)
        super().__setattr__(name, value)
        self._edits.record_edit()

    def count_in(self, edits: EditCounter) -> None:
        """Count in this counter from now on, when settings change."""
        self._edits = edits

    if not TYPE_CHECKING:  # or any name would do

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise _unknown(name)

    @property
    def instance_replication_factor(self) -> int:
        """Number of replicas that this process drives."""
        return self.replicatedGraphCount if self.enableReplicatedGraphs else 1

    @property
    def replication_factor(self) -> int:
        """Number of replicas, over all processes."""
        if self.enableDistributedReplicatedGraphs:
            return self.globalReplicationFactor
        return self.instance_replication_factor


OF_THE_RUN = {name for name, field in SessionOptions.model_fields.items() if OfTheRun in field.metadata}
"""Names of machine-specific options, which saved programs leave out."""


def _unknown(name: str) -> AttributeError:
    near = difflib.get_close_matches(name, SessionOptions.model_fields)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return AttributeError(f"There is no session option {name!r}{hint}")


def _cache_dir() -> str:
    return os.environ.get("POPXL_CACHE_DIR") or os.environ.get("POPART_CACHE_DIR") or ""


def _chosen_cache_dir() -> str:
    """The selected cache directory; warns about two settings."""
    ours, theirs = os.environ.get("POPXL_CACHE_DIR"), os.environ.get("POPART_CACHE_DIR")
    if ours and theirs and ours != theirs:
        Logger("session").warn(f"POPXL_CACHE_DIR={ours} is used; POPART_CACHE_DIR={theirs}, which differs, is not.")
    return _cache_dir()
