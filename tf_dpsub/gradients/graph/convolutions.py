"""Sites of convolution filters, in one, two and three dimensions."""

import itertools

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.gradients.graph import sites, terms
from tf_dpsub.gradients.graph.constants import static_shape
from tf_dpsub.gradients.graph.states import Unproven
from tf_dpsub.gradients.per_example import LONGEST_COORDINATE
from tf_dpsub.gradients.rows import (
    add_in_order,
    outer_sums,
    scale_rows,
    sum_squares,
)

# Filter taps with fewer channels than this are not worth a matrix product
# each, where the filter meets every place and where it skips some.
_CHANNELS_PER_PRODUCT = 4
_CHANNELS_PER_STRIDED_PRODUCT = 32

# Rows are also kept if they are at most this many times as large as their
# factors: a filter gradient would be as many operations again.
KEPT_TIMES = 3


class Convolution(sites.Site):
    """Rows that are too large to keep; the sum is one filter gradient.

    A filter meets an `image` (what it slides over) and a `map` (one value for
    each place and output channel). In a convolution the image is the input and
    the map the gradient at the output; in a transposed one it is the reverse.

    Args:
        weight: the filter, `[*taps, channels, filters]`.
        image: `[batch, extra, *space, channels of all groups]`.
        map_: `[batch, extra, *places, filters of all groups]`.
        geometry: `_Geometry`.
    """

    def __init__(self, weight, image, map_, geometry):
        super().__init__(weight, [image, map_])
        self._geometry = geometry

    def sq_magnitudes(self):
        image, map_ = (
            sum_squares(f) + sites.UNDERFLOW * sites.size(f.shape[1:])
            for f in self.factors
        )
        # Each entry of the image meets a filter tap at most once.
        return image * map_ * sites.size(self._geometry.taps)

    def sq_norms(self):
        by_tap = self._geometry.products_by_tap(*self.factors)
        return add_in_order([sum_squares(p) for p in by_tap])

    @property
    def longest_sum(self):
        map_ = self.factors[1]
        return 2 * sites.size(map_.shape[1:-1])

    def factored(self, inputs):
        if self._geometry.groups > 1 or self._geometry.depthwise:
            return None
        if inputs != self._geometry.patch_size:
            return None
        image, map_ = self.factors
        batch, filters = self.batch_size, self.shape[-1]
        map_ = terms.Dense(tf.reshape(map_, [batch, -1, filters]))
        return [terms.Patches(image, self._geometry, map_.count), map_]

    def rows(self):
        rows_and_order = self._geometry.products(*self.factors)
        return sites.Stored(self.weight, *rows_and_order).rows()

    def weighted_sum(self, c):
        image, map_ = self.factors
        if c.dtype == tf.float32:
            # A filter gradient adds up products of all rows, one after another.
            rows_and_order = self._geometry.products(image, map_)
            return sites.Stored(self.weight, *rows_and_order).weighted_sum(c)
        return self._geometry.filter_gradient(
            tf.cast(image, c.dtype), scale_rows(c, map_)
        )


