"""A search over a grid that ends where no neighbour is better."""

import dataclasses


class Unknown(Exception):
    """The score of a point is not known, and not to be computed now."""


def best_of(start, grid, score, least_gain=0.0):
    """Climbs from point to point, one coordinate at a time.

    A coordinate is moved to the next value of its grid as long as the score
    grows, in one direction or else in the other; all coordinates in turn, until
    none can be moved. So both neighbours of the result along each coordinate
    were scored, and gain no more than `least_gain`, except beyond an end of the
    grid.

    Args:
        start: frozen dataclass, a point of the grid.
        grid: dict from fields of the point to tuples of values, ascending.
        score: function of a point that returns a float. Called once for each.
        least_gain: float, the growth of the score that is not worth a move.
            Defaults to `0.0`.

    Returns:
        A pair: the best point, and the fields whose value is at an end of
        their grid.
    """
    scores: dict = {}

    def known(point):
        if point not in scores:
            scores[point] = score(point)
        return scores[point]

    best, is_better = start, True
    while is_better:
        is_better = False
        for field in grid:
            moved = _moved(best, field, grid[field], known, least_gain)
            is_better = is_better or moved != best
            best = moved
    ends = [
        field
        for field, values in grid.items()
        if getattr(best, field) in (values[0], values[-1])
    ]
    return best, ends


def _moved(point, field, values, score, least_gain):
    """The best point that climbing along one coordinate leads to."""
    for direction in (1, -1):
        start = point
        while True:
            position = values.index(getattr(point, field)) + direction
            if not 0 <= position < len(values):
                break
            other = dataclasses.replace(point, **{field: values[position]})
            if score(other) <= score(point) + least_gain:
                break
            point = other
        if point != start:
            break
    return point
