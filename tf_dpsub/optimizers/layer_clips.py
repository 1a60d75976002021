"""A clip for each layer of a model."""

import dataclasses
import math
import numbers
from collections.abc import Mapping

from tf_dpsub.checks import check_choice
from tf_dpsub.primitives.release import SMALLEST_NORM
from tf_dpsub.subspaces.groups import Group, make_groups

SPLITS = ("equal", "size")


@dataclasses.dataclass(frozen=True)
class ClippedGroup:
    """Weights that are clipped together, alone.

    Attributes:
        indices: tuple of int, positions among the trainable variables.
        l2_norm_clip: float.
    """

    indices: tuple[int, ...]
    l2_norm_clip: float


def total_clip(clips: Mapping) -> float:
    """The clip C of all layers together: the root of the sum of squares.

    Args:
        clips: mapping of layer names to clips.

    Raises:
        ValueError: if there are none, or one is out of range.
    """
    if not clips:
        raise ValueError(
            "Expected l2_norm_clip to have a clip for each layer, got none."
        )
    for name, clip in clips.items():
        if not isinstance(clip, numbers.Real) or isinstance(clip, bool):
            raise ValueError(
                f"Expected l2_norm_clip[{name!r}] to be a number, got {clip!r}."
            )
        if not SMALLEST_NORM <= float(clip) < math.inf:
            raise ValueError(
                f"Expected finite l2_norm_clip[{name!r}] >= {SMALLEST_NORM}, "
                f"got {clip}. A layer that is not to be trained is frozen by "
                "`trainable = False`."
            )
    return math.hypot(*clips.values())


def check_split(split):
    """Raises `ValueError` unless a clip can be split in such a way."""
    check_choice("layer_clips", split, SPLITS)


def given_groups(model, variables: list, clips: Mapping) -> list:
    """The groups of weights that named layers are, with their clips.

    Args:
        model: built `keras.Model`.
        variables: list of its trainable variables.
        clips: mapping of layer names to clips. A layer stands for all layers
            in it.

    Returns:
        List of `ClippedGroup`.

    Raises:
        ValueError: if a name is unknown, or if a weight has no clip or two.
    """
    try:
        groups = make_groups(model, variables, [[name] for name in clips])
    except ValueError as error:
        raise ValueError(
            "Expected l2_norm_clip to have one clip for each layer with "
            f"trainable weights. {error}"
        ) from error
    return [
        ClippedGroup(group.indices, float(clip))
        for group, clip in zip(groups, clips.values(), strict=True)
    ]


def split_groups(
    model, variables: list, split: str, l2_norm_clip: float
) -> list:
    """The groups of weights that layers are, which share a clip.

    Squares of their clips add up to that of the whole.

    Args:
        model: built `keras.Model`.
        variables: list of its trainable variables.
        split: string, `"equal"`, or `"size"` for clips in proportion to the
            roots of the numbers of weights.
        l2_norm_clip: float, the whole.

    Returns:
        List of `ClippedGroup`.

    Raises:
        ValueError: if the clip of a layer is too small.
    """
    groups = make_groups(model, variables, "layers")
    weights = [_weight(group, split) for group in groups]
    made = [
        ClippedGroup(
            group.indices, l2_norm_clip * math.sqrt(weight / sum(weights))
        )
        for group, weight in zip(groups, weights)
    ]
    least = min(group.l2_norm_clip for group in made)
    if least < SMALLEST_NORM:
        raise ValueError(
            f"Expected clips of layers >= {SMALLEST_NORM}, got {least:g} from "
            f"l2_norm_clip={l2_norm_clip:g}. Scale the loss and the clip up."
        )
    return made


def _weight(group: Group, split):
    return group.size if split == "size" else 1
