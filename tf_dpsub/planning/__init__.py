"""Choice of a method, its settings and their accuracy, from public examples."""

from tf_dpsub.planning.approaches import Approach
from tf_dpsub.planning.planner import Plan, plan
from tf_dpsub.planning.recommendation import Recommendation, recommend
from tf_dpsub.planning.search import Candidate
from tf_dpsub.planning.settings import PlannedRun, SearchSpace, Simulation
from tf_dpsub.planning.signals import Signal
from tf_dpsub.planning.step_cost import StepCost

__all__ = [
    "Approach",
    "Candidate",
    "Plan",
    "PlannedRun",
    "Recommendation",
    "SearchSpace",
    "Signal",
    "Simulation",
    "StepCost",
    "plan",
    "recommend",
]
