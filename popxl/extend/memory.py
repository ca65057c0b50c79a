"""Memory budgets: the memory plan that a tool requests of a program, and the search for a plan within a budget.

Example:
    >>> from popxl.extend.memory import bytes_of
    >>> bytes_of("14 GB", "budget")
    14000000000
"""

from popxl.base.asked_memory import asked_memory, asking
from runtime.memory_budget import BudgetedPlan, Compiled, bytes_of, compiled_program, plan_within
from runtime.memory_needs import GraphNeeds, OpNeeds, ReplicaExchange
from runtime.memory_solver import Group, Treatments

__all__ = [
    "BudgetedPlan",
    "Compiled",
    "GraphNeeds",
    "Group",
    "OpNeeds",
    "ReplicaExchange",
    "Treatments",
    "asked_memory",
    "asking",
    "bytes_of",
    "compiled_program",
    "plan_within",
]