class _Geometry:
    """Strides, padding, dilations and groups of one convolution."""

    def __init__(self, op, shape, image_shape):
        self.shape = shape
        self.depthwise = op.type.startswith("Depthwise")
        self.taps = shape[:-2]
        self.strides = op.get_attr("strides")
        self.dilations = op.get_attr("dilations")
        self.padding = op.get_attr("padding").decode()
        self.explicit = (
            op.get_attr("explicit_paddings")
            if self.padding == "EXPLICIT"
            else []
        )
        if op.get_attr("data_format").decode()[1] == "C":
            self.strides = [*self.strides[:1], *self.strides[2:], 1]
            self.dilations = [*self.dilations[:1], *self.dilations[2:], 1]
            self.explicit = [*self.explicit[:2], *self.explicit[4:], 0, 0]
        channels = image_shape[-1]
        self.groups = channels if self.depthwise else channels // shape[-2]
        self.space = image_shape[:-1]

    def _paddings(self):
        if self.padding == "EXPLICIT":
            return [
                self.explicit[k : k + 2]
                for k in range(2, 2 + 2 * len(self.taps), 2)
            ]
        if self.padding == "VALID":
            return [[0, 0]] * len(self.taps)
        paddings = []
        for n, taps, stride, dilation in zip(
            self.space, self.taps, self.strides[1:-1], self.dilations[1:-1]
        ):
            reach = (-(-n // stride) - 1) * stride + (taps - 1) * dilation + 1
            total = max(reach - n, 0)
            paddings.append([total // 2, total - total // 2])
        return paddings

    def _padded(self, image):
        return tf.pad(image, [[0, 0], [0, 0], *self._paddings(), [0, 0]])

    def _places(self, image):
        """Numbers of places of a filter, along each axis."""
        return [
            (n + sum(padding) - (taps - 1) * dilation - 1) // stride + 1
            for n, padding, taps, stride, dilation in zip(
                static_shape(image)[2:-1],
                self._paddings(),
                self.taps,
                self.strides[1:-1],
                self.dilations[1:-1],
            )
        ]

    def _view(self, image, tap, places):
        """Entries of a padded image at a tap, `[batch, extra, *places, c]`."""
        window = [slice(None), slice(None)]
        for at, n, stride, dilation in zip(
            tap, places, self.strides[1:-1], self.dilations[1:-1]
        ):
            start = at * dilation
            window.append(slice(start, start + (n - 1) * stride + 1))
        view = image[tuple(window)]
        # Slices with a stride take some ten times as long.
        for axis, stride in enumerate(self.strides[1:-1], 2):
            if stride > 1:
                kept = np.arange(0, view.shape[axis], stride)
                view = tf.gather(view, kept, axis=axis)
        return view

    def _grouped(self, x):
        """`[batch, groups, t, channels of a group]`."""
        batch, channels = x.shape[0], x.shape[-1]
        x = tf.reshape(x, [batch, -1, self.groups, channels // self.groups])
        if self.groups == 1:
            return tf.reshape(x, [batch, 1, -1, channels])
        return tf.transpose(x, [0, 2, 1, 3])

    def products_by_tap(self, image, map_, short=(True, True)):
        """Rows of one tap after another, `[batch, groups, channels, n]`."""
        right = self._grouped(map_)
        by_tap: list = []
        # A view is as large as the image: each is made when it is needed, and
        # at most two are in memory.
        with sites.not_before(map_):
            image = self._padded(image)
        for tap in itertools.product(*(range(n) for n in self.taps)):
            with tf.control_dependencies(by_tap[-2:-1]):
                view = self._view(image, tap, static_shape(map_)[2:-1])
            left = self._grouped(view)
            by_tap.append(outer_sums(left, right, short))
        return by_tap

    # Without groups: a filter `[size of a patch, r]` meets every place.

    @property
    def patch_size(self):
        """Number of entries of the image that a filter sees at a place."""
        return sites.size(self.shape[:-1])

    def convolved(self, image, filters):
        """Products of patches and filters, `[batch * extra, *places, r]`.

        Sums in float32 are short: of a part of the channels.
        """
        arguments = {
            "strides": self.strides,
            "padding": self.padding,
            "dilations": self.dilations,
        }
        convolution = tf.raw_ops.Conv3D
        if len(self.taps) < 3:
            convolution = tf.raw_ops.Conv2D
            arguments["explicit_paddings"] = self.explicit
        image = tf.reshape(image, [-1, *static_shape(image)[2:]])
        filters = tf.reshape(filters, [*self.shape[:-1], -1])

        def convolved(image, filters):
            return precision.bilinear(
                lambda x, f: convolution(input=x, filter=f, **arguments),
                image,
                filters,
                short=(True, False),
            )

        channels = self.shape[-2]
        width = max(1, LONGEST_COORDINATE // sites.size(self.taps))
        if channels <= width:
            return convolved(image, filters)
        total = tf.zeros([], tf.float64)
        for begin in range(0, channels, width):
            part = slice(begin, begin + width)
            product = convolved(image[..., part], filters[..., part, :])
            total += tf.cast(product, tf.float64)
        return tf.cast(total, tf.float32)

    def combined(self, image, values):
        """Sum of patches outer values `[batch, t, r]`, `[patch_size, r]`."""
        places, count = self._places(image), values.shape[2]
        values = tf.reshape(values, [-1, *places, count])
        image = tf.reshape(image, [-1, *static_shape(image)[2:]])
        shape = [*self.shape[:-1], count]
        total = self._filter_gradient(image, values, shape)
        return tf.reshape(total, [self.patch_size, count])

    def combined_each(self, image, values):
        """As `combined`, of each example, `[batch, patch_size, r]`."""
        batch, count = values.shape[0], values.shape[2]
        map_ = tf.reshape(values, [batch, -1, *self._places(image), count])
        by_tap = self.products_by_tap(image, map_, short=(True, False))
        by_tap = [p[:, 0] for p in by_tap]  # [batch, channels, r]
        return tf.reshape(tf.stack(by_tap, 1), [batch, self.patch_size, count])

    def convolved_each(self, image, filters):
        """As `convolved`, of filters `[batch, patch_size, r]` of each."""
        batch, _, count = filters.shape
        taps = sites.size(self.taps)
        by_tap = tf.unstack(
            tf.reshape(filters, [batch, taps, -1, count]), axis=1
        )
        places, image = self._places(image), self._padded(image)
        total = tf.zeros([])
        for tap, of_tap in zip(np.ndindex(*self.taps), by_tap):
            with tf.control_dependencies([total]):
                view = self._view(image, tap, places)
            view = tf.reshape(view, [batch, -1, self.shape[-2]])
            total += precision.matmul(view, of_tap, short=(True, False))
        return total

    def products(self, image, map_):
        """Rows and order of their axes, as `sites.Stored` takes them."""
        batch = image.shape[0]
        if self._has_patches():
            patches = self._patches(image)  # [batch, t, channels * taps]
            right = tf.reshape(map_, [batch, -1, self.shape[-1]])
            rows = outer_sums(patches, right)
            axes = [self.shape[-2], sites.size(self.taps), self.shape[-1]]
            return tf.reshape(rows, [batch, *axes]), [1, 0, 2]
        # [batch, groups, channels, filters of a group], by tap
        return self.products_by_tap(image, map_), [0, 2, 1, 3]

    def _has_patches(self):
        few = _CHANNELS_PER_PRODUCT
        if max(self.strides) > 1:
            few = _CHANNELS_PER_STRIDED_PRODUCT
        return (
            len(self.taps) == 2
            and self.groups == 1
            and self.shape[-2] < few
            and self.strides[1] == self.strides[2]
            and self.dilations[1] == self.dilations[2] == 1
        )

    def _patches(self, image):
        """Patches that the filter sees, `[batch, t, channels * taps]`.

        A depthwise convolution with unit vectors copies faster than slices do.
        """
        taps, channels = sites.size(self.taps), self.shape[-2]
        units = tf.reshape(tf.eye(taps), [*self.taps, 1, taps])
        patches = tf.nn.depthwise_conv2d(
            tf.reshape(image, [-1, *static_shape(image)[2:]]),
            tf.tile(units, [1, 1, channels, 1]),
            self.strides,
            self.padding if not self.explicit else self._explicit_pairs(),
        )
        return tf.reshape(patches, [image.shape[0], -1, channels * taps])

    def _explicit_pairs(self):
        return [self.explicit[k : k + 2] for k in range(0, 8, 2)]

    def filter_gradient(self, image, map_):
        """Sum of the rows."""
        image, map_ = (
            tf.reshape(x, [-1, *static_shape(x)[2:]]) for x in (image, map_)
        )
        if self.groups > 1 and not self.depthwise:
            per_group = zip(
                tf.split(image, self.groups, -1),
                tf.split(map_, self.groups, -1),
            )
            filters = self.shape[-1] // self.groups
            shape = [*self.shape[:-1], filters]
            return tf.concat(
                [self._filter_gradient(*pair, shape) for pair in per_group], -1
            )
        return self._filter_gradient(image, map_, self.shape)

    def _filter_gradient(self, image, map_, shape):
        arguments = {
            "filter_sizes": shape,
            "strides": self.strides,
            "padding": self.padding,
            "dilations": self.dilations,
        }
        gradient = tf.raw_ops.Conv3DBackpropFilterV2
        if len(self.taps) < 3:
            arguments["explicit_paddings"] = self.explicit
            gradient = tf.raw_ops.Conv2DBackpropFilter
            if self.depthwise:
                gradient = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter
        return precision.bilinear(
            lambda x, y: gradient(input=x, out_backprop=y, **arguments),
            image,
            map_,
            short=(True, False),
        )


def convolution(op, k, gradient, operand_state, gradient_state, batch_size):
    """Site of the filter of a convolution, transposed or not."""
    transposed = "BackpropInput" in op.type
    operand = op.inputs[2 if transposed else 0]
    channels_first = op.get_attr("data_format").decode()[1] == "C"
    operand, gradient = (
        precision.rounded(_places_first(x, state, batch_size, channels_first))
        for x, state in ((operand, operand_state), (gradient, gradient_state))
    )
    if operand_state.axis != 0 or gradient_state.axis != 0:
        raise Unproven("has the batch on an axis other than 0")
    image, map_ = (gradient, operand) if transposed else (operand, gradient)
    geometry = _Geometry(
        op, static_shape(op.inputs[k]), static_shape(image)[2:]
    )
    kept = max(
        sites.KEPT_ROWS,
        KEPT_TIMES * (sites.size(image.shape) + sites.size(map_.shape)),
    )
    if batch_size * sites.size(geometry.shape) <= kept:
        return sites.Stored(op.inputs[k], *geometry.products(image, map_))
    return Convolution(op.inputs[k], image, map_, geometry)


def _places_first(x, state, batch_size, channels_first):
    """`[batch, extra, *space, channels]`."""
    x = sites.batch_first(x, state, batch_size)
    shape = static_shape(x)
    x = tf.reshape(x, [batch_size, shape[1] * shape[2], *shape[3:]])
    if channels_first:
        rank = len(x.shape)
        x = tf.transpose(x, [0, 1, *range(3, rank), 2])
    return x
