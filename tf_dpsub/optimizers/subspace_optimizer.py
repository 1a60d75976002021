"""The base of the optimizers that work in a subspace."""

import abc

import keras

from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.subspaces.subspace import Subspace


class SubspaceOptimizer(PrivateOptimizer):
    """A private optimizer whose mechanism has a subspace.

    Args: as `PrivateOptimizer`.
        subspace: `tf_dpsub.subspaces.Subspace`, for one model.
    """

    def __init__(self, optimizer, *, subspace, **kwargs):
        super().__init__(optimizer, **kwargs)
        if not isinstance(subspace, Subspace):
            raise ValueError(
                "Expected a tf_dpsub.subspaces.Subspace, got "
                f"{type(subspace).__name__}."
            )
        self._public_state = subspace

    @property
    def subspace(self):
        """The subspace of the mechanism, its public state."""
        return self._public_state

    def build_for(self, model):
        self.subspace.find(model)
        super().build_for(model)

    # For subspaces that choose their own rank.

    @property
    def coordinate_stddev(self):
        """Standard deviation of the noise in a coordinate of the gradient.

        In a whitened subspace, in a scaled coordinate.
        """
        return self.noise_stddevs()[0] / self.batch_size

    @abc.abstractmethod
    def preview(self, coordinates, sq_norms, scales=None):
        """Clips public coordinates as the mechanism would clip private ones.

        Args:
            coordinates: float32 tensor of shape `[m, rank]`.
            sq_norms: float32 tensor of shape `[m]`, of whole gradients.
            scales: float32 tensor of shape `[rank]`, those of a whitened
                subspace. Defaults to `None`, for one that is not.

        Returns:
            Clipped coordinates, `[m, rank]`, scaled if there are scales, and
            the share (float tensor) of what lies outside of the subspace that
            is released as well.
        """

    def get_config(self):
        return {
            **super().get_config(),
            "subspace": keras.saving.serialize_keras_object(self.subspace),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        config["subspace"] = keras.saving.deserialize_keras_object(
            config["subspace"], custom_objects=custom_objects
        )
        return super().from_config(config, custom_objects)
