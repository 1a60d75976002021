"""Private geometric medians, against a solver without noise."""

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy import optimize

from tests.launchers.programs import run_main
from tf_dpsub.launchers import reproduce
from tf_dpsub.launchers.papers import geometric_median as study

POINT = study.Point("diag(1/j)", 20, 1e-2, 0.0, 0)


def example_data(seed):
    generator = np.random.default_rng([seed, 1])
    return generator.normal(1, 1, (2, 10_000, 10))


def best_loss(exponent, seed):
    """The least mean loss; examples have ten informative coordinates."""
    weights = np.arange(1, 11) ** -exponent
    examples, _ = example_data(seed)

    def loss(x):
        return np.sqrt(((x - examples) ** 2) @ weights).mean()

    return optimize.minimize(loss, np.ones(10)).fun


class TestSolve:
    @pytest.mark.parametrize("matrix, exponent", study._MATRICES.items())
    def test_comes_close_to_the_best_without_noise(self, matrix, exponent):
        point = dataclasses.replace(POINT, matrix=matrix)
        losses = study.solve(point, 0.0, 20_000)
        best = best_loss(exponent, 0)
        assert best < losses["empirical"] < 1.01 * best
        assert losses["population"] == pytest.approx(best, rel=0.02)

    def test_noise_costs_more_in_more_dimensions_for_the_identity(self):
        losses = [
            study.solve(
                dataclasses.replace(POINT, matrix="I", dimensions=d), 1.3, 2000
            )["empirical"]
            for d in (20, 1000)
        ]
        assert losses[1] > 1.2 * losses[0]

    def test_gradients_are_at_most_of_norm_one(self, monkeypatch):
        seen = []

        def watched(gradient, examples, initial, **kwargs):
            for x in np.random.default_rng(0).normal(size=(50, len(initial))):
                seen.append(np.linalg.norm(gradient(3 * x, 7)))
            assert kwargs["lipschitz"] == 1.0
            return initial

        monkeypatch.setattr(study.analysis, "averaged_sgd", watched)
        for matrix in study._MATRICES:
            study.solve(dataclasses.replace(POINT, matrix=matrix), 1.0, 1)
        assert 0.9 < max(seen) <= 1 + 1e-12

    def test_another_seed_makes_other_data(self):
        first, other = (
            study.solve(dataclasses.replace(POINT, seed=s), 1.0, 200)
            for s in (0, 1)
        )
        assert first["empirical"] != other["empirical"]


@pytest.fixture
def small(monkeypatch):
    """Short runs, in few dimensions, in this process."""
    monkeypatch.setattr(study, "_STEPS", 300)
    monkeypatch.setattr(study, "_DIMENSIONS", (12, 40))
    monkeypatch.setattr(study, "_RATES", (1e-3, 1e-2))
    monkeypatch.setattr(study, "_REGULARIZATIONS", (0.0,))
    monkeypatch.setattr(study, "_SEEDS", range(2))
    solved = []

    def here(points, sigma, steps, jobs):
        for point in points:
            solved.append(point.name)
            yield point, study.solve(point, sigma, steps)

    monkeypatch.setattr(study, "_solve_all", here)
    monkeypatch.setattr(
        study.accounting, "uniform_noise_multiplier", lambda **kwargs: 1.25
    )
    return solved


def run(tmp_path, capsys, **values):
    values = {
        "experiment": "geometric_median",
        "workdir": str(tmp_path),
    } | values
    return run_main(reproduce, capsys, **values)


class TestRun:
    def test_writes_a_table_and_a_figure(self, small, tmp_path, capsys):
        out, _, code = run(tmp_path, capsys)
        assert code == 0
        assert "24 runs, 0 finished, 24 to run" in out
        folder = tmp_path / "geometric_median"
        text = (folder / "table.md").read_text("utf-8")
        assert "one uniformly drawn example a step, 300 steps, σ = 1.25" in text
        _, shared, first, second = text.split("\n## ")
        # Three matrices in two dimensions each; a head of two lines.
        for part in (shared, first, second):
            assert part.count("\n|") == 8
        rates = {row.split(" | ")[2] for row in shared.splitlines()[4:]}
        assert len(rates) == 1
        saved = json.loads((folder / "points.json").read_text("utf-8"))
        for matrix in study._MATRICES:
            names = [
                f"{matrix} d=40 rate={rate} alpha=0 seed={{}}"
                for rate in ("0.001", "0.01")
            ]
            means = [
                np.mean(
                    [saved["points"][n.format(s)]["empirical"] for s in (0, 1)]
                )
                for n in names
            ]
            rate = ("0.001", "0.01")[int(np.argmin(means))]
            for d in (12, 40):
                assert f"| {matrix} | {d} | {rate} | 0 |" in first
        assert (folder / "loss.png").stat().st_size > 10_000

    def test_goes_on_where_it_stopped(self, small, tmp_path, capsys):
        run(tmp_path, capsys, only="seed=0")
        assert len(small) == 12
        out, *_ = run(tmp_path, capsys)
        assert "24 runs, 12 finished, 12 to run" in out
        assert len(small) == len(set(small)) == 24

    def test_a_fraction_is_of_the_steps(self, small, tmp_path, capsys):
        run(tmp_path, capsys, fraction=0.5, only="seed=0")
        text = (tmp_path / "geometric_median" / "table.md").read_text("utf-8")
        assert "150 steps" in text
        assert "Shortened: 0.5 of the steps." in text
        _, error, _ = run(tmp_path, capsys)
        assert "a folder with runs of 300 steps" in error
        assert "with runs of 150" in error

    def test_names_its_runs(self, tmp_path, capsys):
        out, _, code = run(tmp_path, capsys, dry_run=True, only="d=20 .*seed=3")
        assert code == 0
        assert len(out.splitlines()) == 3 * 5 * 2
        assert not list(tmp_path.iterdir())

    def test_is_in_the_list(self, capsys):
        out, *_ = run_main(reproduce, capsys, list=True)
        assert re.search("geometric_median +Loss of private geometric med", out)

    def test_no_such_run(self, tmp_path, capsys):
        _, error, _ = run(tmp_path, capsys, only="d=21")
        assert "Expected --only to name trials of geometric_median" in error


@pytest.mark.slow
def test_in_processes_beside_each_other(monkeypatch, capsys):
    points = [dataclasses.replace(POINT, seed=s) for s in (0, 1, 2)]
    losses = dict(study._solve_all(points, 1.0, 50, jobs=2))
    assert losses == {p: study.solve(p, 1.0, 50) for p in points}
    assert capsys.readouterr().out.count(" left") == 3
