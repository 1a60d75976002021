"""A wavelet scattering transform: image features that need no training."""

import functools
import math

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.checks import check_count

# Periodic copies of a filter that are added up, on either side of it.
_COPIES = 2


@keras.saving.register_keras_serializable("tf_dpsub")
class Scattering2D(keras.layers.Layer):
    """Scattering coefficients of images, as features of a private head.

    An image is filtered by Morlet wavelets of `J` scales and `L` angles; the
    moduli of the results are filtered again by the wavelets of larger scales
    (order 2). Each of these maps, and the image itself, is blurred by a
    Gaussian and sampled at every `2^J`-th pixel. Filters are fixed: they depend
    on no data, and cost no privacy.

    It computes in float32, whatever the precision of the model.

    Args:
        J: int, number of scales. Defaults to `2`.
        L: int, number of angles. Defaults to `8`.
        max_order: int, 1 or 2: how often wavelets filter. Defaults to `2`.
        **kwargs: as `keras.layers.Layer`.

    Input shape:
        `[batch, height, width, channels]`; height and width above `2^J`.

    Output shape:
        `[batch, height // 2^J, width // 2^J, channels * paths]`, where there
        are `1 + J L` paths, and `L^2 J (J - 1) / 2` more of order 2: 81 unless
        arguments say otherwise. Those of one channel come together.

    Raises:
        ValueError: if an argument is out of range, or images are too small.

    Example:

    ```python
    features = keras.Sequential(
        [keras.layers.Rescaling(1 / 255), tf_dpsub.layers.Scattering2D()]
    )
    features(images).shape  # [batch, 7, 7, 81], of images [batch, 28, 28, 1]
    ```

    Reference:
        - [Bruna, Mallat, 2013](https://arxiv.org/abs/1203.1513); filters and
          padding as in [Kymatio](https://arxiv.org/abs/1812.11214)
        - [Tramèr, Boneh, 2021](https://arxiv.org/abs/2011.11660), for private
          learning
    """

    def __init__(self, J: int = 2, L: int = 8, max_order: int = 2, **kwargs):
        # Inputs are cast up, never down.
        super().__init__(autocast=False, **kwargs)
        check_count("J", J)
        check_count("L", L)
        if max_order not in (1, 2):
            raise ValueError(f"Expected max_order 1 or 2, got {max_order!r}.")
        self.J, self.L, self.max_order = int(J), int(L), int(max_order)

    def build(self, input_shape):
        if len(input_shape) != 4 or None in input_shape[1:]:
            raise ValueError(
                "Expected images [batch, height, width, channels] of known "
                f"size, got the shape {tuple(input_shape)}. Add the axis of "
                "channels with `keras.layers.Reshape`."
            )
        smallest = min(input_shape[1:3])
        if smallest <= 2**self.J:
            raise ValueError(
                f"Expected images of more than {2**self.J} pixels on each "
                f"side with J={self.J} scales, got {smallest}. Take fewer "
                "scales."
            )
        self.built = True

    @property
    def paths(self) -> int:
        """Number of coefficients of each place and channel."""
        second = self.L**2 * self.J * (self.J - 1) // 2
        return 1 + self.J * self.L + second * (self.max_order == 2)

    def compute_output_shape(self, input_shape):
        batch, height, width, channels = input_shape
        step = 2**self.J
        return batch, height // step, width // step, channels * self.paths

    def call(self, images):
        images = tf.transpose(tf.cast(images, tf.float32), [0, 3, 1, 2])
        padding = [_padding(side, self.J) for side in images.shape[2:]]
        images = tf.pad(images, [(0, 0), (0, 0), *padding], "REFLECT")
        size = tuple(images.shape[2:])
        spectrum = _spectrum(images)
        moduli = [
            self._moduli(spectrum[:, :, None], size, scale, 0)
            for scale in range(self.J)
        ]  # each [batch, channels, L, ...]
        maps = [
            self._blurred(images[:, :, None], size, 0),
            *(self._blurred(m, size, scale) for scale, m in enumerate(moduli)),
        ]
        if self.max_order == 2:
            maps += self._second_order(moduli, size)
        maps = tf.concat(maps, 2)  # [batch, channels, paths, ...]
        maps = tf.transpose(maps, [0, 3, 4, 1, 2])
        shape = [*maps.shape[1:3], maps.shape[3] * maps.shape[4]]
        return tf.cast(tf.reshape(maps, [-1, *shape]), self.compute_dtype)

    def _second_order(self, moduli, size):
        """Blurred moduli of moduli, ordered as their first wavelets are."""
        ordered = []
        for first, modulus in enumerate(moduli[:-1]):
            spectrum = _spectrum(modulus)[:, :, :, None]
            maps = [
                self._blurred(
                    self._moduli(spectrum, size, second, first), size, second
                )
                for second in range(first + 1, self.J)
            ]  # each [batch, channels, L, L, ...]
            maps = tf.concat(maps, 3)
            count = self.L * maps.shape[3]
            ordered.append(
                tf.reshape(maps, [-1, maps.shape[1], count, *maps.shape[4:]])
            )
        return ordered

    def _moduli(self, spectrum, size, scale, resolution):
        """Moduli of wavelet transforms at one scale, sampled as it allows.

        Args:
            spectrum: complex tensor `[..., 1, rows, columns]`, of maps that
                are sampled at every `2^resolution`-th pixel.
            size: pair of ints, of the padded image.
            scale: int, of the wavelets.
            resolution: int.

        Returns:
            Tensor `[..., L, rows, columns]`, sampled at every `2^scale`-th.
        """
        bank = wavelets(size, self.J, self.L, scale, resolution)
        product = spectrum * tf.constant(bank, tf.complex64)
        return tf.abs(tf.signal.ifft2d(_folded(product, scale - resolution)))

    def _blurred(self, maps, size, resolution):
        """Maps blurred, sampled at every `2^J`-th pixel, without padding."""
        rows, columns = (
            tf.constant(_blur(side, self.J, resolution), tf.float32)
            for side in size
        )
        return tf.einsum("ik,...kl,jl->...ij", rows, maps, columns)

    def get_config(self):
        return {
            **super().get_config(),
            "J": self.J,
            "L": self.L,
            "max_order": self.max_order,
        }


