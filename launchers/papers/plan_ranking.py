"""The planner's ranking of methods against their measured accuracies."""

import copy
import dataclasses
import itertools
import json
import math
import statistics

from tf_dpsub import files
from tf_dpsub.configs import default
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.methods import METHODS, PLANNED, method_of

# Experiments whose trials are ranked, with the labelled split that stands for
# the private examples: test examples where public ones are too many or too few.
_EXPERIMENTS = {
    "digits_methods": "public",
    "pdp_mnist": "public",
    "pdp_fashion_mnist": "public",
    "pdp_k": "public",
    "gep_mnist": "test",
    "gep_mnist_tuned": "test",
    "gep_cifar10": "test",
    "rgp_sst2": "test",
    "rgp_rank": "test",
}
# With few public examples, enough must remain to make the basis.
_HELD_OUT = {"pdp_fashion_mnist": 0.28}
_SPLITS = 3
# Largest number of test examples.
_MOST = {"rgp_sst2": 256, "rgp_rank": 256}
_STEPS = {"rgp_sst2": 40, "rgp_rank": 40}
_DEFAULT_MOST, _DEFAULT_STEPS = 500, 1000
# Fields of a config that may differ between trials of one setting.
_FREE = (
    "optimizer",
    "optimizer_kwargs",
    "subspace",
    "subspace_kwargs",
    "public_data",
    "public_examples",
    "random_public_labels",
    "whiten",
    "start_epoch",
    "l2_norm_clip",
    "learning_rate",
    "inner_optimizer_kwargs",
    "reparametrize",
    "recorders",
    "private_gradients_kwargs",
    "seed",
)
# With a single seed, smaller differences in accuracy are undecided.
_ONE_SEED = 0.01


