"""The privacy statement: the guarantee of a model and its limits, in prose."""

import decimal
import math
import textwrap
from collections.abc import Sequence

from tf_dpsub.accounting import accountants, selection

_WIDTH = 80

_UNIT = (
    "Unit. What is protected is one example: one row given to training. "
    "Duplicates, several phrases of one sentence, several references of one "
    "input and several rows of one person are several units; together they are "
    "protected less."
)
_PERSON = (
    "Unit. What is protected is one person: all rows with one id, however many "
    "they are. What a row tells about others than the person of its id is "
    "protected by the rows of these alone."
)
_ROWS_OF_PERSON = (
    "Unit. What is protected is one person: at most {rows}, together. That "
    "nobody has more was stated, not checked. What a row tells about others "
    "than its person is protected by their own rows alone."
)
_ADJACENCY = (
    "Adjacency. Two data sets are neighbours if one example of one of them is "
    "replaced in the other by an empty (zero-weight) one. The number of "
    "examples, the batch size, the sampling rate and the number of steps are "
    "public."
)
_ADJACENCY_OF_PERSONS = (
    "Adjacency. Two data sets are neighbours if all rows of one person in one "
    "of them are replaced in the other by empty (zero-weight) ones. The number "
    "of {units}, the batch size, the sampling rate and the number of steps are "
    "public."
)
_ADD_REMOVE = (
    " For Poisson sampling ε is also that of adding or removing one {unit}."
)
_COVERED = (
    "Covered: the weights at every step, all of them together, and whatever is "
    "computed from them. Not covered: training metrics, losses and logs, and "
    "anything chosen by looking at private results, such as the noise "
    "multiplier, the batch size, the number of steps, other hyper-parameters, "
    "vocabularies, adapted preprocessing, or which checkpoint to keep."
)
_SINCE = (
    "Counted: the private steps since the model was made private, with those "
    "of the checkpoints loaded into it. Earlier training of its weights, and "
    "other models trained on the same data, are not counted."
)
_CHANGED = (
    "WARNING: the weights were changed after the last private step, by plain "
    "training or otherwise. ε covers them as the private steps left them, and "
    "what is computed from those alone: not what they were taught since."
)
_ATTACKS = (
    "Attacks. Whoever sees all {released}, and knows all examples but one, "
    "cannot tell well whether that one took part. An attack that takes {false} "
    "% of examples that did not for some that did finds at most {true} % of "
    "those that did; one that takes {falser} %, at most {truer} %. These are "
    "the smallest of min(e^ε f + δ, 1 - e^-ε (1 - δ - f)), f being the share "
    "of false positives, over all (ε, δ) of the steps that were counted."
)
_FALSE_POSITIVE_RATES = (0.001, 0.01)
_DRAWN = "with Poisson sampling"
_UNAMPLIFIED = "without amplification by sampling"
_POISSON = (
    "Poisson sampling: every step drew each of the {examples} examples "
    "independently with probability q = {rate:.4g}. An epoch's worth of steps "
    "uses about 63 % of the examples."
)
_PERSONS = (
    "Poisson sampling: every step drew each of the {examples} persons "
    "independently with probability q = {rate:.4g}, and took some of the rows "
    "of each; the batch size counts persons."
)
_RATES = (
    "Poisson sampling with a rate for each example: every step drew each of "
    "the {examples} examples independently, with probability {rate:.4g} at "
    "most. ε is that of the examples with this rate; others are protected "
    "better."
)
_CYCLIC = (
    "Cyclic Poisson sampling: a public rule splits the {examples} {unit}s "
    "into {bands} groups. Steps took one group after the other, and drew each "
    "of its {unit}s independently with probability q = {rate:.4g}. Of the "
    "noise of a step, the {others} following ones take a part back: each time "
    "that one {unit} was drawn counts with all of them, in {cycles} cycles of "
    "{bands} steps."
)
_BATCHES = (
    "The batches were the user's own, so no amplification by sampling is "
    "claimed. Assumed: each example is at most once in a batch; neither the "
    "order nor the membership nor the padded length of the batches depends on "
    "any one example; and each row depends on its own example alone, so that "
    "no `map` of whole batches mixes or standardises their rows."
)
_ALLOCATION = (
    "Each {unit} once in an epoch, at a random step: in every epoch of "
    "{steps} steps each of the {examples} {unit}s was drawn at exactly one of "
    "them, chosen uniformly and independently of all others; {epochs} epochs "
    "were begun, and each of them counts whole."
)
_SEARCH = (
    "{mechanism}: {searches} of a random and secret number of trials, {mean:g} "
    "expected ({distribution} distribution). Its weights, its hyper-parameters "
    "and its score are covered, and so is that they were chosen by that score. "
    "The other trials, their scores, their number, the time that the search "
    "took and its folder are not: they must stay secret. Assumed: trials "
    "propose hyper-parameters independently of each other and of the data. One "
    "trial is this. {trial}"
)
_VALIDATION = (
    "{mechanism}: {releases} releases of metrics of {rows}, each with noise "
    "multiplier σ = {multiplier:.6g} and sensitivity {bound:.4g}. They may be "
    "published, and whatever was chosen by them alone is covered. They count "
    "as if their rows were among those of the training."
)
_ONCE = (
    " The user states that each example is at most once in an epoch; {epochs} "
    "epochs were begun."
)

