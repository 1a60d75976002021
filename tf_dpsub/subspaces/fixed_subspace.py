"""A subspace that is given."""

import keras
import numpy as np

from tf_dpsub.subspaces import arrays, linear_algebra
from tf_dpsub.subspaces.subspace import Subspace, require_orthonormal

# Squared singular values of unit columns below this are rounding errors.
_NULL = 1e-9


@keras.saving.register_keras_serializable("tf_dpsub")
class FixedSubspace(Subspace):
    """The span of given directions, such as those of earlier gradients.

    Formal guarantees: a basis that was computed from private data has not paid
    for what it tells. Unless it is stated to be public, training in it is
    therefore accounted for as not private at all.

    Args:
        basis: array of shape `[parameters, k]`, whose rows follow the trainable
            variables of the model, one after another. It is orthonormalised.
        public: bool, states that the basis tells nothing about private data.
            Defaults to `False`.

    Raises:
        ValueError: if `basis` is no finite matrix of full rank.

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2207.00160), section 4
    """

    def __init__(self, basis, *, public: bool = False):
        super().__init__()
        basis = np.array(arrays.decoded(basis), np.float32)
        if basis.ndim != 2 or not 1 <= basis.shape[1] <= basis.shape[0]:
            raise ValueError(
                "Expected a basis of shape [parameters, k] with 1 <= k <= "
                f"parameters, got shape {basis.shape}."
            )
        if not np.all(np.isfinite(basis)):
            raise ValueError("Expected a finite basis, got NaN or infinity.")
        norms = np.linalg.norm(basis.astype(np.float64), axis=0)
        unit = basis / np.where(norms > 0, norms, 1.0)
        independent = int(np.sum(np.linalg.eigvalsh(unit.T @ unit) > _NULL))
        if independent < basis.shape[1]:
            raise ValueError(
                f"Expected {basis.shape[1]} independent directions, got "
                f"{independent}."
            )
        self._directions = unit.astype(np.float32)
        self._is_public = bool(public)

    @property
    def is_public(self):
        return self._is_public

    @property
    def notes(self):
        return ("the basis of the fixed subspace",) if self.is_public else ()

    def _shared_ranks(self):
        (group,) = self.groups
        if group.size != len(self._directions):
            raise ValueError(
                f"Expected a basis of {group.size} rows, one for each "
                f"trainable parameter, got {len(self._directions)}."
            )
        return [self._directions.shape[1]]

    def _create(self, model):
        super()._create(model)
        sizes = [b.shape[0] for b in self._blocks[0]]
        parts = np.split(self._directions, np.cumsum(sizes)[:-1])
        zeros = [np.zeros_like(part) for part in parts]
        made, error = linear_algebra.orthonormalize(parts, zeros)
        require_orthonormal(error)
        for variable, block in zip(self._blocks[0], made):
            variable.assign(block)

    def get_config(self):
        return {
            "basis": arrays.encoded(self._directions),
            "public": self.is_public,
        }
