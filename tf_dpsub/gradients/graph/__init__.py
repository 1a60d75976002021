"""Per-example gradients by a proven walk of the traced graph."""

from tf_dpsub.gradients.graph.graph_gradients import GraphGradients
from tf_dpsub.gradients.graph.states import MixesExamples
from tf_dpsub.gradients.graph.states import Unproven
from tf_dpsub.gradients.graph.states import UpdatesState

__all__ = ["GraphGradients", "MixesExamples", "Unproven", "UpdatesState"]
