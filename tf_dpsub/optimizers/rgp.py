"""RGP, RGP-random and RGP-public: gradients through low-rank carriers.

Implementation of "Large Scale Private Learning via Low-rank Reparametrization"
(Yu, Zhang, Chen, Yin, Liu, ICML 2021, Algorithms 1 and 2).
"""

import keras

from tf_dpsub.optimizers.dpsgd import DPSGD
from tf_dpsub.subspaces.carrier_bases import check_saved_shapes
from tf_dpsub.subspaces.public_carrier_bases import carrier_bases


@keras.saving.register_keras_serializable("tf_dpsub")
class RGP(DPSGD):
    """DP-SGD on low-rank gradient carriers of the layers' kernels.

    For each kernel W `[p, d]` of a layer that `tf_dpsub.layers.reparametrize`
    converted, a step takes orthonormal L `[p, r]` and R `[r, d]`, the nearest
    to the history `W - W_0` of what training has done so far, or to gradients
    of public examples at the current weights. The gradients with respect to L
    and R of an example, and those of all other trainable weights, are clipped
    together, added up, and get noise. With the noisy means,

    `dW = dL R + L dR - L L^T dL R`

    is the gradient of W in the space of matrices that share the columns of L or
    the rows of R, of which it is the orthogonal projection, if there is no
    noise. The inner optimizer sees gradients of whole kernels. There is noise
    in `r (p + d)` numbers instead of `p d`, and per-example gradients take as
    much memory.

    Formal guarantees: what is released at a step is the noisy sum of the
    gradients of all carriers and of the other weights. L and R are computed
    from released weights, public randomness and, with `carriers="public"`,
    public examples. If one example is replaced by an empty one, the sum moves
    by at most `C = l2_norm_clip` in Euclidean norm: all parts are clipped as
    one vector. A step is accounted for by one Gaussian event of multiplier
    `sigma`; the gradients of the kernels follow from the release by
    post-processing. Orthonormality is not relied upon. Public examples that
    are private ones as well are not covered by the guarantee: they raise, or
    are stated.

    Args: as `DPSGD`.
        carriers: string, what they follow: `"history"`; W itself (`"weight"`);
            `"public"`: L the columns and R the rows of the gradients of public
            examples, top eigenvectors of their second moments; or `"random"`,
            drawn anew at each step, which is RGP-random. Defaults to
            `"history"`.
        warmup_steps: int, for `"history"`, the number of steps for which they
            follow W, while there is no history to speak of. Defaults to `100`.
        power_iterations: int, number of power iterations at a step; with
            `"public"`, passes over the public examples at a refresh. Defaults
            to `1`.
        start: string, where these start: from the last carriers (`"warm"`), or
            from random ones (`"gaussian"`). Defaults to `"warm"`.
        x_public: for `"public"`, array, or structure of arrays, inputs of
            public examples. Defaults to `None`.
        y_public: the same for targets. Defaults to `None`: labels are drawn at
            random, anew at each refresh.
        update_every: int, for `"public"`, number of steps from one refresh to
            the next. Defaults to `1`.
        allow_private: bool, whether public examples may be private ones as
            well. The statement then says so. Defaults to `False`.

    Raises:
        ValueError: if an argument is out of range, or there are public
            examples without `carriers="public"`, or the reverse.

    Example:

    ```python
    tf_dpsub.layers.reparametrize(classifier, rank=8)
    model = tf_dpsub.make_private(classifier)
    model.compile(
        tf_dpsub.optimizers.RGP(
            keras.optimizers.Adam(1e-3),
            l2_norm_clip=1.0, noise_multiplier=0.8, batch_size=500,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """

    def __init__(
        self,
        optimizer,
        *,
        carriers: str = "history",
        warmup_steps: int = 100,
        power_iterations: int = 1,
        start: str = "warm",
        x_public=None,
        y_public=None,
        update_every: int = 1,
        allow_private: bool = False,
        **kwargs,
    ):
        super().__init__(optimizer, **kwargs)
        if self.has_layer_clips:
            raise ValueError(
                "Expected one l2_norm_clip for RGP, got a clip for each layer: "
                "carriers and the other weights are clipped as one vector."
            )
        self._public_state = carrier_bases(
            carriers=carriers,
            warmup_steps=warmup_steps,
            power_iterations=power_iterations,
            start=start,
            x_public=x_public,
            y_public=y_public,
            update_every=update_every,
            allow_private=allow_private,
        )

    has_fixed_coordinates = False
    carriers = property(lambda self: self.public_state.carriers)
    warmup_steps = property(lambda self: self.public_state.warmup_steps)
    power_iterations = property(lambda self: self.public_state.power_iterations)
    start = property(lambda self: self.public_state.start)

    @property
    def description(self):
        return f"RGP, from {self.public_state.source}"

    def build_for(self, model):
        self.public_state.find(model)
        super().build_for(model)

    @property
    def per_example_variables(self):
        return self.public_state.replaced(self._trainable_variables)

    def privatize(self, noisy_sums):
        return self.public_state.lift(super().privatize(noisy_sums))

    def load_own_variables(self, store):
        shapes = [store[str(i)].shape for i in range(len(store.keys()))]
        expected = [tuple(v.shape) for v in self._variables]
        if len(shapes) == len(self.variables):
            # A file of an earlier version, with the inner optimizer's.
            expected = [tuple(v.shape) for v in self.variables]
        check_saved_shapes(shapes, expected)
        super().load_own_variables(store)

    def get_config(self):
        return {**super().get_config(), **self.public_state.get_config()}
