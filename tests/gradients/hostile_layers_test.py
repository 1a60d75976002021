import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import hostile_layers, model_zoo
from tests.gradients.taint import assert_untouched
from tf_dpsub import gradients

CASES = hostile_layers.CASES
TOLERANCE = 1e-5

# Errors that the graph implementation may raise, by expectation.
ERRORS = {
    hostile_layers.PROVED: (),
    hostile_layers.EITHER: (gradients.Unproven,),
    hostile_layers.REFUSED: (gradients.Unproven,),
    hostile_layers.MIXES: (gradients.Unproven,),
    hostile_layers.STATE: (gradients.UpdatesState,),
    hostile_layers.RAISES: (gradients.Unproven, gradients.UpdatesState),
}
MAY_RETURN = hostile_layers.PROVED, hostile_layers.EITHER
# pytest groups by position: those of the shorter list come first.
NAMES = sorted(
    CASES, key=lambda name: CASES[name].expected != hostile_layers.PROVED
)


def names(*expected):
    return [n for n, case in CASES.items() if case.expected in expected]


def each(names):
    """Runs all tests of one case together: they share its traced step."""
    return pytest.mark.parametrize("name", names, scope="module")


@functools.cache
def traced(name):
    """Returns a problem, and its step."""
    problem = CASES[name].problem()
    return problem, model_zoo.traced(problem)


@functools.cache
def outcome(name):
    """Returns the problem, and the measures or the error of the graph."""
    problem, step = traced(name)
    try:
        return problem, step(problem.inputs, model_zoo.coefficients(problem))
    except (gradients.Unproven, gradients.UpdatesState) as error:
        return problem, error


def assert_truth(problem, measured, rows):
    c = model_zoo.coefficients(problem)
    assert measured.valid.all()
    assert model_zoo.relative_error(measured.rows, rows) < TOLERANCE
    np.testing.assert_allclose(
        np.sqrt(measured.sq_norms), model_zoo.norms(rows), rtol=TOLERANCE
    )
    assert (
        model_zoo.relative_error(
            measured.weighted_sum, model_zoo.weighted(rows, c)
        )
        < TOLERANCE
    )


@each(NAMES)
def test_never_silently_wrong(name):
    problem, result = outcome(name)
    if isinstance(result, model_zoo.Measured):
        assert_truth(problem, result, model_zoo.rows_alone(problem))
        assert_truth(problem, result, model_zoo.rows_in_batch(problem))


@each(NAMES)
def test_outcome_is_the_expected_one(name):
    result = outcome(name)[1]
    expected = CASES[name].expected
    if isinstance(result, model_zoo.Measured):
        assert expected in MAY_RETURN
    else:
        assert isinstance(result, ERRORS[expected]), result


@each(names(hostile_layers.PROVED))
def test_other_examples_do_not_move_a_row(name):
    assert_untouched(*traced(name))


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in names(hostile_layers.MIXES)
        if not CASES[n].on_losses and not n.startswith("gradient_")
    ],
)
def test_mixing_is_found_without_its_gradient(name):
    """Statistics under a stop_gradient show in the forward pass alone."""
    problem = CASES[name].problem(detached=True)

    @tf.function(autograph=False)
    def step(inputs):
        return gradients.per_example_gradients(
            problem.loss_fn, inputs, problem.variables
        )[0].sq_norms()

    with pytest.raises(gradients.Unproven):
        step.get_concrete_function(problem.inputs)


def mixing_error(problem):
    """Relative error of rows in a batch, against each example alone."""
    alone = model_zoo.rows_alone(problem)
    c = model_zoo.coefficients(problem)
    return max(
        model_zoo.relative_error(model_zoo.rows_in_batch(problem), alone),
        model_zoo.relative_error(
            model_zoo.gradient_of_weighted_loss(problem, c),
            model_zoo.weighted(alone, c),
        ),
    )


@pytest.mark.parametrize(
    "name",
    [n for n in names(hostile_layers.MIXES) if n != "faint_batch_mean"],
)
def test_mixing_case_mixes(name):
    """A case that mixed nothing would excuse a proof that is blind to it."""
    problem = traced(name)[0]
    try:
        error = mixing_error(problem)
    except (tf.errors.InvalidArgumentError, ValueError, ZeroDivisionError):
        return  # one example alone has no meaning in such a layer
    assert error > 1e-3


def test_faint_mixing_passes_every_comparison():
    """This is why the proof may not rest on numbers."""
    assert mixing_error(CASES["faint_batch_mean"].problem()) < TOLERANCE


@pytest.mark.parametrize("implementation", ["vectorized_map", "map_fn"])
@pytest.mark.parametrize(
    "name",
    [
        "faint_batch_mean",
        "batch_mean",
        "batch_softmax",
        "batch_cumulative_sum",
        "pair_attention",
        "mean_through_python",
        "time_major_merged",
        "segments_by_ids",
        "custom_gradient_on_kernel",
        "gradient_scaled_by_its_norm",
        "losses_centred",
        "losses_balanced_by_class",
        "kernel_without_gradient",
    ],
)
def test_fallback_sees_one_example(name, implementation):
    """One example at a time is right whatever a layer does in a batch."""
    problem = traced(name)[0]
    measured = model_zoo.measure(problem, implementation)
    assert_truth(problem, measured, model_zoo.rows_alone(problem))


