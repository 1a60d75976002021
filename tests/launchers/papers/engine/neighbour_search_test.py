import dataclasses

import pytest

from tf_dpsub.launchers.papers.engine import neighbour_search


@dataclasses.dataclass(frozen=True)
class Point:
    a: int
    b: int


GRID = {"a": tuple(range(10)), "b": tuple(range(10))}


def best_of(start, score, **kwargs):
    return neighbour_search.best_of(
        start, GRID, lambda points: [score(p) for p in points], **kwargs
    )


@pytest.mark.parametrize("together", [(), ("a", "b")])
def test_finds_the_top_and_has_seen_all_its_neighbours(together):
    scored = []

    def score(point):
        scored.append(point)
        return -((point.a - 7) ** 2) - (point.b - 2) ** 2

    best, ends = best_of(Point(4, 4), score, together=together)
    assert best == Point(7, 2)
    assert ends == []
    neighbours = {Point(6, 2), Point(8, 2), Point(7, 1), Point(7, 3)}
    assert neighbours <= set(scored)
    assert len(scored) == len(set(scored))


def test_scores_the_neighbours_of_coordinates_together():
    asked = []

    def scores(points):
        asked.append(set(points))
        return [1.0 for _ in points]

    neighbour_search.best_of(Point(3, 3), GRID, scores, together=("a", "b"))
    around = {Point(2, 3), Point(4, 3), Point(3, 2), Point(3, 4)}
    assert asked == [{Point(3, 3), *around}]


def test_follows_a_ridge_from_coordinate_to_coordinate():
    def score(point):
        return point.a + point.b - 3 * abs(point.a - point.b - 1)

    best, _ = best_of(Point(0, 0), score)
    assert best.a == best.b + 1


def test_says_which_coordinates_are_at_an_end():
    best, ends = best_of(Point(3, 3), lambda p: p.a - (p.b - 3) ** 2)
    assert (best, ends) == (Point(9, 3), ["a"])


def test_stays_where_nothing_is_better():
    best, _ = best_of(Point(3, 3), lambda p: 1.0)
    assert best == Point(3, 3)


def test_a_small_gain_is_not_worth_a_move():
    start, found = Point(0, 0), {}
    for least_gain in (0.5, 1.5):
        found[least_gain], _ = best_of(
            start, lambda p: float(p.a), least_gain=least_gain
        )
    assert found[0.5] != start
    assert found[1.5] == start
