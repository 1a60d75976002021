"""Tells how to come to a private model, from public examples alone.

    tf-dpsub plan --config=configs/digits_dpsgd.py \\
        --config.public_examples=200 --workdir=out/plan

First it recommends a representation that costs no privacy, a start, and
whether a head or all layers are trained, for n, epsilon and delta of the
config: by a simulation on labelled public examples, and by rules from
experiments where there are none. The command that trains so is printed.

Then it compares mechanisms for the config's own model. It predicts, for each
method, rank and clip, the signal-to-noise ratio of a step, and how well the
mean of what the run releases is aligned with the gradient; measures time and
memory of a step; and recommends a method with its settings. This needs labels;
--nocompare leaves it out.

`report.html`, `plan.json`, `table.md` and `plan.png` are written to the
workdir. `--dry_run` says what would be compared.

No private data is read: of the private examples only their number counts.
Gradients are those of labelled public examples: of `public_examples` of the
data set, or, with --labelled=test, of the test split, which is taken to be
public. They also give the subspaces, unless the config names images as
`public_data`.
"""

import dataclasses
import math
import pathlib
import shlex
import sys

from absl import flags, logging

from tf_dpsub import files
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.reports.method_styles import COLOURS
from tf_dpsub.launchers.terminal import program
from tf_dpsub.launchers.terminal.program import DRY_RUN, WORKDIR
from tf_dpsub.launchers.training import config_flag, run_directory
from tf_dpsub.methods import METHODS, PLANNED

_LABELLED = flags.DEFINE_enum(
    "labelled", "public", ["public", "test"], "Labelled examples to use."
)
_MOST = flags.DEFINE_integer("most", 1000, "Largest number of these examples.")
_METHODS = flags.DEFINE_list(
    "methods", None, "Methods to compare; all, unless given."
)
_BEST_BATCH_SIZE = flags.DEFINE_bool(
    "best_batch_size", False, "Choose the batch size, whatever the config has."
)
_RANKS = flags.DEFINE_list(
    "subspace_ranks", ["10", "50", "200"], "Ranks of subspaces."
)
_CARRIER_RANKS = flags.DEFINE_list(
    "carrier_ranks", ["2", "8", "16"], "Ranks of the carriers of RGP."
)
_CLIPS = flags.DEFINE_list(
    "clips", None, "Clips; relative to public gradients, unless given."
)
_SIMULATED_STEPS = flags.DEFINE_integer(
    "simulated_steps", 1000, "Steps on public examples, at most."
)
_COST = flags.DEFINE_bool("cost", True, "Measure time and memory of steps.")
_COMPARE = flags.DEFINE_bool(
    "compare", True, "Compare mechanisms for the config's own model."
)


def main():
    """Runs the planner as the flags say."""
    config = config_flag.begin()
    run_directory.require_own(WORKDIR.value, "plan.json")
    arguments = _plan_arguments()
    if DRY_RUN.value:
        print(announcement(config, arguments))
        return
    _check(arguments["search"])
    own_flags = [text for text in sys.argv[1:] if text.startswith("--config")]
    advice, advised = _advice(config)
    plan, training = None, None
    if advice is None or _compares_mechanisms(config):
        plan = _make_plan(config, arguments)
        training = training_command(
            plan.recommended, plan.batch_size, config, own_flags
        )
    write(
        plan,
        config,
        pathlib.Path(WORKDIR.value),
        program.command("plan"),
        training,
        advice,
        advised,
    )


def _advice(config):
    """The recommendation of an approach, and the command that follows it."""
    from tf_dpsub.launchers.training import config_plan

    advice = config_plan.recommendation_of(config, _LABELLED.value, _MOST.value)
    if advice is None:
        return None, None
    command = None
    if _LABELLED.value == "public":
        command = config_plan.command_of(advice, config)
    return advice, command


def _compares_mechanisms(config):
    """Whether mechanisms are compared: on request, where there are labels."""
    from tf_dpsub.launchers.training import objects

    has_labels = _LABELLED.value == "test" or objects.labelled_public(config)
    # The mechanism is a part of a recipe.
    return _COMPARE.value and has_labels and config.recipe is None


