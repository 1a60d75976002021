"""Choice of a method, its settings and their accuracy, from public examples."""

from tf_dpsub.planning.planner import Candidate, Plan, plan
from tf_dpsub.planning.signals import Signal
from tf_dpsub.planning.step_cost import StepCost

__all__ = ["Candidate", "Plan", "Signal", "StepCost", "plan"]
