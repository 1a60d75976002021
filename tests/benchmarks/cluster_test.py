"""Formulas of a cluster, and what a simulation says of them."""

import dataclasses

import numpy as np
import pytest

from benchmarks import cluster

SMALL = cluster.Cluster(
    hosts=30, rows_per_host=200_000, batch_per_host=1000.0, host_days=0.02
)


@pytest.mark.parametrize("hosts, host_days", [(1, 365.0), (30, 0.02)])
def test_a_simulation_takes_as_long_as_the_formula_says(hosts, host_days):
    settings = dataclasses.replace(
        SMALL, hosts=hosts, host_days=host_days, checkpoint_steps=20
    )
    epochs = 200
    made = cluster.simulated(settings, epochs)
    kept = settings.steps_per_epoch * settings.seconds
    of_a_loss = settings.restart_seconds + 10 * settings.seconds
    # The largest of 30 normal numbers is approximate, by less than 2 %.
    assert made["seconds"] == pytest.approx(
        kept + made["losses"] * of_a_loss, rel=0.02
    )
    # Losses, of which there are few, are Poisson.
    share = settings.share_lost * kept / of_a_loss
    spread = np.sqrt(share / epochs)
    assert abs(made["losses"] - share) < 5 * spread + 1e-3
    assert made["steps"] == pytest.approx(settings.charged_steps, rel=0.02)


def test_the_sampler_draws_as_one_does():
    hosts = dataclasses.replace(
        SMALL, hosts=2, rows_per_host=9000, batch_per_host=90.0
    )
    law = cluster.sampler_law(hosts, steps=40)
    error = np.sqrt(law["expected_variance"] / 40)
    assert abs(law["mean"] - law["expected_mean"]) < 5 * error
    ratio = law["variance"] / law["expected_variance"]
    assert abs(ratio - 1) < 5 * np.sqrt(2 / 39)


def test_epsilon_does_not_depend_on_hosts_but_by_delta():
    alone, many = (
        dataclasses.replace(SMALL, hosts=hosts, host_days=1e9)
        for hosts in (1, 30)
    )
    assert alone.sampling_rate == many.sampling_rate
    assert alone.steps_per_epoch == many.steps_per_epoch
    assert cluster.epsilon(alone, 2, 1.0) < cluster.epsilon(many, 2, 1.0)


def test_table_and_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "HOSTS", (1, 3))
    settings = {"rows_per_host": 100_000}
    table = cluster.rows_of_table(settings, epochs=1, noise_multiplier=1.0)
    assert [row["hosts"] for row in table] == [1, 3]
    text = cluster.markdown(table)
    assert len(text.splitlines()) == 4
    assert len({line.count("|") for line in text.splitlines()}) == 1
    cluster.figures.write(cluster.draw(settings), tmp_path / "cluster.png")
    assert (tmp_path / "cluster.png").stat().st_size > 1000
