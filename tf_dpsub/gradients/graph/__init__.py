"""Per-example gradients by a proven walk of the traced graph."""

from tf_dpsub.gradients.graph.graph_gradients import GraphGradients
from tf_dpsub.gradients.graph.sources import Sources
from tf_dpsub.gradients.graph.states import (
    MixesExamples,
    ReadsState,
    Unproven,
    UpdatesState,
)

__all__ = [
    "GraphGradients",
    "MixesExamples",
    "ReadsState",
    "Sources",
    "Unproven",
    "UpdatesState",
]
