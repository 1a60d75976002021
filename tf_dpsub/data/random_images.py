"""Images of random processes: public images that show nobody and nothing."""

import numpy as np

from tf_dpsub.checks import check_count

# Images that are drawn at a time.
_CHUNK = 250
# Sizes of leaves in pixels: no smaller, and up to a share of the image.
_SMALLEST, _LARGEST_SHARE = 2.0, 0.5


def dead_leaves(count: int, size: tuple = (32, 32), seed: int = 0):
    """Draws images of leaves of one colour each, which cover one another.

    Edges, corners and plain areas of all sizes are as frequent in them as in
    photographs, and all follows from the seed: they serve where features need
    public images and there are none.

    Leaves are discs and squares, turned by any angle. The density of their
    radius r falls as r⁻³, from 2 pixels to half of the image. Places, angles
    and colours are uniform.

    Args:
        count: int, number of images.
        size: pair of ints, height and width. Defaults to `(32, 32)`.
        seed: int, which determines the images. Defaults to `0`.

    Returns:
        uint8 array `[count, height, width, 3]`.

    Raises:
        ValueError: if a number is not positive, or the images are too small
            for a leaf.

    Reference:
      - [Occlusion Models for Natural Images: A Statistical Study of a
        Scale-Invariant Dead Leaves Model](
        https://doi.org/10.1023/A:1011109015675)
      - [Learning to See by Looking at Noise](https://arxiv.org/abs/2106.05963)
      - [Differentially Private Image Classification by Learning Priors from
        Random Processes](https://arxiv.org/abs/2306.06076)

    Example:

    ```python
    images = tf_dpsub.data.dead_leaves(2000)
    np.savez("public.npz", images=images)  # for --config.public_data
    ```
    """
    check_count("count", count)
    height, width = size
    check_count("height", height)
    check_count("width", width)
    largest = _LARGEST_SHARE * min(height, width)
    if largest <= _SMALLEST:
        raise ValueError(
            f"Expected images larger than {2 * _SMALLEST:g} pixels, got "
            f"{height} x {width}."
        )
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [
            _drawn(
                min(_CHUNK, count - first), height, width, largest, generator
            )
            for first in range(0, count, _CHUNK)
        ]
    )


def _drawn(count, height, width, largest, generator):
    """Some images: leaves are laid under those that are there."""
    images = np.zeros((count, height, width, 3), np.uint8)
    is_bare = np.ones((count, height, width), bool)
    rows, columns = np.indices((height, width), np.float32)
    left = np.arange(count)  # images with bare pixels
    while len(left):
        # By inversion of the distribution of a radius.
        shares = generator.random(len(left))
        radius = (
            _SMALLEST**-2 - shares * (_SMALLEST**-2 - largest**-2)
        ) ** -0.5
        # Leaves from beyond the border reach into the image, too.
        place = generator.random((2, len(left)))
        y = place[0] * (height + 2 * radius) - radius
        x = place[1] * (width + 2 * radius) - radius
        angle = generator.random(len(left)) * np.pi / 2
        is_disc = generator.random(len(left)) < 0.5
        colours = generator.integers(0, 256, (len(left), 3), np.uint8)

        def each(values):
            return values.astype(np.float32)[:, None, None]

        down, right = rows - each(y), columns - each(x)
        inside_disc = down**2 + right**2 < each(radius) ** 2
        cosine, sine = each(np.cos(angle)), each(np.sin(angle))
        # Half the side of a square of the disc's area.
        side = each(radius) * np.float32(np.sqrt(np.pi) / 2)
        inside_square = (np.abs(cosine * down + sine * right) < side) & (
            np.abs(cosine * right - sine * down) < side
        )
        leaf = np.where(is_disc[:, None, None], inside_disc, inside_square)
        k, row, column = np.nonzero(leaf & is_bare[left])
        images[left[k], row, column] = colours[k]
        is_bare[left[k], row, column] = False
        left = left[is_bare[left].any((1, 2))]
    return images
