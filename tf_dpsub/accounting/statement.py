"""What was spent and what that means, in plain words."""

import math
import textwrap

_UNIT = (
    "The unit of privacy is one example, that is one row given to training. "
    "Duplicates, several phrases of one sentence, or several rows of one person "
    "are several units."
)
_ADJACENCY = (
    "Two data sets are neighbours if one example of the one is replaced by an "
    "empty (zero-weight) one in the other. The number of examples, the batch "
    "size, the sampling rate and the number of steps are public."
)
_COVERED = (
    "Covered: the weights of the model at every step, and all that is computed "
    "from them. Not covered: training metrics, losses and logs, and whatever "
    "was chosen by looking at private results, such as noise multiplier, batch "
    "size, number of steps, other hyper-parameters, vocabularies, adapted "
    "preprocessing, or which checkpoint is kept."
)
_BATCHES = (
    "The batches were given, so sampling amplifies nothing. It is assumed that "
    "each example is at most once in a batch, and that order, batch membership "
    "and padded length of the others do not depend on any one example."
)


def statement(ledger, *, delta, accountant="rdp", model_name=None):
    """Describes what a ledger has counted.

    Args:
        ledger: `PrivacyLedger`.
        delta: float in (0, 1).
        accountant: string, `"rdp"` or `"pld"`: that of the claimed epsilon.
            Defaults to `"rdp"`.
        model_name: string. Defaults to `None`.

    Returns:
        string, lines of at most 80 characters.
    """
    name = f" of '{model_name}'" if model_name else ""
    lines = [f"Privacy statement{name}", ""]
    if not ledger.entries:
        lines += ["No private step has been made. Epsilon is 0."]
        return "\n".join(lines) + "\n"
    epsilon = ledger.epsilon(delta, accountant)
    paragraphs = [_claim(epsilon, delta, accountant)]
    paragraphs += [_entry(entry) for entry in ledger.entries]
    if math.isfinite(epsilon):
        paragraphs.append(_figures(ledger, delta))
    paragraphs += [_UNIT, _ADJACENCY, _COVERED, _assumptions(ledger)]
    paragraphs += _warnings(ledger, delta)
    lines += ["\n".join(textwrap.wrap(p, 79)) + "\n" for p in paragraphs]
    return "\n".join(lines)


def _claim(epsilon, delta, accountant):
    if math.isinf(epsilon):
        return (
            "NOT PRIVATE: at least one step added no noise, or clipped nothing. "
            "No epsilon holds."
        )
    return (
        f"The training was (ε = {epsilon:.4g}, δ = {delta:g})-differentially "
        f"private, by the {accountant.upper()} accountant, under the assumptions "
        "below."
    )


def _entry(entry):
    text = (
        f"{entry.mechanism}: {entry.steps} steps with noise multiplier "
        f"{entry.noise_multiplier:g} and clipping norm {entry.l2_norm_clip:g}. "
    )
    if entry.sampler == "poisson":
        return text + (
            f"Poisson sampling: every step drew each of {entry.examples} "
            f"examples independently with probability {entry.batch_size}/"
            f"{entry.examples} = {entry.sampling_rate:.4g}."
        )
    if entry.each_example_once_per_epoch:
        text += (
            f"The user states that each of {entry.epochs} epochs gave each "
            "example at most once. "
        )
    return text + _BATCHES


def _figures(ledger, delta):
    figures = []
    for accountant in ("rdp", "pld"):
        amplified = ledger.epsilon(delta, accountant)
        plain = ledger.epsilon_without_amplification(delta, accountant)
        figures.append(
            f"{accountant.upper()} ε = {amplified:.4g} with, and {plain:.4g} "
            "without, amplification by sampling"
        )
    return (
        f"At δ = {delta:g}: {'; '.join(figures)}. The latter counts every step "
        "as a release that sees every example, and needs no assumption on how "
        "batches were drawn but that an example is at most once in each."
    )


def _assumptions(ledger):
    notes = dict.fromkeys(n for entry in ledger.entries for n in entry.notes)
    public = ["the weights before the first of these steps", *notes]
    return (
        f"Taken as public: {', '.join(public)}. Earlier training of these "
        "weights, and other models trained on the same data, are not counted."
    )


def _warnings(ledger, delta):
    warnings = []
    counts = [e.examples for e in ledger.entries if e.examples]
    if counts and delta >= 1 / max(counts):
        warnings.append(
            f"Warning: δ = {delta:g} is not below 1/n = {1 / max(counts):.3g}. "
            "A mechanism that publishes a random example would satisfy it."
        )
    if any(entry.fixed_seed for entry in ledger.entries):
        warnings.append(
            "Warning: noise or sampling used a fixed seed. Whoever knows it can "
            "remove the noise: for experiments only."
        )
    if any(entry.private_selection for entry in ledger.entries):
        warnings.append(
            "Warning: callbacks steered training by private results. Epsilon "
            "does not cover that selection."
        )
    return warnings
