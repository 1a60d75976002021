"""Low-rank gradient carriers of a kernel.

Implementation of the layers of "Large Scale Private Learning via Low-rank
Reparametrization" (Yu, Zhang, Chen, Yin, Liu, ICML 2021, Section 3).
"""

import abc
import inspect
import math

import keras
import tensorflow as tf
from keras import ops

from tf_dpsub.checks import check_count
from tf_dpsub.gradients import zero_terms
from tf_dpsub.gradients.matrices import KernelMatrix


class Carriers(KernelMatrix):
    """Two matrices L, R through which the gradient of a kernel W is learned.

    With W as a matrix `[inputs, outputs]`, L is `[inputs, rank]` and R is
    `[rank, outputs]`. They belong to a layer, but are neither trained nor saved
    with it: `tf_dpsub.optimizers.RGP` sets them at every step.

    Args:
        kernel: Keras variable.
        rank: int.
        order: tuple of int, the axes of the kernel, those of the inputs first.
        split: int, the number of axes that are those of the inputs.

    Attributes:
        kernel: as given.
        rank: as given.
        left: Keras variable `[*axes of the inputs, rank]`.
        right: Keras variable `[rank, *axes of the outputs]`.
    """

    def __init__(self, kernel, rank: int, order: tuple, split: int):
        super().__init__(kernel.shape, order, split)
        self.kernel, self.rank = kernel, rank
        self.left = _variable([*self._shape[:split], rank], kernel)
        self.right = _variable([rank, *self._shape[split:]], kernel)

    def assign(self, left, right):
        """Sets both, from matrices `[inputs, rank]` and `[rank, outputs]`."""
        self.left.assign(tf.reshape(left, self.left.shape))
        self.right.assign(tf.reshape(right, self.right.shape))


def _variable(shape, kernel):
    return keras.Variable(
        tf.zeros(shape),
        trainable=False,
        dtype=kernel.dtype,
        aggregation="only_first_replica",
    )


class HasCarrierRank:
    """Mixin that adds `rank` to the config of a layer.

    The layer has gradient carriers, or contains layers that have them.

    Attributes:
        plain: the class of the Keras layer that it replaces.
    """

    plain = None

    def _set_carrier_rank(self, rank):
        check_count("rank", rank)
        self._carrier_rank = int(rank)

    @property
    def carrier_rank(self):
        """The rank of the carriers of kernels that are not narrower."""
        return self._carrier_rank

    @classmethod
    def convert(cls, layer, rank):
        """Turns a built layer of the class `plain` into one of this class."""
        layer.__class__ = cls
        layer._set_carrier_rank(rank)
        _renew_signature(layer)

    @classmethod
    def restore(cls, layer):
        """Undoes `convert`."""
        del layer._carrier_rank
        layer.__class__ = cls.plain
        _renew_signature(layer)

    def get_config(self):
        return {**super().get_config(), "rank": self.carrier_rank}


def _renew_signature(layer):
    """Lets Keras see the arguments of `call`, as it does for a new layer."""
    signature = inspect.signature(layer.call)
    layer._call_signature = signature
    layer.call_signature_parameters = list(signature.parameters)
    layer._call_has_training_arg = "training" in signature.parameters
    layer._call_has_context_arg = {
        name: name in signature.parameters for name in layer._call_context_args
    }


class Reparametrized(HasCarrierRank, abc.ABC):
    """Base of layers that add gradient carriers to a plain layer.

    In training, the output is that of the plain layer plus `L R x - L R x`, of
    which the first is differentiated with respect to `L` and `R` alone, and
    the second is not. The gradients of both carriers are thus those of
    `W = L R + (a constant)`: `dL = dW R^T` and `dR = L^T dW`.

    Attributes:
        carriers: `Carriers`; None if the kernel is narrower than the rank,
            and before the layer is built.
    """

    carriers = None

    def _create_carriers(self):
        if self.carrier_rank <= self.narrow_side(self):
            axes = self._matrix_axes(self)
            self.carriers = Carriers(self._kernel, self.carrier_rank, *axes)

    @classmethod
    def narrow_side(cls, layer) -> int:
        """The highest rank that the kernel of a built layer can have.

        Args:
            layer: a layer of this class, or of `plain`.

        Returns:
            int.

        Raises:
            ValueError: if the kernel is no matrix from inputs to outputs.
        """
        order, split = cls._matrix_axes(layer)
        shape = [layer._kernel.shape[axis] for axis in order]
        return min(math.prod(shape[:split]), math.prod(shape[split:]))

    @classmethod
    def convert(cls, layer, rank):
        super().convert(layer, rank)
        layer._create_carriers()

    @classmethod
    def restore(cls, layer):
        vars(layer).pop("carriers", None)
        super().restore(layer)

    def build(self, input_shape):
        super().build(input_shape)
        self._create_carriers()

    @staticmethod
    @abc.abstractmethod
    def _matrix_axes(layer):
        """Order of the kernel's axes, and the number of those of the inputs.

        Raises:
            ValueError: as `narrow_side`.
        """

    @abc.abstractmethod
    def _carried(self, inputs):
        """`L R x`."""

    def _with_carriers(self, outputs, inputs, training):
        """Outputs of the same value, from which gradients reach carriers."""
        if self.carriers is None or not training:
            return outputs
        carried = self._carried(ops.stop_gradient(inputs))
        return zero_terms.added(outputs, carried)

    def enable_lora(self, *args, **kwargs):
        raise ValueError(
            f"Expected a plain layer to enable LoRA on, got "
            f"{type(self).__name__} '{self.name}', whose kernel has gradient "
            "carriers. Call `tf_dpsub.layers.merge(model)` first."
        )