# Of entries that release votes of teachers, by their mechanisms.
_VOTES = {
    "PATE check": (
        "{steps} checks with noise of standard deviation {stddev:.6g} votes on "
        "the largest count of a query, which one teacher moves by at most 1. "
    ),
    "PATE answer": (
        "{steps} answers with noise of standard deviation {stddev:.6g} votes "
        "on each count of a query, which one teacher moves by at most √2 in "
        "norm. They were stated beforehand, and all of them count, given or "
        "not. "
    ),
}
_PARTS = (
    "Assumed: each of the {examples} examples is in the part of one teacher, "
    "decided by its place alone; and a teacher depends on its own part, public "
    "data and random numbers of its own."
)
_COVERED_ANSWERS = (
    "Covered: the answers to all queries, and whatever is computed from them "
    "and from public data alone, such as a student. Not covered: the teachers, "
    "their votes, and anything chosen by looking at private results, such as "
    "the threshold, the noise, the number of queries, or how teachers are "
    "trained."
)


def statement(
    ledger,
    *,
    delta: float,
    model_name: str | None = None,
    accountant: str = "pld",
    weights_were_changed: bool = False,
    uncovered: Sequence[str] = (),
    rows_per_person: int | None = None,
) -> str:
    """Describes what a ledger has counted, for a reader of the result.

    Args:
        ledger: `PrivacyLedger`.
        delta: float in (0, 1).
        model_name: str. Defaults to `None`, without a name.
        accountant: str, `"rdp"` or `"pld"`, which of them the first sentence
            quotes; figures of both follow. Defaults to `"pld"`.
        weights_were_changed: bool, whether the weights are no longer those that
            the last step left. Defaults to `False`.
        uncovered: sequence of string, nouns: what ε does not cover, beside what
            the ledger says. Defaults to `()`.
        rows_per_person: int, the most rows of one person: every ε is then that
            of all of them together. Defaults to `None`, of what the ledger
            protects.

    Returns:
        A str, lines of at most 80 characters. Every ε is rounded up.

    Raises:
        ValueError: If an argument is out of its range, or if the ledger
            protects persons in some steps and examples in others, and
            `rows_per_person` is not given.

    Example:

    ```python
    print(tf_dpsub.accounting.statement(model.ledger, delta=1e-5))
    ```
    """
    title = "Privacy statement"
    if model_name is not None:
        title += f" of '{model_name}'"
    entries = ledger.entries
    rows = rows_per_person
    epsilon = ledger.epsilon(delta, accountant, rows)
    events = ledger.events(rows)
    blocks = [title, _wrap(_claim(entries, events, epsilon, delta, accountant))]
    blocks += [_wrap(text) for text in _warnings(entries, delta, uncovered)]
    if weights_were_changed:
        blocks.append(_wrap(_CHANGED))
    if entries and math.isfinite(epsilon):
        blocks.append(_table(ledger, delta, rows))
        is_of_persons = rows is not None or ledger.unit == "person"
        # Who knows a seed, or what was chosen by, can do more.
        if not any(e.fixed_seed or e.private_selection for e in entries):
            blocks.append(_wrap(_attacks(entries, events, is_of_persons)))
    blocks += [_wrap(_mechanism(entry)) for entry in entries]
    blocks += [
        _wrap(text)
        for text in (
            *_protected(ledger, rows),
            *_covered(entries),
            _SINCE,
            _public(entries),
        )
    ]
    return "\n\n".join(blocks) + "\n"