@pytest.mark.parametrize("implementation", ["vectorized_map", "map_fn"])
@pytest.mark.parametrize(
    "name",
    [
        "state_averages_batch",
        "state_untracked",
        "state_of_metric",
        "state_in_branch",
        "state_in_function",
        "state_counts_when_batch_says",
        "state_in_backward_pass",
        "state_moved_by_optimizer",
        "state_scattered",
        "state_in_hash_table",
        "state_in_queue",
        "state_of_generator_skipped",
        "batch_normalization",
    ],
)
def test_fallback_refuses_states(name, implementation):
    """Even one at a time, examples would meet in the state."""
    problem = CASES[name].problem()
    with pytest.raises(ERRORS[CASES[name].expected]):
        model_zoo.measure(problem, implementation)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("batch_mean", "Mean"),
        ("batch_softmax", "Softmax"),
        ("batch_cumulative_sum", "Cumsum"),
        ("batch_roll", "Roll"),
        ("gram_product", "MatMul"),
        ("losses_centred", "Mean"),
        ("gradient_centred", "Mean"),
        ("numpy_function", "PyFunc"),
        ("dynamic_shape", "Where"),
    ],
)
def test_refusal_names_the_operation(name, operation):
    assert operation in str(outcome(name)[1])


@pytest.mark.parametrize(
    "name",
    [
        "batch_mean",
        "batch_cumulative_sum",
        "gram_product",
        "losses_centred",
        "gradient_centred",
    ],
)
def test_plain_mixing_is_told_apart(name):
    """A user must learn that the model mixes, not that a rule is missing."""
    assert isinstance(outcome(name)[1], gradients.MixesExamples)


@pytest.mark.parametrize("name", names(hostile_layers.REFUSED))
def test_missing_rule_is_not_called_mixing(name):
    assert not isinstance(outcome(name)[1], gradients.MixesExamples)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("batch_mean", gradients.MixesExamples),
        ("state_averages_batch", gradients.UpdatesState),
    ],
)
def test_error_keeps_its_type_through_autograph(name, error):
    problem = CASES[name].problem()

    @tf.function
    def step(inputs):
        rows, _ = gradients.per_example_gradients(
            problem.loss_fn, inputs, problem.variables
        )
        return rows.sq_norms()

    with pytest.raises(error):
        step(problem.inputs)


def test_refuses_a_batch_of_unknown_size():
    problem = CASES["kernel_plus_zero"].problem()
    signature = [
        tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in problem.inputs
    ]

    @tf.function(input_signature=signature)
    def step(x, y):
        rows, _ = gradients.per_example_gradients(
            problem.loss_fn, (x, y), problem.variables
        )
        return rows.sq_norms()

    with pytest.raises((gradients.Unproven, ValueError)):
        step(*problem.inputs)


@pytest.mark.parametrize("inside_loop", [False, True])
@pytest.mark.parametrize("axis", [None, 1])
def test_tensor_that_is_no_input_is_not_public(axis, inside_loop):
    """Data that reaches the loss by closure may be the data of any example."""
    problem = CASES["kernel_plus_zero"].problem()

    def sq_norms(inputs, hidden):
        def loss_fn(inputs):
            losses, aux = problem.loss_fn(inputs)
            return losses * tf.reduce_mean(hidden, axis), aux

        rows, _ = gradients.per_example_gradients(
            loss_fn, inputs, problem.variables
        )
        return rows.sq_norms()

    @tf.function(autograph=False)
    def step(inputs, hidden):
        if not inside_loop:
            return sq_norms(inputs, hidden)
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, total: (i + 1, total + sq_norms(inputs, hidden)),
            (0, tf.zeros(hostile_layers.SIZE)),
        )[1]

    with pytest.raises(gradients.Unproven):
        step(problem.inputs, problem.inputs[0])


@pytest.mark.parametrize(
    "reduce",
    [
        tf.reduce_mean,
        lambda losses: losses[:, None],
        lambda losses: tf.stack([losses] * hostile_layers.SIZE),
    ],
    ids=["scalar", "column", "matrix"],
)
def test_refuses_losses_that_are_no_vector(reduce):
    problem = CASES["kernel_plus_zero"].problem()

    @tf.function(autograph=False)
    def step(inputs):
        rows, _ = gradients.per_example_gradients(
            lambda inputs: (reduce(problem.loss_fn(inputs)[0]), None),
            inputs,
            problem.variables,
        )
        return rows.sq_norms()

    with pytest.raises((gradients.Unproven, ValueError)):
        step(problem.inputs)