def _check(search):
    """Checks what is compared before anything takes time."""
    from tf_dpsub import planning

    planning.SearchSpace(**search)


def _plan_arguments():
    """Arguments of `config_plan.plan_of` from the flags."""
    search = {
        "ranks": _numbers("subspace_ranks", _RANKS.value, int),
        "carrier_ranks": _numbers("carrier_ranks", _CARRIER_RANKS.value, int),
    }
    if _METHODS.value is not None:
        search["methods"] = _METHODS.value
    if _CLIPS.value is not None:
        search["clips"] = _numbers("clips", _CLIPS.value, float)
    return {
        "best_batch_size": _BEST_BATCH_SIZE.value,
        "search": search,
        "simulation": {"simulated_steps": _SIMULATED_STEPS.value},
        "measure_cost": _COST.value,
    }


def announcement(config, arguments):
    """Describes the plan that the flags ask for.

    Args:
        config: `ml_collections.ConfigDict`.
        arguments: dict, arguments of `config_plan.plan_of`.
    """
    search = arguments["search"]
    steps = arguments["simulation"]["simulated_steps"]
    batch_size = None if arguments["best_batch_size"] else config.batch_size
    lines = {
        "examples": f"{_MOST.value:,} at most, of the "
        + {"public": "public ones", "test": "test split"}[_LABELLED.value],
        "approach": "representation, start and head, from public examples",
        "methods": ", ".join(search.get("methods", PLANNED)),
        "ranks": f"{_listed(search['ranks'])} of subspaces, "
        f"{_listed(search['carrier_ranks'])} of carriers",
        "clips": _listed(search.get("clips", ["relative to gradients"])),
        "batches": f"of {batch_size:,}" if batch_size else "of the best size",
        "simulated": f"{steps:,} steps at most",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def training_command(candidate, batch_size, config, flags_of_config):
    """The command line that trains a candidate.

    Args:
        candidate: `tf_dpsub.planning.Candidate`.
        batch_size: int.
        config: `ml_collections.ConfigDict` that was planned for.
        flags_of_config: list of strings, the flags that name and change it.

    Returns:
        String; None if changed fields do not suffice, since the config is that
        of another method, or names no public examples.
    """
    method = METHODS[candidate.method]
    kwargs = method.kwargs
    has_public = config.public_examples or config.public_data is not None
    if config.optimizer not in ("DPSGD", method.optimizer) or (
        method.needs_subspace and not has_public
    ):
        return None
    fields = {
        "optimizer": method.optimizer,
        "l2_norm_clip": f"{candidate.l2_norm_clip:.4g}",
        "batch_size": batch_size,
    }
    if config.noise_multiplier is not None:
        fields["noise_multiplier"] = f"{candidate.noise_multiplier:.6g}"
    if candidate.residual_norm_clip is not None:
        clip = float(f"{candidate.residual_norm_clip:.4g}")
        kwargs = kwargs | {"residual_norm_clip": clip}
    if kwargs:
        fields["optimizer_kwargs"] = repr(kwargs)
    if method.needs_subspace:
        fields["subspace"] = config.subspace or "PublicSubspace"
        fields["subspace_kwargs"] = repr(
            config.subspace_kwargs.to_dict() | {"rank": candidate.rank}
        )
    if method.needs_carriers:
        fields["reparametrize"] = repr(
            config.reparametrize.to_dict() | {"rank": candidate.rank}
        )
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    return shlex.join(["tf-dpsub", "train", *flags_of_config, *words])


def _listed(values):
    return ", ".join(map(str, values))


def _make_plan(config, arguments):
    from tf_dpsub.launchers.training import config_plan

    # Shows what the planner compares, but not each step that is traced.
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_of_planner)
    return config_plan.plan_of(
        config, _LABELLED.value, _MOST.value, **arguments
    )


def _is_of_planner(record):
    folder = pathlib.Path(record.pathname).parent.name
    return record.levelname != "INFO" or folder == "planning"