def round_up(value: float, digits: int = 4, decimals: int | None = None) -> str:
    """Formats a bound so that rounding never makes it smaller.

    Args:
        value: float, >= 0.
        digits: int, number of significant digits. Defaults to 4.
        decimals: int, number of digits after the point, instead. Defaults to
            `None`.

    Returns:
        A str, as `"0.7243"`, `"inf"`.
    """
    exact = decimal.Decimal(repr(float(value)))
    if decimals is None:
        context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
        return f"{float(context.plus(exact)):.{digits}g}"
    if exact.is_infinite():
        return "inf"
    rounded = exact.quantize(
        decimal.Decimal(1).scaleb(-decimals),
        rounding=decimal.ROUND_CEILING,
        # Enough digits for any float.
        context=decimal.Context(prec=400),
    )
    return f"{rounded:f}"


def _claim(entries, events, epsilon, delta, accountant):
    if not entries:
        return "No private step was taken. ε = 0."
    if math.isinf(epsilon):
        reasons = dict.fromkeys(
            f"{entry.steps} steps of {entry.mechanism} {_fault(entry)}"
            for entry, event in zip(entries, events)
            if math.isinf(
                accountants.composed_epsilon(
                    [event], delta=delta, accountant="rdp"
                )
            )
        )
        return f"NOT PRIVATE: {'; '.join(reasons)}. ε is infinite."
    by = accountants.bounding_accountant(
        events, delta=delta, accountant=accountant
    )
    answers = all(entry.mechanism in _VOTES for entry in entries)
    return (
        f"{'Answering' if answers else 'Training'} was (ε = "
        f"{round_up(epsilon)}, δ = {delta:g})-differentially private, "
        f"{_sampling(entries)}, by {by.upper()} accounting."
    )


def _fault(entry):
    """Reason why the steps of an entry are not private."""
    if entry.private_state:
        return "used a basis that was computed from private data"
    return "added no noise" + " and clipped nothing" * math.isinf(
        entry.l2_norm_clip
    )


def _of_trials(entries):
    """Entries with those of one trial in the place of a search."""
    return [part for entry in entries for part in entry.trial or (entry,)]


def _sampling(entries):
    """The kinds of sampling that ε relies on, in words."""
    ways = dict.fromkeys(
        ("with cyclic Poisson sampling" if entry.bands > 1 else _DRAWN)
        if entry.sampler == "poisson"
        else "with each example at one random step of an epoch"
        if entry.sampler == "allocation" and entry.epochs
        else "with each example once in an epoch"
        if entry.each_example_once_per_epoch and entry.epochs
        else _UNAMPLIFIED
        for entry in _of_trials(entries)
    )
    return " and ".join(ways)


def _warnings(entries, delta, uncovered):
    sizes = [entry.examples for entry in entries if entry.examples is not None]
    if sizes and delta >= 1 / max(sizes):
        yield (
            f"WARNING: δ = {delta:g} is not below 1/n = {1 / max(sizes):.3g}. "
            "Publishing one example drawn at random would satisfy it: choose "
            "a much smaller one."
        )
    if any(entry.fixed_seed for entry in entries):
        yield (
            "WARNING: noise or sampling came from a fixed seed. Whoever knows "
            "it can take the noise away: for experiments only."
        )
    if any(entry.private_selection for entry in entries):
        yield (
            "WARNING: a callback was allowed to steer the run by private "
            "results. ε does not cover that selection."
        )
    uncovered = dict.fromkeys(
        [*(u for entry in entries for u in entry.uncovered), *uncovered]
    )
    if uncovered:
        yield f"WARNING: ε does not cover {'; nor '.join(uncovered)}."


def _protected(ledger, rows_per_person):
    """The unit, and the data sets that count as neighbours."""
    units, unit = "examples", "person"
    if ledger.unit == "person":
        text, adjacency = _PERSON, _ADJACENCY_OF_PERSONS
        units = "persons"
    elif rows_per_person is None:
        text, adjacency, unit = _UNIT, _ADJACENCY, "example"
    else:
        rows = f"{rows_per_person} row" + "s" * (rows_per_person > 1)
        text = _ROWS_OF_PERSON.format(rows=rows)
        adjacency = _ADJACENCY_OF_PERSONS
    entries = _of_trials(ledger.entries)
    if any(entry.sampler == "poisson" for entry in entries) and all(
        entry.bands == 1 for entry in entries
    ):
        adjacency += _ADD_REMOVE
    return text, adjacency.format(units=units, unit=unit)


