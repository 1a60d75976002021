"""Per-example gradients by a proven walk of the traced graph."""

from tf_dpsub.gradients.graph.graph_gradients import GraphGradients
from tf_dpsub.gradients.graph.states import (
    MixesExamples,
    Unproven,
    UpdatesState,
)

__all__ = ["GraphGradients", "MixesExamples", "Unproven", "UpdatesState"]