def _numbers(name, texts, kind):
    try:
        values = [kind(text) for text in texts]
    except ValueError:
        values = []
    if not values or not all(0 < v < math.inf for v in values):
        raise ValueError(
            f"Expected --{name} of positive numbers, got {','.join(texts)!r}."
        )
    return values


def write(
    plan, config, folder, command, training=None, advice=None, advised=None
):
    """Writes a plan as JSON, as a table and as a figure, and prints it.

    Args:
        plan: `tf_dpsub.planning.Plan`, or None if no mechanisms were compared.
        config: `ml_collections.ConfigDict`.
        folder: `pathlib.Path`.
        command: string, the command line that made it.
        training: string, the command line that trains as the plan recommends.
            Defaults to `None`.
        advice: `tf_dpsub.planning.Recommendation`. Defaults to `None`.
        advised: string, the command line that follows the advice. Defaults to
            `None`.
    """
    files.make_folder(folder)
    text = markdown(plan, config, command, training, advice, advised)
    files.write_text(folder / "table.md", text)
    parts = {} if plan is None else dataclasses.asdict(plan)
    if advice is not None:
        parts["recommendation"] = dataclasses.asdict(advice)
    files.write_json(folder / "plan.json", parts, default=str)
    folder_page.write_with_figures(
        folder, {"plan": lambda: draw(plan, config, advice)}
    )
    print(text)


def markdown(plan, config, command, training=None, advice=None, advised=None):
    """The plan as Markdown, beginning with what is recommended.

    Args: as `write`.
    """
    title = f"Plan: {config.dataset}, {config.model}"
    lines = folder_page.heading(title, command)
    if advice is not None:
        lines += _of_advice(advice, advised)
    if plan is not None:
        if advice is not None:
            lines += [f"## Mechanisms for {config.model}", ""]
        lines += _of_mechanisms(plan, training)
    return "\n".join(lines).rstrip("\n") + "\n"


def _of_advice(advice, advised):
    """Lines on representation, start and head."""
    budget = f"epsilon = {advice.epsilon:.4g}, n = {advice.examples:,}"
    lines = [
        f"**{advice.recommended.name}**: recommended for {budget}.",
        "",
        *(f"- {reason}" for reason in advice.reasons),
        "",
        "No private example was read. To train it:",
        "",
    ]
    if advised is not None:
        lines += ["```sh", advised, "```"]
    else:
        lines += ["```python", advice.code.rstrip(), "```"]
    lines.append("")
    simulated = [a for a in advice.approaches if a.accuracy is not None]
    if simulated:
        lines += [
            "| approach, in the order of the rules | simulated accuracy |",
            "|---|---|",
            *(
                f"| {a.name} | {100 * a.accuracy:.1f} ± "
                f"{100 * a.standard_error:.1f} % |"
                for a in simulated
            ),
            "",
        ]
    return lines


def _of_mechanisms(plan, training):
    """Lines on mechanisms for the config's own model."""
    chosen = plan.recommended
    lines = [
        f"**{chosen.name}**: clip {chosen.l2_norm_clip:g}, noise multiplier "
        f"{chosen.noise_multiplier:.4g}, batches of {plan.batch_size:,}.",
        "",
        *(f"- {reason}" for reason in plan.reasons),
        "",
        *(["To train it:", "", "```sh", training, "```", ""] * bool(training)),
        "A prediction from public examples, for the given number of private "
        "ones; no private example was read. It takes subspaces for better than "
        "they are: where a method in one leads by little, try both.",
        "",
        "| method | clip | kept | signal to noise | alignment | ms a step | "
        "MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in sorted(plan.candidates, key=lambda c: -c.alignment):
        time = memory = ""
        if c.cost is not None:
            time = f"{1e3 * c.cost.seconds(plan.batch_size):.0f}"
            if c.cost.memory_bytes is not None:
                memory = f"{c.cost.memory_bytes / 2**20:.0f}"
        lines.append(
            f"| {c.name} | {c.l2_norm_clip:g} | {100 * c.kept:.0f} % | "
            f"{c.snr:.2g} | {c.alignment:.2f} | {time} | {memory} |"
        )
    return lines


def draw(plan, config, advice=None):
    """Figure of simulated accuracies, and of mechanisms.

    These are alignment by method and by rank, and noise by batch size.

    Args:
        plan: as for `write`.
        config: `ml_collections.ConfigDict`.
        advice: as for `write`. Defaults to `None`.

    Returns:
        A figure; None where there is nothing to draw.
    """
    panels = []
    if advice is not None and advice.recommended.accuracy is not None:
        panels.append(lambda axes: _by_approach(axes, advice))
    if plan is not None:
        panels += [
            lambda axes: _by_method(axes, plan),
            lambda axes: _by_rank(axes, plan),
        ]
        if len(plan.batch_noise) > 1:
            panels.append(lambda axes: _by_batch(axes, plan))
    if not panels:
        return None
    canvas = figures.new(
        1.5 + 3.5 * max(2, len(panels)),
        4,
        f"Plan: {config.dataset}, {config.model}",
    )
    grid = canvas.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels):
        figures.tidy(axes)
        panel(axes)
    return canvas


