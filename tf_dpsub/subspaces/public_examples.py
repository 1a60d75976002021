"""Public examples, as mechanisms hold them."""

import numpy as np
from keras import tree

from tf_dpsub.subspaces import arrays


class PublicExamples:
    """Public examples whose gradients a mechanism follows.

    Args:
        x: array, or structure of arrays, inputs; or what `get_config` made of
            them.
        y: the same for targets. Defaults to `None`: labels are drawn at random.

    Attributes:
        x: structure of arrays.
        y: structure of arrays, or None.
        count: int, the number of examples.

    Raises:
        ValueError: if there are none, or not as many of each.
    """

    def __init__(self, x, y=None):
        self.x = _as_arrays(x)
        self.y = None if y is None else _as_arrays(y)
        parts = tree.flatten(self.x)
        if self.y is not None:
            parts += tree.flatten(self.y)
        counts = {len(a) if a.ndim else 0 for a in parts}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "Expected public data with the same number of examples, at "
                "least one, got arrays of shapes "
                f"{', '.join(str(a.shape) for a in parts) or 'none'}."
            )
        (self.count,) = counts

    @property
    def note(self) -> str:
        """The examples, as a statement names what is taken as public."""
        labels = "random labels" if self.y is None else "their labels"
        return f"{self.count} examples with {labels}"

    def get_config(self) -> dict:
        """Both structures, as a config that JSON can hold."""
        return {
            "x_public": arrays.encoded(self.x),
            "y_public": None if self.y is None else arrays.encoded(self.y),
        }


def _as_arrays(data):
    # Copies: what is compared with private data has to be what is used.
    return tree.map_structure(
        np.array, tree.lists_to_tuples(arrays.decoded(data))
    )
