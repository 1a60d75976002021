"""Parameter groups of a model, and how a rank is shared among them."""

import dataclasses
import math
import warnings

import numpy as np

from tf_dpsub.checks import is_int


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that share one block of a block-diagonal basis.

    Attributes:
        name: string.
        indices: tuple of int, positions among the trainable variables.
        size: int, number of parameters.
    """

    name: str
    indices: tuple[int, ...]
    size: int


def check_groups(groups):
    """Raises `ValueError` unless `groups` is what `make_groups` takes."""
    if is_int(groups):
        if groups < 1:
            raise ValueError(f"Expected groups >= 1, got {groups}.")
    elif isinstance(groups, str):
        if groups != "layers":
            raise ValueError(
                "Expected groups to be a number, 'layers' or lists of layer "
                f"names, got {groups!r}."
            )
    elif (
        not isinstance(groups, (list, tuple))
        or not groups
        or not all(
            isinstance(names, (list, tuple)) and names for names in groups
        )
    ):
        raise ValueError(
            "Expected groups to be a number, 'layers' or lists of layer names, "
            f"got {groups!r}."
        )


def make_groups(model, variables: list, groups) -> list:
    """Assigns each trainable variable to one group.

    Args:
        model: built `keras.Model`.
        variables: list of its trainable variables.
        groups: int, so many groups of consecutive layers, of sizes as equal as
            layers allow; `"layers"`, one for each layer that has weights; or
            lists of layer names, where a layer stands for all layers in it.

    Returns:
        List of `Group`.

    Raises:
        ValueError: if a name is unknown, or if a weight is in no group or in
            two.
    """
    if isinstance(groups, (list, tuple)):
        return _named_groups(model, variables, groups)
    layers = _layers(model, variables)
    if groups == "layers":
        return [_group(name, of_layer, variables) for name, of_layer in layers]
    if groups > len(layers):
        raise ValueError(
            f"Expected groups <= {len(layers)}, the layers with trainable "
            f"weights of '{model.name}', got {groups}."
        )
    parts = _consecutive(
        [_size(of_layer, variables) for _, of_layer in layers], groups
    )
    made = []
    for first, last in parts:
        members = layers[first:last]
        name = members[0][0]
        if len(members) > 1:
            name += f" to {members[-1][0]}"
        indices = [k for _, of_layer in members for k in of_layer]
        made.append(_group(name, indices, variables))
    return made


def apportion(rank: int, groups: list, limit) -> list:
    """Shares a rank among groups, in proportion to the roots of their sizes.

    The shares add up to `rank` exactly, unless the groups cannot hold as much.

    Args:
        rank: int, at least the number of groups.
        groups: list of `Group`.
        limit: int or `inf`, the most that any group may have: the number of
            examples that span it.

    Returns:
        List of int, each at least 1.

    Raises:
        ValueError: if `rank` is less than the number of groups.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2102.12677), section 4
    """
    if rank < len(groups):
        raise ValueError(
            f"Expected rank >= {len(groups)}, one for each group, got {rank}."
        )
    largest = [int(min(group.size, limit)) for group in groups]
    if rank > sum(largest):
        warnings.warn(
            f"Expected rank <= {sum(largest)}, what the public examples and "
            f"the groups can span, got {rank}: {sum(largest)} is taken.",
            stacklevel=2,
        )
        rank = sum(largest)
    weights = [math.sqrt(group.size) for group in groups]
    ranks = [1] * len(groups)
    # One after another to the group that is furthest below its share: largest
    # remainders, with shares of full groups passed on.
    for _ in range(rank - len(groups)):
        open_groups = [g for g, r in enumerate(ranks) if r < largest[g]]
        ranks[
            max(open_groups, key=lambda g: weights[g] / (ranks[g] + 0.5))
        ] += 1
    return ranks


def _layers(model, variables):
    """Names of the layers that own variables, with their positions."""
    position = {id(v): k for k, v in enumerate(variables)}
    owners = []
    for layer in model._flatten_layers(include_self=True):
        indices = [
            position.pop(id(v))
            for v in layer._trainable_variables
            if id(v) in position
        ]
        if indices:
            owners.append((layer.name, indices))
    # Keras gives nested layers last to first.
    return sorted(owners, key=lambda pair: pair[1][0])


def _named_groups(model, variables, groups):
    layers = {}
    for layer in model._flatten_layers(include_self=False):
        layers.setdefault(layer.name, layer)
    position = {id(v): k for k, v in enumerate(variables)}
    owner = {}
    made = []
    for names in groups:
        indices = []
        for name in names:
            if name not in layers:
                raise ValueError(
                    f"Expected groups of layers of '{model.name}', got the "
                    f"unknown name {name!r}. There are "
                    f"{', '.join(n for n, _ in _layers(model, variables))}."
                )
            for v in layers[name].trainable_variables:
                k = position[id(v)]
                if k in owner:
                    raise ValueError(
                        f"Expected each weight in one group, got {v.path} in "
                        f"two: by {owner[k]!r} and by {name!r}."
                    )
                owner[k] = name
                indices.append(k)
        if not indices:
            raise ValueError(
                "Expected groups with trainable weights, got none in "
                f"{list(names)}."
            )
        made.append(_group("+".join(names), indices, variables))
    missing = [v.path for k, v in enumerate(variables) if k not in owner]
    if missing:
        raise ValueError(
            f"Expected each weight in one group, got {', '.join(missing)} in "
            "none. Add their layers to a group."
        )
    return made


def _group(name, indices, variables):
    indices = tuple(sorted(indices))
    return Group(name, indices, _size(indices, variables))


def _size(indices, variables):
    return sum(int(np.prod(variables[k].shape)) for k in indices)


def _consecutive(sizes, count):
    """Cuts a list into `count` parts whose largest sum is smallest."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    n = len(sizes)
    best = np.full((count + 1, n + 1), np.inf)
    cut = np.zeros((count + 1, n + 1), int)
    best[0, 0] = 0
    for parts in range(1, count + 1):
        for end in range(parts, n + 1):
            for start in range(parts - 1, end):
                largest = max(best[parts - 1, start], total[end] - total[start])
                if largest < best[parts, end]:
                    best[parts, end], cut[parts, end] = largest, start
    bounds, end = [], n
    for parts in range(count, 0, -1):
        bounds.append((int(cut[parts, end]), end))
        end = cut[parts, end]
    return bounds[::-1]
