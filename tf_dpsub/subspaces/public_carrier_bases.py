"""Orthonormal gradient carriers that follow gradients of public examples."""

import math

import tensorflow as tf

from tf_dpsub.checks import check_count
from tf_dpsub.primitives.public_state import assign_if
from tf_dpsub.subspaces.carrier_bases import CarrierBases, orthonormal
from tf_dpsub.subspaces.public_examples import PublicExamples
from tf_dpsub.subspaces.public_gradients import PublicGradients, finite_factors

# Numbers of the rows of one kernel that are stored at a time: 256 MiB.
_STORED = 2**26


def carrier_bases(
    *, carriers, x_public, y_public, update_every, allow_private, **settings
) -> CarrierBases:
    """The bases that follow what `carriers` names.

    Args: as `CarrierBases` and `PublicCarrierBases`.

    Raises:
        ValueError: if an argument is out of range, or there are public
            examples without `carriers="public"`, or the reverse.
    """
    if carriers != "public":
        if not (x_public is None and y_public is None):
            raise ValueError(
                "Expected public examples with carriers='public' alone, got "
                f"carriers={carriers!r}. Leave x_public and y_public out, or "
                "pass carriers='public'."
            )
        return CarrierBases(carriers=carriers, **settings)
    if x_public is None:
        raise ValueError(
            "Expected x_public with carriers='public', got None. Pass the "
            "inputs of public examples, and their targets as y_public."
        )
    return PublicCarrierBases(
        carriers=carriers,
        x_public=x_public,
        y_public=y_public,
        update_every=update_every,
        allow_private=allow_private,
        **settings,
    )


class PublicCarrierBases(CarrierBases):
    """L and R of each kernel, along gradients of public examples.

    With `G_i` the gradients of a kernel for the public examples, the columns
    of L are the top eigenvectors of `sum_i G_i G_i^T`, and the rows of R those
    of `sum_i G_i^T G_i`, by power iterations. They keep more of the gradients
    of other examples than the singular vectors of the mean gradient, which
    lack the directions that cancel in it.

    Public examples are worked through in chunks of rows. No rows are stored
    where they are known as sums of outer products, such as those of dense
    layers; others are, for one kernel at a time.

    Formal guarantees: L and R depend on public examples, on public randomness
    and on the weights, which are released. Nothing private is touched.

    Args: as `CarrierBases`.
        x_public: array, or structure of arrays, inputs of public examples.
        y_public: the same for targets; None for labels drawn at random, anew
            at each refresh.
        update_every: int, number of steps from one refresh to the next.
        allow_private: bool, whether public examples may be private ones as
            well.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        *,
        x_public,
        y_public,
        update_every: int,
        allow_private: bool,
        **arguments,
    ):
        super().__init__(**arguments)
        check_count("update_every", update_every)
        self._public = PublicExamples(x_public, y_public)
        self.update_every = int(update_every)
        self.allow_private = bool(allow_private)
        self._step = None

    @property
    def public_inputs(self):
        return self._public.x

    @property
    def notes(self):
        return (f"{self._public.note}, along whose gradients carriers lie",)

    @property
    def _own(self):
        """The carriers of all kernels that have them."""
        return [c for c in self.of_variables if c is not None]

    def build(self, optimizer):
        super().build(optimizer)
        # Between two refreshes both belong to the state.
        for carriers in self._own:
            optimizer._track_variable(carriers.left)

    def attach(self, model):
        step = model.training_step
        if step is self._step:
            return
        self._step = step
        largest = max(math.prod(c.kernel.shape) for c in self._own)
        self._gradients = PublicGradients(
            model,
            self._public.x,
            self._public.y,
            min(step.spec["real"].shape[0], max(1, _STORED // largest)),
            [c.kernel for c in self._own],
        )
        self._compute = tf.function(
            self._moments, autograph=False, jit_compile=step.is_compiled
        )

    def prepare(self, iterations, is_used=True):
        due = tf.convert_to_tensor(is_used)
        if self.update_every > 1:
            is_made = tf.reduce_any(tf.not_equal(self._own[0].right, 0))
            due &= (iterations % self.update_every == 0) | ~is_made
        assign_if(
            due,
            [v for c in self._own for v in (c.left, c.right)],
            lambda: self._refreshed(self._key(iterations)),
        )

    def _refreshed(self, key):
        """New values of all carriers, in their shapes."""
        fills = [
            self._draws(c, tf.random.experimental.stateless_fold_in(key, k))
            for k, c in enumerate(self._own)
        ]
        pairs = [self._start(c, f) for c, f in zip(self._own, fills)]
        for _ in range(self.power_iterations):
            pairs = [
                [orthonormal(*arguments) for arguments in zip(moments, fill)]
                for moments, fill in zip(self._compute(key, pairs), fills)
            ]
        return [
            tf.cast(tf.reshape(value, variable.shape), variable.dtype)
            for c, (left, right) in zip(self._own, pairs)
            for value, variable in (
                (left, c.left),
                (tf.transpose(right), c.right),
            )
        ]

    def _moments(self, key, pairs):
        """Sums over public examples, `G G^T L` and `G^T G R^T` of each kernel.

        Args:
            key: int64 tensor, of labels that are drawn.
            pairs: list over kernels of `[L, R^T]`.

        Returns:
            List over kernels of two tensors of the same shapes.
        """

        def add(_, gradients, totals):
            squares = tf.square(finite_factors(gradients))
            sums = []
            for c, pair, total in zip(self._own, pairs, totals):
                # Rows of one kernel after those of another.
                with tf.control_dependencies(sums[-1] if sums else []):
                    moments = gradients.second_moment_products(
                        c.kernel, c, *pair, squares
                    )
                sums.append([a + b for a, b in zip(total, moments)])
            return sums

        batch = self._gradients.draw(key)
        zeros = tf.nest.map_structure(tf.zeros_like, pairs)
        return self._gradients.fold_gradients(batch, add, zeros)

    def get_config(self):
        return {
            **super().get_config(),
            **self._public.get_config(),
            "update_every": self.update_every,
            "allow_private": self.allow_private,
        }
