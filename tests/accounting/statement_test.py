import math

import pytest

from tests.accounting import entries
from tests.accounting.entries import ALLOCATION, BATCHES, ONCE, changed
from tf_dpsub.accounting import PrivacyLedger, statement
from tf_dpsub.accounting.statement import round_up

DELTA = 1e-5
# A clip that stands nowhere else in a statement.
POISSON = changed(entries.POISSON, l2_norm_clip=0.75)


def stated(*charges, delta=DELTA, **arguments):
    """The statement as one line."""
    ledger = PrivacyLedger()
    for charge in charges:
        ledger.charge(*charge)
    text = statement(ledger, delta=delta, **arguments)
    assert max(map(len, text.splitlines())) <= 80
    assert text.endswith("\n")
    return " ".join(text.split())


def test_poisson_run():
    text = stated((POISSON, 6000, 15), model_name="cnn")
    for part in (
        "Privacy statement of 'cnn'",
        "(ε = 0.6402, δ = 1e-05)-differentially private, with Poisson "
        "sampling, by PLD accounting.",
        "ε RDP PLD with Poisson sampling 0.7243 0.6402 "
        "without amplification by sampling 2065 2029",
        "DPSGD: 6000 steps with noise multiplier σ = 1.3, clipping norm C = "
        "0.75 and expected batch size 150.",
        "each of the 60000 examples independently with probability q = 0.0025",
        "of adding or removing one example",
        "since the model was made private",
        "Earlier training of its weights, and other models trained on the same "
        "data, are not counted.",
        "Taken as public: the initial weights.",
    ):
        assert part in text
    assert "WARNING" not in text
    assert "NOT PRIVATE" not in text


def test_run_with_each_example_at_a_random_step_of_an_epoch():
    text = stated((changed(ALLOCATION, noise_multiplier=4.0), 790, 2))
    for part in (
        "private, with each example at one random step of an epoch, by PLD",
        "in every epoch of 400 steps each of the 60000 examples was drawn at "
        "exactly one of them, chosen uniformly and independently of all "
        "others; 2 epochs were begun, and each of them counts whole.",
    ):
        assert part in text
    assert "adding or removing one example" not in text


@pytest.mark.parametrize("entry", [POISSON, BATCHES, ONCE])
def test_every_statement_says_what_is_promised(entry):
    text = stated((entry, 40, 1))
    for part in (
        "one row given to training",
        "several rows of one person are several units",
        "replaced in the other by an empty (zero-weight) one",
        "the sampling rate and the number of steps are public",
        "Covered: the weights at every step",
        "Not covered: training metrics, losses and logs",
        "which checkpoint to keep",
    ):
        assert part in text


def test_quotes_the_accountant_asked_for():
    text = stated((POISSON, 6000), accountant="rdp")
    assert "(ε = 0.7243, δ = 1e-05)" in text
    assert "by RDP accounting" in text


def test_says_what_an_attack_reaches_at_most():
    """Against the exact rates of one Gaussian, of μ = 1."""
    text = stated((changed(BATCHES, noise_multiplier=2.0), 4))
    assert (
        "An attack that takes 0.1 % of examples that did not for some that did "
        "finds at most 1.85 % of those that did; one that takes 1 %, at most "
        "9.24 %."
    ) in text


def test_says_where_the_grid_of_pld_would_not_fit():
    text = stated((POISSON, 2 * 10**6))
    assert "by RDP accounting" in text


def test_says_for_what_the_noise_was_found():
    found = changed(POISSON, target="(ε = 2, δ = 1e-05)")
    text = stated((found, 6000), (POISSON, 1))
    assert "σ = 1.3 (found for (ε = 2, δ = 1e-05)), clipping" in text
    assert "1 steps with noise multiplier σ = 1.3, clipping" in text


def test_user_batches():
    text = stated((BATCHES, 1200, 30))
    assert "private, without amplification by sampling, by PLD" in text
    assert "without amplification by sampling 10.24 9.536" in text
    assert "each example is at most once in a batch" in text
    assert "nor the membership nor the padded length of the batches" in text
    assert "at most once in an epoch" not in text
    assert "Poisson" not in text


def test_user_batches_with_each_example_once_per_epoch():
    text = stated((ONCE, 1200, 30))
    assert "(ε = 1.15, δ = 1e-05)" in text
    assert "with each example once in an epoch 1.255 1.15 " in text
    assert "without amplification by sampling 10.24 9.536" in text
    assert "at most once in an epoch; 30 epochs were begun" in text