@functools.lru_cache
def wavelets(size: tuple, J: int, L: int, scale: int, resolution: int):
    """Fourier transforms of Morlet wavelets of one scale and all angles.

    Args:
        size: pair of ints, of the padded image.
        J, L: ints, as for `Scattering2D`.
        scale: int, in `range(J)`.
        resolution: int, at most `scale`: they filter maps that are sampled at
            every `2^resolution`-th pixel.

    Returns:
        float64 array `[L, rows, columns]`. The transforms are real.
    """
    sigma, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    angles = [(int(L - L / 2 - 1) - k) * math.pi / L for k in range(L)]
    bank = []
    for angle in angles:
        wave = _gabor(size, sigma, angle, frequency, 4 / L)
        envelope = _gabor(size, sigma, angle, 0, 4 / L)
        # What is subtracted makes the sum of the wavelet zero.
        wavelet = wave - wave.sum() / envelope.sum() * envelope
        bank.append(_low_frequencies(np.fft.fft2(wavelet).real, resolution))
    return np.stack(bank)


def _gabor(size, sigma, angle, frequency, slant):
    """A wave at an angle under a Gaussian, on a periodic grid."""
    y, x = (
        np.arange(-_COPIES * side, (_COPIES + 1) * side, dtype=np.float64)
        for side in size
    )
    y = y[:, None]
    along = y * math.cos(angle) + x * math.sin(angle)
    across = x * math.cos(angle) - y * math.sin(angle)
    square = along**2 + (slant * across) ** 2
    wave = np.exp(-square / (2 * sigma**2) + 1j * frequency * along)
    copies = 2 * _COPIES + 1
    wave = wave.reshape(copies, size[0], copies, size[1]).sum((0, 2))
    return wave * slant / (2 * math.pi * sigma**2)


def _low_frequencies(spectrum, resolution):
    """The middle of a spectrum, for maps sampled at `2^resolution` pixels."""
    for axis in range(spectrum.ndim):
        side = spectrum.shape[axis]
        kept = side >> resolution
        if kept == side:
            continue
        first = np.arange(side)[: side >> (resolution + 1)]
        start = first.size + int(side * (1 - 2.0**-resolution))
        index = np.concatenate([first, np.arange(start, side)])
        folded = np.zeros((kept, *np.moveaxis(spectrum, axis, 0).shape[1:]))
        np.add.at(folded, index % kept, np.moveaxis(spectrum, axis, 0)[index])
        spectrum = np.moveaxis(folded, 0, axis)
    return spectrum


@functools.lru_cache
def _blur(side: int, J: int, resolution: int):
    """The matrix that blurs and samples the rows of a map.

    Args:
        side: int, of the padded image.
        J: int, the step between samples is `2^J` pixels.
        resolution: int, the map is sampled at every `2^resolution`-th pixel.

    Returns:
        float64 array `[samples, side >> resolution]`; what lies in the padding
        at the ends is left out.
    """
    sigma = 0.8 * 2 ** (J - 1)
    x: np.ndarray = np.arange(-_COPIES * side, (_COPIES + 1) * side, 1.0)
    gaussian = np.exp(-(x**2) / (2 * sigma**2)) / math.sqrt(
        2 * math.pi * sigma**2
    )
    gaussian = gaussian.reshape(-1, side).sum(0)
    spectrum = _low_frequencies(np.fft.fft(gaussian).real, resolution)
    step = 2 ** (J - resolution)
    blurred = np.fft.fft(np.eye(len(spectrum)), axis=0) * spectrum[:, None]
    samples = np.fft.ifft(blurred, axis=0).real[::step]
    return samples[1:-1]


def _padding(side, J):
    """Numbers of pixels that are added at both ends of a side."""
    step = 2**J
    added = ((side + step) // step + 1) * step - side
    return added // 2, (added + 1) // 2


def _spectrum(maps):
    return tf.signal.fft2d(tf.cast(maps, tf.complex64))


def _folded(spectrum, times):
    """The spectrum of a map of which every `2^times`-th pixel is kept."""
    if times == 0:
        return spectrum
    rows, columns = (side >> times for side in spectrum.shape[-2:])
    shape = [*tf.unstack(tf.shape(spectrum))[:-2], 2**times, rows]
    parts = tf.reshape(spectrum, [*shape, 2**times, columns])
    return tf.reduce_mean(parts, [-4, -2])
