"""DP-SGD.

Implementation of "Deep Learning with Differential Privacy" (Abadi et al.,
2016, Algorithm 1).
"""

from collections.abc import Mapping

import keras

from tf_dpsub.optimizers import layer_clips as clips_of_layers
from tf_dpsub.optimizers.banded_noise import BandedNoise
from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.primitives.clipping import clipped_sum
from tf_dpsub.primitives.release import Release


@keras.saving.register_keras_serializable("tf_dpsub")
class DPSGD(PrivateOptimizer):
    """Clips per-example gradients, adds them up, and adds noise to each weight.

    `gradient = (sum of clip(g_i, C) + N(0, sigma^2 C^2 I)) / B`, with
    `C = l2_norm_clip`, `sigma = noise_multiplier` and `B = batch_size`.

    Formal guarantees: what is released at a step is the noisy sum. If one
    example is replaced by an empty one, the sum moves by at most `C` in
    Euclidean norm. A step is accounted for by one Gaussian event of
    multiplier `sigma`, under the sampling that drew the batch; all that
    follows, any inner optimizer included, is post-processing. With a clip
    `C_l` for each layer, the part of a gradient that belongs to a layer is
    clipped alone; the whole moves by at most `sqrt(sum of C_l^2) = C`, and the
    noise is that of `C` in all weights, so that the event is the same.

    With `bands` above 1, each step has the noise `w = C^-1 z` of
    `tf_dpsub.primitives.carried_noise.CarriedNoise`, which the next
    `bands - 1` steps take back in part. `fit` then draws each batch from one of
    `bands` public groups of the examples, in turn, with a probability of
    `bands * batch_size / n`: an example is in at most one of `bands` steps. A
    cycle of so many steps is accounted for by one Gaussian event of multiplier
    `sigma`, under this sampling: fresh noise has a standard deviation of
    `sigma` times the norm by which one example moves all steps of its cycle.

    Args: as `PrivateOptimizer`.
        l2_norm_clip: float; or dict, a clip for each layer by its name, where
            a layer stands for all layers in it: `C` is the root of the sum of
            their squares.
        layer_clips: string, how `l2_norm_clip` is split among the layers that
            have weights: `"equal"`, or `"size"`, in proportion to the roots of
            the numbers of weights, such that squares add up. Defaults to
            `None`: gradients are clipped as a whole.
        bands: int, the number of steps that share their noise; the noise of
            the last `bands - 1` steps is kept in memory, 8 bytes for each
            weight and step. `"auto"`: the number with the least noise for the
            number of examples and steps, `batch_size`, `epsilon` and `delta`,
            which `fit` finds. Defaults to `1`, independent noise.

    Example:

    ```python
    optimizer = tf_dpsub.optimizers.DPSGD(
        keras.optimizers.SGD(0.1, momentum=0.9),
        l2_norm_clip=1.0, noise_multiplier=1.1, batch_size=256,
    )
    ```

    Reference:
        - [Abadi et al., 2016](https://arxiv.org/abs/1607.00133)
        - [McMahan et al., 2018](https://arxiv.org/abs/1710.06963), on a clip
          for each layer
        - [Choquette-Choo et al., 2023](https://arxiv.org/abs/2306.08153), on
          bands
    """

    # Whether what a step adds is, at the next ones, what it was.
    has_fixed_coordinates = True

    def __init__(
        self,
        optimizer,
        *,
        l2_norm_clip,
        layer_clips: str | None = None,
        bands: int | str = 1,
        **kwargs,
    ):
        given = None
        if isinstance(l2_norm_clip, Mapping):
            if layer_clips is not None:
                raise ValueError(
                    "Expected layer_clips with a number to split, got "
                    f"layer_clips={layer_clips!r} with a clip for each layer "
                    "in l2_norm_clip. Leave it out."
                )
            given = dict(l2_norm_clip)
            l2_norm_clip = clips_of_layers.total_clip(given)
        elif layer_clips is not None:
            clips_of_layers.check_split(layer_clips)
        super().__init__(optimizer, l2_norm_clip=l2_norm_clip, **kwargs)
        self._given_clips = given
        self._layer_clips = layer_clips
        self._groups = None
        self._banded = BandedNoise(self, bands)

    @property
    def bands(self) -> int:
        """Number of steps that share their noise."""
        return self._banded.bands

    @property
    def banded_noise(self) -> BandedNoise:
        """The noise of a run, with bands or without."""
        return self._banded

    layer_clips = property(lambda self: self._layer_clips)

    @property
    def has_layer_clips(self) -> bool:
        """Whether each layer is clipped alone."""
        return self._given_clips is not None or self.layer_clips is not None

    @property
    def mechanism(self):
        text = super().mechanism
        if self._given_clips is not None:
            clips = ", ".join(
                f"{name} {clip:g}" for name, clip in self._given_clips.items()
            )
            text += f", with clips of layers ({clips})"
        elif self.layer_clips is not None:
            text += f", with clips of layers ({self.layer_clips} shares of C)"
        if self.bands > 1:
            text += f", with {self.bands} bands of noise"
        return text

    def build_for(self, model):
        variables = model.trainable_variables
        if self._given_clips is not None:
            self._groups = clips_of_layers.given_groups(
                model.model, variables, self._given_clips
            )
        elif self.layer_clips is not None:
            self._groups = clips_of_layers.split_groups(
                model.model, variables, self.layer_clips, self.l2_norm_clip
            )
        super().build_for(model)
        self._banded.build_for(model)

    def sum_shapes(self):
        return [v.shape for v in self.per_example_variables]

    def clipped_sums(self, gradients, keep):
        if not self.has_layer_clips:
            return self._clipped_sum(gradients, keep, self.l2_norm_clip)
        if self._groups is None:
            raise RuntimeError(
                "DPSGD with a clip for each layer was built without a model, "
                "whose layers these are. Compile a private model with it."
            )
        variables = self.per_example_variables
        sums = [None] * len(variables)
        for group in self._groups:
            parts = self._clipped_sum(
                gradients,
                keep,
                group.l2_norm_clip,
                [variables[k] for k in group.indices],
            )
            for k, part in zip(group.indices, parts, strict=True):
                sums[k] = part
        return sums

    def _clipped_sum(self, gradients, keep, l2_norm_clip, variables=None):
        return clipped_sum(
            gradients,
            keep,
            l2_norm_clip,
            self.batch_size,
            self.clipping_rule,
            variables,
        )

    def releases(self):
        return [
            Release(
                tensors=len(self.per_example_variables),
                clip=self.l2_norm_clip,
                noise_multiplier=self.noise_multiplier,
            )
        ]

    def add_noise(self, key, sums, dtype):
        if self.bands == 1:
            return super().add_noise(key, sums, dtype)
        return self._banded.noisy(key, sums, self._noises(sums), dtype)

    def _noises(self, sums):
        if self.bands == 1:
            return super()._noises(sums)
        return self._banded.grid_noises(sums)

    def privatize(self, noisy_sums):
        return [s / self.batch_size for s in noisy_sums]

    def get_config(self):
        config = {
            **super().get_config(),
            "layer_clips": self.layer_clips,
            "bands": self._banded.given,
        }
        if self._given_clips is not None:
            config["l2_norm_clip"] = dict(self._given_clips)
        return config