def test_once_per_epoch_without_epochs_claims_nothing():
    text = stated((ONCE, 1200))
    assert "private, without amplification by sampling, by PLD" in text


def test_all_entries_are_described_and_composed():
    text = stated((POISSON, 6000), (ONCE, 1200, 30))
    assert "with the sampling described below" in text
    assert "DPSGD: 6000 steps" in text
    assert "DPSGD: 1200 steps" in text
    assert "(ε = 0.6402" not in text


def test_no_steps():
    text = stated(model_name="cnn")
    assert "No private step was taken. ε = 0." in text
    assert "RDP" not in text


@pytest.mark.parametrize("clip", [1.0, math.inf])
def test_no_noise(clip):
    plain = changed(POISSON, noise_multiplier=0.0, l2_norm_clip=clip)
    text = stated((POISSON, 7), (plain, 3))
    assert "NOT PRIVATE: 3 steps of DPSGD added no noise" in text
    assert ("clipped nothing" in text) == math.isinf(clip)
    assert "differentially private" not in text
    assert "RDP" not in text


@pytest.mark.parametrize("by", ["rdp", "pld"])
def test_private_state(by):
    """It has noise: the statement has to say why that is not enough."""
    private = changed(POISSON, mechanism="GEP", private_state=True)
    text = stated((POISSON, 7), (private, 3), accountant=by)
    assert (
        "NOT PRIVATE: 3 steps of GEP used a basis that was computed from "
        "private data. ε is infinite." in text
    )
    assert "added no noise" not in text
    assert "differentially private" not in text


@pytest.mark.parametrize(
    "delta, warned", [(1e-5, False), (1 / 60000, True), (0.1, True)]
)
def test_delta_against_the_number_of_examples(delta, warned):
    smaller = changed(POISSON, examples=1000)
    text = stated((POISSON, 3), (smaller, 2), delta=delta)
    assert ("is not below 1/n = 1.67e-05" in text) == warned


def test_delta_without_a_number_of_examples():
    assert "WARNING" not in stated((BATCHES, 3), delta=0.1)


@pytest.mark.parametrize(
    "change, warning",
    [
        ({"fixed_seed": True}, "for experiments only"),
        ({"private_selection": True}, "ε does not cover that selection"),
    ],
)
def test_warnings_of_any_entry(change, warning):
    text = stated((changed(POISSON, **change), 1), (POISSON, 5))
    assert "WARNING" in text
    assert warning in text


def test_uncovered_examples_are_named_once():
    first = changed(POISSON, uncovered=("the first", "the second"))
    second = changed(POISSON, uncovered=("the second",))
    text = stated((first, 1), (second, 1))
    assert "WARNING: ε does not cover the first; nor the second." in text
    assert "WARNING" not in stated((POISSON, 1))


def test_notes_are_taken_as_public():
    first = changed(POISSON, notes=("the state of 'a'", "the state of 'b'"))
    second = changed(POISSON, notes=("the state of 'b'",))
    assert (
        "Taken as public: the initial weights, the state of 'a', the state of "
        "'b'." in stated((first, 1), (second, 1))
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"delta": 0.0}, "0 < delta < 1, got 0.0"),
        ({"delta": DELTA, "accountant": "gdp"}, "accountant to be one of"),
    ],
)
@pytest.mark.parametrize("charges", [(), ((POISSON, 3),)])
def test_invalid(charges, arguments, message):
    with pytest.raises(ValueError, match=message):
        stated(*charges, **arguments)


@pytest.mark.parametrize(
    "value, digits, expected",
    [
        (0.72421, 4, "0.7243"),
        (0.7243, 4, "0.7243"),
        (0.72430000001, 4, "0.7244"),
        (9.9999, 4, "10"),
        (1234.01, 4, "1235"),
        (0.000123449, 3, "0.000124"),
        (0.0, 4, "0"),
        (math.inf, 4, "inf"),
    ],
)
def test_round_up(value, digits, expected):
    assert round_up(value, digits) == expected


@pytest.mark.parametrize(
    "value, expected",
    [
        (0.29, "0.29"),
        (1.0, "1.00"),
        (1.9900000001, "2.00"),
        (0.0, "0.00"),
        (1e-30, "0.01"),
        (1234.561, "1234.57"),
        (1e30, "1" + 30 * "0" + ".00"),
        (math.inf, "inf"),
    ],
)
def test_round_up_to_decimals(value, expected):
    assert round_up(value, decimals=2) == expected