def _by_approach(axes, advice):
    """Draws the best simulated accuracy of each representation."""
    best = {}
    for approach in [advice.recommended, *advice.approaches]:
        name = approach.representation
        if approach.trained == "all layers":
            name = approach.trained
        if name not in best or (
            best[name] is not advice.recommended
            and approach.accuracy > best[name].accuracy
        ):
            best[name] = approach
    names = list(best)[::-1]
    axes.barh(
        names,
        [100 * best[name].accuracy for name in names],
        color=[
            figures.BLUE if best[n] is advice.recommended else figures.GREY
            for n in names
        ],
    )
    axes.set_xlim(0, 100)
    axes.set_xlabel("simulated accuracy, %")
    axes.grid(axis="y", visible=False)
    figures.subtitle(axes, "best of each representation")


def _by_method(axes, plan):
    """Draws the alignment of the best candidate of each method."""
    best = plan.best[::-1]
    axes.barh(
        [c.name for c in best],
        [c.alignment for c in best],
        color=[COLOURS[c.method] for c in best],
    )
    for place, candidate in enumerate(best):
        axes.text(
            candidate.alignment + 0.01,
            place,
            f"{candidate.alignment:.2f}",
            va="center",
            color=figures.INK,
        )
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("alignment with the gradient, over the run")
    axes.grid(axis="y", visible=False)
    figures.subtitle(axes, "best of each method")


def _by_rank(axes, plan):
    """Draws alignment by rank, for the best clip of each method."""
    best = {}
    for c in plan.candidates:
        ranks = best.setdefault(c.method, {})
        ranks[c.rank] = max(ranks.get(c.rank, 0.0), c.alignment)
    for method, ranks in best.items():
        colour = COLOURS[method]
        if None in ranks:
            axes.axhline(
                ranks[None], color=colour, linestyle="--", label=method
            )
            continue
        axes.plot(
            sorted(ranks),
            [ranks[k] for k in sorted(ranks)],
            color=colour,
            marker="o",
            label=method,
        )
    ranks = {c.rank for c in plan.candidates if c.rank is not None}
    figures.log_ticks(axes, {k: f"{k:g}" for k in sorted(ranks)})
    axes.set_ylim(0, 1)
    axes.set_xlabel("rank")
    axes.legend(frameon=False)
    figures.subtitle(axes, "alignment by rank")


def _by_batch(axes, plan):
    """Draws the noise over the run by batch size, relative to the least."""
    least = min(plan.batch_noise.values())
    sizes = sorted(plan.batch_noise)
    axes.plot(
        sizes,
        [plan.batch_noise[b] / least for b in sizes],
        color=figures.BLUE,
        marker="o",
    )
    axes.axvline(plan.batch_size, color=figures.GREY, linestyle="--")
    figures.log_ticks(axes, {b: f"{b:g}" for b in sizes})
    axes.set_ylim(bottom=0.95)
    axes.set_xlabel("batch size")
    figures.subtitle(axes, "noise in the mean over the run, relative")


def run():
    """Runs `tf-dpsub plan`."""
    config_flag.run(main)


if __name__ == "__main__":
    run()