@dataclasses.dataclass(frozen=True)
class Point:
    """An experiment whose trials are ranked.

    Attributes:
        name: string.
    """

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A method and rank in a setting, with its best clip and learning rate.

    Attributes:
        method: string, as the planner names it.
        rank: int or None.
        accuracies: list of float, one for each seed.
        config: `ml_collections.ConfigDict`, of one seed.
    """

    method: str
    rank: int | None
    accuracies: list
    config: object

    @property
    def name(self):
        return (
            self.method if self.rank is None else f"{self.method} {self.rank}"
        )

    @property
    def mean(self):
        return statistics.fmean(self.accuracies)


class PlanRanking:
    """The planner's ranking of methods against their measured accuracies."""

    name = "plan_ranking"
    title = "The planner's ranking against measured accuracies"

    def points(self):
        """The experiments, in a list."""
        return [Point(name) for name in _EXPERIMENTS]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Plans each setting of experiments that ran in the same workdir.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`.
            fraction: float, share of the simulated steps.
            jobs: int, not used.
            command: string, for the table.
            inputs: `papers.Inputs`, not used.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if none of the experiments has finished trials.
        """
        files.make_folder(folder)
        pairs_file = folder / "pairs.json"
        saved = files.read_json(pairs_file) if pairs_file.exists() else {}
        setting_count = 0
        for point in points:
            trials = folder.parent / point.name / "trials"
            for name, members in settings(trials).items():
                setting_count += 1
                key = f"{point.name}: {name}"
                measured = [_as_json(m) for m in members]
                entry = saved.get(key)
                if entry is None or entry["measured"] != measured:
                    print(f"planning {key}", flush=True)
                    planned = _planned_alignments(point.name, members, fraction)
                    saved[key] = {"measured": measured, "planned": planned}
                    files.write_json(pairs_file, saved)
        if not setting_count:
            raise ValueError(
                "Expected finished trials of at least two methods of one of "
                f"{', '.join(p.name for p in points)} in {folder.parent}, got "
                "none. Run these experiments first, in the same workdir."
            )
        text = _table(self.title, saved, command)
        files.write_text(folder / "table.md", text)
        folder_page.write_with_figures(
            folder, {"pairs": lambda: _figure(self.title, pairs(saved))}
        )
        print(f"{folder}/table.md")
        return 0


def settings(folder):
    """Finished trials, grouped by the setting that they share.

    Args:
        folder: `pathlib.Path`, with a folder for each trial.

    Returns:
        dict from the name of a setting to a list of at least two `Member`.
    """
    grouped = {}
    for file in sorted(folder.glob("*/result.json")):
        result = files.read_json(file)
        config = _config(result["config"])
        kind = _kind(config)
        if kind is None:
            continue
        shared = {k: v for k, v in result["config"].items() if k not in _FREE}
        tuned = json.dumps(
            [config.l2_norm_clip, config.learning_rate, config.start_epoch]
        )
        grouped.setdefault(json.dumps(shared), {}).setdefault(
            kind, {}
        ).setdefault(tuned, []).append((result["test_accuracy"], config))
    members_of = {}
    for kinds in grouped.values():
        members = [_best(*kind, tries) for kind, tries in kinds.items()]
        if len(members) > 1:
            members_of[_name(members[0].config)] = members
    return members_of


def _best(method, rank, tries):
    """The member with the clip and learning rate of highest mean accuracy."""
    runs = max(
        tries.values(), key=lambda runs: statistics.fmean(a for a, _ in runs)
    )
    return Member(
        method=method,
        rank=rank,
        accuracies=[accuracy for accuracy, _ in runs],
        config=runs[0][1],
    )


def _config(fields):
    config = default.get_config()
    with config.unlocked():
        config.update(fields)
    return config


def _kind(config):
    """Name and rank of a trial's method; None if the planner lacks it."""
    if config.lora or config.noise_multiplier == 0:
        return None
    method = method_of(config.optimizer, config.optimizer_kwargs)
    if method is None or method.name not in PLANNED:
        return None
    if method.needs_carriers:
        return method.name, config.reparametrize.rank
    if not method.needs_subspace:
        return method.name, None
    rank = config.subspace_kwargs.get("rank")
    if config.subspace != "PublicSubspace" or rank == "auto":
        return None
    return method.name, rank


def _name(config):
    parts = [config.model]
    if config.model_kwargs.get("activation"):
        parts.append(f"{config.model_kwargs.activation} units")
    if config.noise_multiplier is not None:
        parts.append(f"σ = {config.noise_multiplier:g}")
    else:
        parts.append(f"ε = {config.epsilon:g}")
    parts.append(f"{config.epochs} epochs")
    return ", ".join(parts)


def _as_json(member):
    return {
        "method": member.method,
        "rank": member.rank,
        "clip": member.config.l2_norm_clip,
        "accuracies": member.accuracies,
    }


def _planned_alignments(experiment, members, fraction):
    """Planned alignment of each member, by its name."""
    from tf_dpsub.launchers.training import config_plan

    # The config of a member with a subspace names the public examples.
    config = copy.deepcopy(
        next(
            (m.config for m in members if m.config.subspace), members[0].config
        )
    )
    plain = next((m.config for m in members if m.method == "DP-SGD"), config)
    config.learning_rate = plain.learning_rate
    config.l2_norm_clip = plain.l2_norm_clip
    steps = _STEPS.get(experiment, _DEFAULT_STEPS)
    plan = config_plan.plan_of(
        config,
        _EXPERIMENTS[experiment],
        _MOST.get(experiment, _DEFAULT_MOST),
        search={
            "methods": tuple(dict.fromkeys(m.method for m in members)),
            "clips": sorted({m.config.l2_norm_clip for m in members}),
            "ranks": sorted(
                {
                    m.rank
                    for m in members
                    if m.rank and not METHODS[m.method].needs_carriers
                }
            ),
            "carrier_ranks": sorted(
                {m.rank for m in members if METHODS[m.method].needs_carriers}
            ),
        },
        simulation={
            "simulated_steps": max(1, round(fraction * steps)),
            "held_out": _HELD_OUT.get(experiment, 0.5),
            "splits": _SPLITS if _EXPERIMENTS[experiment] == "public" else 1,
        },
        measure_cost=False,
    )
    alignments = {
        (c.method, c.rank, c.l2_norm_clip): c.alignment for c in plan.candidates
    }
    return {
        m.name: alignments.get((m.method, m.rank, m.config.l2_norm_clip))
        for m in members
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two methods in one setting: measured and planned.

    Attributes:
        setting: string.
        names: tuple of two strings.
        measured: tuple of two floats, mean accuracies.
        planned: tuple of two floats, alignments.
        margin: float, the smallest measured difference that counts.
    """

    setting: str
    names: tuple
    measured: tuple
    planned: tuple
    margin: float

    @property
    def gain(self):
        """Measured accuracy of the first method minus that of the second."""
        return self.measured[0] - self.measured[1]

    @property
    def predicted(self):
        """Planned alignment of the first method minus that of the second."""
        return self.planned[0] - self.planned[1]

    @property
    def is_decided(self):
        return abs(self.gain) > self.margin

    @property
    def is_right(self):
        return self.gain * self.predicted > 0


def pairs(saved):
    """Pairs of methods in each setting; the better aligned comes first."""
    all_pairs = []
    for setting, entry in saved.items():
        planned_members = [
            (
                _member_name(m),
                m["accuracies"],
                entry["planned"][_member_name(m)],
            )
            for m in entry["measured"]
            if entry["planned"][_member_name(m)] is not None
        ]
        planned_members.sort(key=lambda member: -member[2])
        for one, other in itertools.combinations(planned_members, 2):
            all_pairs.append(
                Pair(
                    setting=setting,
                    names=(one[0], other[0]),
                    measured=tuple(
                        statistics.fmean(m[1]) for m in (one, other)
                    ),
                    planned=(one[2], other[2]),
                    margin=_margin(one[1], other[1]),
                )
            )
    return all_pairs


def _member_name(member):
    if member["rank"] is None:
        return member["method"]
    return f"{member['method']} {member['rank']}"


def _margin(first, second):
    """Two standard errors of the difference of two means."""
    if min(len(first), len(second)) < 2:
        return _ONE_SEED
    return 2 * math.sqrt(
        sum(statistics.variance(v) / len(v) for v in (first, second))
    )


def _table(title, saved, command):
    all_pairs = pairs(saved)
    decided = [p for p in all_pairs if p.is_decided]
    right, sure = (sum(p.is_right for p in ps) for ps in (all_pairs, decided))
    right_percent = 100 * right / max(len(all_pairs), 1)
    sure_percent = 100 * sure / max(len(decided), 1)
    best_first, mean_deficit = _choices(saved)
    lines = [
        *folder_page.heading(title, command),
        f"Of {len(all_pairs)} pairs of methods in {len(saved)} settings, the "
        f"planner is right about {right} ({right_percent:.0f} %); of the "
        f"{len(decided)} whose accuracies differ by more than two standard "
        f"errors (one point, where one seed ran), about {sure} "
        f"({sure_percent:.0f} %). The method that it puts first is the most "
        f"accurate in {best_first} of {len(saved)} settings, and on average "
        f"{100 * mean_deficit:.1f} points below the most accurate.",
        "",
        "Each method and rank has the clip and learning rate of its best runs. "
        "The planner read the public examples of the experiment (`pdp_...`, "
        "`digits_...`), or test examples (others), with the experiment's own "
        "public images for subspaces.",
        "",
        "| setting | better aligned | than | alignments | accuracies (%) | |",
        "|---|---|---|---|---|---|",
    ]
    for pair in all_pairs:
        verdict = "right" if pair.is_right else "wrong"
        if not pair.is_decided:
            verdict += ", undecided"
        lines.append(
            f"| {pair.setting} | {pair.names[0]} | {pair.names[1]} | "
            + " / ".join(f"{a:.2f}" for a in pair.planned)
            + " | "
            + " / ".join(f"{100 * a:.1f}" for a in pair.measured)
            + f" | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def _choices(saved):
    """Number of settings whose first choice is best, and its mean deficit."""
    best_first, deficits = 0, []
    for entry in saved.values():
        means = {
            _member_name(m): statistics.fmean(m["accuracies"])
            for m in entry["measured"]
        }
        planned = {k: v for k, v in entry["planned"].items() if v is not None}
        chosen = max(planned, key=planned.get)
        deficits.append(max(means.values()) - means[chosen])
        best_first += deficits[-1] == 0
    return best_first, statistics.fmean(deficits)


def _figure(title, all_pairs):
    canvas = figures.new(6.5, 4.6, title)
    axes = canvas.subplots()
    figures.tidy(axes)
    for is_decided, is_right, label in (
        (True, True, "right"),
        (True, False, "wrong"),
        (False, None, "within two standard errors"),
    ):
        shown_pairs = [
            p
            for p in all_pairs
            if p.is_decided == is_decided
            and (is_right is None or p.is_right == is_right)
        ]
        colour = figures.GREY
        if is_decided:
            colour = figures.BLUE if is_right else figures.RED
        axes.plot(
            [p.predicted for p in shown_pairs],
            [100 * p.gain for p in shown_pairs],
            color=colour,
            marker="o" if is_right or not is_decided else "X",
            linestyle="none",
            alpha=0.8,
            label=f"{label} ({len(shown_pairs)})",
        )
    axes.axhline(0, color=figures.GREY, linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("predicted difference of alignments")
    axes.set_ylabel("measured difference, points")
    axes.legend(frameon=False)
    return canvas
