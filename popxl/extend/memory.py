"""Memory budgets: the memory plan that a tool requests of a program, and the search for a plan within a budget.

Example:
    >>> from popxl.extend.memory import bytes_of
    >>> bytes_of("14 GB", "budget")
    14000000000
"""

from popxl.base.memory_requests import (
    Logits,
    MemoryRequest,
    RequestedMemory,
    StateLocation,
    current_request,
    requesting_memory,
)
from popxl.core.remote_variables import is_on_host
from runtime.memory_plans.budget import BudgetedPlan, bytes_of, plan_within
from runtime.memory_plans.compiled import Compiled, Division, compiled_function, compiled_program
from runtime.memory_plans.needs import GraphNeeds, OpNeeds, ReplicaExchange
from runtime.memory_plans.solver import Group, Treatments

__all__ = [
    "RequestedMemory",
    "BudgetedPlan",
    "Compiled",
    "Division",
    "GraphNeeds",
    "Group",
    "Logits",
    "MemoryRequest",
    "OpNeeds",
    "ReplicaExchange",
    "StateLocation",
    "Treatments",
    "current_request",
    "requesting_memory",
    "bytes_of",
    "compiled_function",
    "compiled_program",
    "is_on_host",
    "plan_within",
]