def _table(ledger, delta, rows_per_person):
    sampling = _sampling(ledger.entries)
    if " and " in sampling:
        sampling = "with the sampling described below"
    figures = {
        sampling: ledger.epsilon,
        _UNAMPLIFIED: ledger.epsilon_without_amplification,
    }
    width = max(map(len, figures))
    lines = [f"  {'ε':{width}}{'RDP':>12}{'PLD':>12}"]
    for label, spent in figures.items():
        rdp, pld = (
            round_up(spent(delta, by, rows_per_person)) for by in ("rdp", "pld")
        )
        lines.append(f"  {label:{width}}{rdp:>12}{pld:>12}")
    return "\n".join(lines)


def _attacks(entries, events, is_of_persons):
    answers = all(entry.mechanism in _VOTES for entry in entries)
    rates = (
        round_up(
            100
            * accountants.true_positive_rate(events, false_positive_rate=false),
            digits=3,
        )
        for false in _FALSE_POSITIVE_RATES
    )
    few, more = (f"{100 * false:g}" for false in _FALSE_POSITIVE_RATES)
    text = _ATTACKS
    if is_of_persons:
        text = text.replace(" examples ", " persons ")
    return text.format(
        released="answers" if answers else "weights",
        false=few,
        true=next(rates),
        falser=more,
        truer=next(rates),
    )


def _covered(entries):
    """Paragraphs on what ε covers: weights, answers, or both."""
    answers = [entry.mechanism in _VOTES for entry in entries]
    if not all(answers) or not answers:
        yield _COVERED
    if any(answers):
        yield _COVERED_ANSWERS


def _mechanism(entry, is_trial=False):
    if entry.mechanism in _VOTES:
        text = (_VOTES[entry.mechanism] + _PARTS).format(
            steps=entry.steps,
            stddev=entry.noise_multiplier * entry.l2_norm_clip,
            examples=entry.examples,
        )
        return f"{entry.mechanism}: {text}"
    if entry.trial:
        shapes = {v: k for k, v in selection.DISTRIBUTIONS.items()}
        shape = f"shape {entry.trials_shape:g}"
        return _SEARCH.format(
            mechanism=entry.mechanism,
            searches="the best trial"
            if entry.steps == 1
            else f"the best trial of each of {entry.steps} searches",
            mean=entry.mean_trials,
            distribution=shapes.get(entry.trials_shape, shape),
            trial=" ".join(
                _mechanism(part, is_trial=True) for part in entry.trial
            ),
        )
    if entry.is_validation:
        return _VALIDATION.format(
            mechanism=entry.mechanism,
            releases=entry.steps,
            multiplier=entry.noise_multiplier,
            bound=entry.l2_norm_clip,
            rows=f"{entry.examples} persons, each by the means over its rows"
            if entry.unit == "person"
            else f"{entry.examples} rows",
        )
    # Those of trials differ perhaps, and are secret.
    clip = f"clipping norm C = {entry.l2_norm_clip:g} and " * (not is_trial)
    text = (
        f"{entry.mechanism}: {entry.steps} steps with noise multiplier σ = "
        f"{entry.noise_multiplier:.6g}{_found(entry)}, {clip}"
        f"expected batch size {entry.batch_size}. "
    )
    if entry.bands > 1:
        return text + _CYCLIC.format(
            examples=entry.examples,
            unit=entry.unit,
            bands=entry.bands,
            rate=entry.bands * entry.sampling_rate,
            others=entry.bands - 1,
            cycles=-(-entry.steps // entry.bands),
        )
    if entry.sampler == "poisson":
        sampling = _PERSONS if entry.unit == "person" else _POISSON
        if entry.largest_rate is not None:
            sampling = _RATES
        return text + sampling.format(
            examples=entry.examples, rate=entry.sampling_rate
        )
    if entry.sampler == "allocation":
        return text + _ALLOCATION.format(
            steps=entry.epoch_steps,
            examples=entry.examples,
            unit=entry.unit,
            epochs=entry.epochs,
        )
    if entry.each_example_once_per_epoch:
        return text + _BATCHES + _ONCE.format(epochs=entry.epochs)
    return text + _BATCHES


def _found(entry):
    return f" (found for {entry.target})" if entry.target else ""


def _public(entries):
    notes = dict.fromkeys(note for entry in entries for note in entry.notes)
    return f"Taken as public: {', '.join(['the initial weights', *notes])}."


def _wrap(text):
    return textwrap.fill(
        text, _WIDTH, break_long_words=False, break_on_hyphens=False
    )
