"""The base of all subspaces that gradients are projected on."""

import abc
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_dpsub.primitives.public_state import PublicState
from tf_dpsub.subspaces import groups as parameter_groups
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.basis import StoredBasis


class Subspace(PublicState, abc.ABC):
    """An orthonormal basis V of a few directions in the space of weights.

    V is block-diagonal: each parameter group has a block of its own. It is kept
    as one `[size, k]` matrix for each variable. Coordinates are those of all
    groups, one after another.

    Formal guarantees: `V` is a function of public data, of public randomness
    and of the weights. At every refresh `||V^T V - I||_F <= 2^-13` is measured
    for each group; a basis that fails it raises. Coordinates of a vector
    therefore have at most its norm, up to the margin that mechanisms keep when
    they clip.

    Args:
        groups: int, lists of layer names, or `"layers"`, as
            `tf_dpsub.subspaces.groups.make_groups` takes them.

    Attributes:
        groups: list of `Group`, once attached to a model.
        ranks: list of int, the number of directions in each.
    """

    def __init__(self, groups: int | str | Sequence = 1):
        parameter_groups.check_groups(groups)
        self._groups = groups
        self._variables = None
        self._step = None

    @property
    def rank(self):
        """Number of directions of all groups."""
        return sum(self.ranks)

    @property
    @abc.abstractmethod
    def is_public(self):
        """Whether the basis tells nothing about private data."""

    @property
    def chooses_rank(self) -> bool:
        """Whether the number of directions in use is chosen."""
        return False

    @property
    def is_whitened(self) -> bool:
        """Whether mechanisms work in scaled coordinates."""
        return False

    @property
    def scales(self):
        """Scales of coordinates, float32 `[rank]`; None unless whitened."""
        return None

    @property
    def outer_scales(self) -> list:
        """The largest scale of each group, for directions outside of it."""
        return [tf.reduce_max(s) for s in tf.split(self.scales, self.ranks)]

    def scaled(self, coordinates):
        """Coordinates times their public scales, those of a whitened subspace.

        Going to scaled coordinates and coming back are the same.

        Args:
            coordinates: float32 or float64 tensor of shape `[..., rank]`.

        Returns:
            Tensor of the same type and shape.
        """
        if not self.is_whitened:
            return coordinates
        return coordinates * tf.cast(self.scales, coordinates.dtype)

    def scaled_weights(self, tensors: list) -> list:
        """A vector in the space of weights, scaled along all directions.

        Those outside of the subspace have the `outer_scales`.

        Args:
            tensors: list of float32 or float64 tensors, one of each variable's
                shape.

        Returns:
            List of tensors of the same types and shapes.
        """
        dtype = tensors[0].dtype
        outer = tf.cast(self.outer_scales, dtype)  # [groups]
        differences = tf.cast(self.scales, dtype) - tf.repeat(outer, self.ranks)
        inside = self.lift(differences * self.coordinates(tensors))
        return [
            outer[group] * t + v
            for group, t, v in zip(self._groups_of_variables, tensors, inside)
        ]

    @property
    def _groups_of_variables(self):
        """Positions of the group of each variable."""
        positions = {
            k: g for g, group in enumerate(self.groups) for k in group.indices
        }
        return [positions[k] for k in range(len(positions))]

    def find(self, model):
        """Looks at a model, before the state that is saved is created.

        Args:
            model: `tf_dpsub.PrivateModel`.

        Raises:
            ValueError: if the subspace does not fit the model.
        """

    def attach(self, model):
        """Creates the basis for the weights of a model.

        Args:
            model: compiled `tf_dpsub.PrivateModel`, whose step is built.

        Raises:
            ValueError: if the subspace belongs to another model, or does not
                fit this one.
        """
        variables = model.trainable_variables
        ids = [id(v) for v in variables]
        if self._variables not in (None, ids):
            raise ValueError(
                f"Expected a subspace for the weights of '{model.name}', got "
                "one that was built for others. Make a new one for each model."
            )
        if self._variables is None:
            self.groups = parameter_groups.make_groups(
                model.model, variables, self._groups
            )
            self.ranks = self._shared_ranks()
            self._create(model)
            self._variables = ids
        if self._step is not model.training_step:
            self._follow(model)
            self._step = model.training_step

    @abc.abstractmethod
    def _shared_ranks(self):
        """List of int: the rank of each group."""

    def _create(self, model):
        """Creates the variables that hold the basis."""
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        self._basis = StoredBasis(self.groups, self.ranks, shapes)
        self._blocks = self._basis.blocks

    def _follow(self, model):
        """Takes up another loss, kind of data or optimizer of the model."""

    # Between weights and coordinates.

    def project(self, gradients):
        """Coordinates of per-example gradients.

        Args:
            gradients: `tf_dpsub.gradients.PerExampleGradients`.

        Returns:
            Float32 tensor of shape `[batch, rank]`.
        """
        return self._basis.project(gradients)

    def coordinates(self, tensors: list):
        """Coordinates of one vector in the space of weights.

        Args:
            tensors: list of float32 or float64 tensors, one of each variable's
                shape.

        Returns:
            Tensor of the same type of shape `[rank]`.
        """
        return self._basis.coordinates(tensors)

    def lift(self, coordinates) -> list:
        """The vector that has given coordinates: `V @ coordinates`.

        Args:
            coordinates: float32 or float64 tensor of shape `[rank]`.

        Returns:
            List of tensors of the same type, one of each variable's shape.
        """
        return self._basis.lift(coordinates)

    def residuals(self, gradients, coordinates):
        """What per-example gradients are outside of the subspace.

        Args:
            gradients: `tf_dpsub.gradients.PerExampleGradients`.
            coordinates: float32 tensor of shape `[batch, rank]`, theirs.

        Returns:
            `tf_dpsub.subspaces.residuals.Residuals`.
        """
        return self._basis.residuals(gradients, coordinates)

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def require_orthonormal(error, limit: float | None = None):
    """Raises in a step unless a basis is as orthonormal as it has to be.

    Args:
        error: float tensor, what `linear_algebra.orthonormality_error` gives.
        limit: float, the most that it may be. Defaults to `None`,
            `linear_algebra.ORTHONORMALITY`.
    """
    limit = linear_algebra.ORTHONORMALITY if limit is None else limit
    return tf.debugging.assert_less_equal(
        error,
        tf.constant(limit),
        "Expected an orthonormal basis, ||V^T V - I||_F <= "
        f"2^{round(math.log2(limit))}, got one that is not, after all passes. "
        "The mechanism would not keep its clip.",
    )
