"""A private step on one machine and on a thousand: by formula, by simulation.

    python -m benchmarks.cluster --out=out/cluster

Each host holds `rows_per_host` rows of its own and draws from them. Numbers of
one host are measured or given on the command line; the rest follows from them.
The simulation draws the batches of each host from their law, delays, and losses
of hosts, and knows nothing of the formulas. `--sampler` also draws batches of
all hosts by the sampler of the package itself, and compares their law with that
of one Poisson batch.
"""

import argparse
import dataclasses
import math
import pathlib
import sys

import numpy as np
from scipy import stats

from tf_dpsub import accounting, files
from tf_dpsub.launchers.reports import figures

_PAGE = 4096
# Bytes of a float64 number: sums are added as such.
_NUMBER = 8
HOSTS = (1, 10, 100, 1000)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts that train together, each with rows of its own.

    Attributes:
        hosts: int.
        rows_per_host: int.
        row_bytes: int.
        batch_per_host: float, expected rows of a host in a step.
        parameters: int, trained.
        row_seconds: float, computing for one row.
        step_seconds: float, of a step beside its rows: noise and update.
        reads_per_second: float, rows that a host reads at random places.
        bandwidth: float, bytes per second of the network, of a host.
        latency: float, seconds of a message.
        jitter: float, standard deviation of the logarithm of a host's time for
            a step.
        host_days: float, days between two losses of one host.
        restart_seconds: float, until all hosts work again after a loss.
        checkpoint_steps: int, steps from one checkpoint to the next.
    """

    hosts: int
    rows_per_host: int = 10_000_000
    row_bytes: int = 400
    batch_per_host: float = 1000.0
    parameters: int = 1_000_000
    row_seconds: float = 100e-6
    step_seconds: float = 20e-3
    reads_per_second: float = 50e3
    bandwidth: float = 1.25e9
    latency: float = 50e-6
    jitter: float = 0.05
    host_days: float = 365.0
    restart_seconds: float = 300.0
    checkpoint_steps: int = 1000

    @property
    def rows(self):
        """Rows at all hosts, n."""
        return self.hosts * self.rows_per_host

    @property
    def batch_size(self):
        """Expected rows of a step, at all hosts."""
        return self.hosts * self.batch_per_host

    @property
    def sampling_rate(self):
        """Probability of each row in a step, q."""
        return self.batch_size / self.rows

    @property
    def steps_per_epoch(self):
        """Steps of an epoch."""
        return math.ceil(self.rows / self.batch_size)

    @property
    def network_bytes(self):
        """Bytes that a host sends in a step: a ring adds the sums."""
        return 2 * (self.hosts - 1) / self.hosts * _NUMBER * self.parameters

    @property
    def network_seconds(self):
        """Time of a ring: its bytes, and two rounds of messages."""
        messages = 2 * (self.hosts - 1)
        return self.network_bytes / self.bandwidth + messages * self.latency

    @property
    def disk_bytes(self):
        """Bytes that a host reads in a step: whole pages."""
        pages = 1 + (self.row_bytes - 1) / _PAGE
        return self.batch_per_host * pages * _PAGE

    @property
    def slowest_seconds(self):
        """Time of the slowest host, without the network.

        Of so many numbers that are nearly normal, the largest lies about
        `sqrt(2 log hosts)` standard deviations above the mean. A host reads the
        next batch while it computes: the longer of both counts.
        """
        per_row = max(self.row_seconds, 1 / self.reads_per_second)
        mean = self.batch_per_host * per_row + self.step_seconds
        spread = math.hypot(
            math.sqrt(self.batch_per_host) * per_row, self.jitter * mean
        )
        normal = stats.norm.ppf(1 - 1 / (self.hosts + 1))
        return mean + spread * normal

    @property
    def seconds(self):
        """Time of a step."""
        return self.slowest_seconds + self.network_seconds

    @property
    def share_lost(self):
        """Time beside the steps that are kept, as a share of theirs.

        A loss of a host costs the restart, and half the steps from one
        checkpoint to the next.
        """
        losses_per_second = self.hosts / (self.host_days * 86_400)
        lost = self.restart_seconds + self.checkpoint_steps * self.seconds / 2
        return losses_per_second * lost

    @property
    def epoch_seconds(self):
        """Time of an epoch, with what losses of hosts cost."""
        return self.steps_per_epoch * self.seconds * (1 + self.share_lost)

    @property
    def charged_steps(self):
        """Steps of an epoch that are charged, with those made twice."""
        losses_per_second = self.hosts / (self.host_days * 86_400)
        losses = losses_per_second * self.steps_per_epoch * self.seconds
        return self.steps_per_epoch + losses * self.checkpoint_steps / 2


def simulated(cluster, epochs, seed=0):
    """Simulates epochs, host by host and step by step.

    Args:
        cluster: `Cluster`.
        epochs: int.
        seed: int. Defaults to `0`.

    Returns:
        dict of `seconds` of an epoch, `steps` that were made in it, those made
        twice among them, and `losses` of hosts in it, each a mean.
    """
    random = np.random.default_rng(seed)
    target = epochs * cluster.steps_per_epoch
    total, made, losses, done = 0.0, 0, 0, 0
    next_loss = _next_loss(cluster, random)
    while done < target:
        # Some steps at once: [steps, hosts]
        count = min(cluster.checkpoint_steps, target - done)
        rows = random.binomial(
            cluster.rows_per_host,
            cluster.sampling_rate,
            (count, cluster.hosts),
        )
        read = rows / cluster.reads_per_second
        compute = rows * cluster.row_seconds
        times = np.maximum(read, compute) + cluster.step_seconds
        times *= np.exp(cluster.jitter * random.standard_normal(times.shape))
        ends = np.cumsum(times.max(1) + cluster.network_seconds)
        if total + ends[-1] < next_loss:
            total += ends[-1]
            made += count
            done += count
            continue
        # The steps since the last checkpoint are made again.
        begun = int(np.searchsorted(ends, next_loss - total)) + 1
        made += min(begun, count)
        total = next_loss + cluster.restart_seconds
        losses += 1
        next_loss = total + _next_loss(cluster, random)
    return {
        "seconds": total / epochs,
        "steps": made / epochs,
        "losses": losses / epochs,
    }


def _next_loss(cluster, random):
    return random.exponential(cluster.host_days * 86_400 / cluster.hosts)


def epsilon(cluster, epochs, noise_multiplier):
    """ε of so many epochs at δ = 1 / (10 n), steps made twice included."""
    return accounting.epsilon(
        noise_multiplier=noise_multiplier,
        sampling_rate=cluster.sampling_rate,
        steps=math.ceil(epochs * cluster.charged_steps),
        delta=0.1 / cluster.rows,
    )


def sampler_law(cluster, steps):
    """Draws batches of all hosts by the sampler of the package.

    Args:
        cluster: `Cluster`.
        steps: int.

    Returns:
        dict of the mean and the variance of the rows of a step, and of those of
        one Poisson batch.
    """
    import tensorflow as tf

    from tf_dpsub.data import poisson_batches

    rate = cluster.sampling_rate
    chunk = int(stats.binom.isf(1e-12, cluster.rows_per_host, rate)) + 1
    keys = np.random.default_rng(0).integers(0, 2**63 - 1, (cluster.hosts, 2))

    @tf.function
    def drawn(key, step):
        rows = poisson_batches._draw(
            cluster.rows_per_host, rate, key, step, chunk
        )
        return tf.size(rows)

    sizes = np.array(
        [
            sum(
                int(drawn(tf.constant(key), tf.constant(step, tf.int64)))
                for key in keys
            )
            for step in range(steps)
        ]
    )
    return {
        "mean": float(sizes.mean()),
        "variance": float(sizes.var(ddof=1)),
        "expected_mean": cluster.rows * rate,
        "expected_variance": cluster.rows * rate * (1 - rate),
    }


def rows_of_table(settings, epochs, noise_multiplier):
    """What the table shows, for each number of hosts.

    Args:
        settings: dict, fields of `Cluster` but `hosts`.
        epochs: int.
        noise_multiplier: float.

    Returns:
        List of dicts.
    """
    table = []
    for hosts in HOSTS:
        cluster = Cluster(hosts, **settings)
        made = simulated(cluster, epochs)
        # The same batch on more rows: fewer of them in a step.
        fixed = dataclasses.replace(
            cluster,
            batch_per_host=cluster.batch_per_host / hosts,
        )
        table.append(
            {
                "hosts": hosts,
                "rows": cluster.rows,
                "step_ms": 1000 * cluster.seconds,
                "network_ms": 1000 * cluster.network_seconds,
                "epoch_hours": cluster.epoch_seconds / 3600,
                "simulated_hours": made["seconds"] / 3600,
                "charged": cluster.charged_steps / cluster.steps_per_epoch,
                "simulated_charged": made["steps"] / cluster.steps_per_epoch,
                "losses": made["losses"],
                "epsilon": epsilon(cluster, epochs, noise_multiplier),
                "noise": noise_multiplier / cluster.batch_size,
                "epsilon_same_batch": accounting.epsilon(
                    noise_multiplier=noise_multiplier,
                    sampling_rate=fixed.sampling_rate,
                    steps=epochs * cluster.steps_per_epoch,
                    delta=0.1 / cluster.rows,
                ),
            }
        )
    return table


def markdown(table):
    """The table, as Markdown."""
    lines = [
        "| hosts | rows | step, ms | of it network | hours an epoch "
        "| simulated | steps charged / kept | simulated | losses an epoch "
        "| ε | noise / clip in the mean | ε, batch of one host |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        cells = [
            f"{row['hosts']:,}",
            f"{row['rows']:.0e}",
            f"{row['step_ms']:.0f}",
            f"{row['network_ms']:.0f}",
            f"{row['epoch_hours']:.2f}",
            f"{row['simulated_hours']:.2f}",
            f"{row['charged']:.3f}",
            f"{row['simulated_charged']:.3f}",
            f"{row['losses']:.3f}",
            f"{row['epsilon']:.3f}",
            f"{row['noise']:.1e}",
            f"{row['epsilon_same_batch']:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(settings):
    """Figure of the time of a step by the number of hosts, and its parts."""
    hosts = np.unique(np.logspace(0, 3, 60).astype(int))
    clusters = [Cluster(int(h), **settings) for h in hosts]
    canvas = figures.new(7, 3.5, "Time of a step by the number of hosts")
    axes = canvas.subplots()
    mean = clusters[0].slowest_seconds
    parts = [
        [1000 * mean] * len(hosts),
        [1000 * (c.slowest_seconds - mean) for c in clusters],
        [1000 * c.network_bytes / c.bandwidth for c in clusters],
        [
            1000 * (c.network_seconds - c.network_bytes / c.bandwidth)
            for c in clusters
        ],
    ]
    labels = [
        "one host",
        "waiting for the slowest",
        "network: bytes",
        "network: messages of a ring",
    ]
    colours = [figures.GREY, figures.ORANGE, figures.BLUE, figures.SKY]
    axes.stackplot(hosts, parts, labels=labels, colors=colours)
    axes.set_xscale("log")
    axes.set_xticks(HOSTS, [f"{h:,}" for h in HOSTS])
    axes.set_xlabel("hosts")
    axes.set_ylabel("ms")
    axes.set_ylim(0)
    axes.legend(frameon=False, loc="upper left")
    figures.tidy(axes)
    return canvas


def main():
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for field in dataclasses.fields(Cluster)[1:]:
        parser.add_argument(
            f"--{field.name}", type=field.type, default=field.default
        )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--noise_multiplier", type=float, default=0.6)
    parser.add_argument("--sampler", type=int, default=0, help="steps")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("out/cluster")
    )
    args = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Cluster)[1:]]
    settings = {name: getattr(args, name) for name in names}
    files.make_folder(args.out)
    text = markdown(rows_of_table(settings, args.epochs, args.noise_multiplier))
    print(text)
    files.write_text(args.out / "table.md", text)
    figures.write(draw(settings), args.out / "cluster.png")
    if args.sampler:
        print(sampler_law(Cluster(HOSTS[-1], **settings), args.sampler))
    return 0


if __name__ == "__main__":
    sys.exit(main())
