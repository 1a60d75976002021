import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import model_zoo
from tests.gradients.taint import assert_untouched
from tf_dpsub import gradients
from tf_dpsub.gradients import vectorized

ZOO = model_zoo.ZOO
PROVED = [name for name, entry in ZOO.items() if entry.proved]
REFUSED = [name for name, entry in ZOO.items() if not entry.proved]
# pytest groups by position: those of the shorter list come first.
NAMES = PROVED + REFUSED


def each(names):
    """Runs all tests of one model together: they share its traced step.

    It is kept no longer. Looking for garbage among the graphs of all models
    would take longer than some of their tests.
    """
    return pytest.mark.parametrize("name", names, scope="module")


@functools.lru_cache(maxsize=1)
def truth(name):
    """A problem of the zoo, and its rows, one example at a time."""
    problem = ZOO[name].build()
    return problem, model_zoo.rows_alone(problem)


@functools.lru_cache(maxsize=1)
def traced_graph(name):
    return model_zoo.traced(truth(name)[0])


@functools.lru_cache(maxsize=1)
def measured_by_graph(name):
    problem = truth(name)[0]
    return traced_graph(name)(problem.inputs, model_zoo.coefficients(problem))


def assert_truth(name, measured):
    problem, rows = truth(name)
    tolerance = ZOO[name].tolerance
    c = model_zoo.coefficients(problem)
    assert measured.valid.all()
    assert model_zoo.relative_error(measured.rows, rows) < tolerance
    assert (
        model_zoo.relative_error(
            measured.weighted_sum, model_zoo.weighted(rows, c)
        )
        < tolerance
    )
    np.testing.assert_allclose(
        np.sqrt(measured.sq_norms), model_zoo.norms(rows), rtol=tolerance
    )


@each(PROVED)
def test_graph_equals_truth(name):
    assert_truth(name, measured_by_graph(name))


@each(PROVED)
def test_norms_and_sums_are_of_the_rows(name):
    """Norm and sum are computed from the same numbers in any precision."""
    problem = truth(name)[0]
    measured = measured_by_graph(name)
    for v, rows, sq_norms, total in zip(
        problem.variables,
        measured.rows,
        measured.sq_norms_of,
        measured.weighted_sum,
        strict=True,
    ):
        assert rows.dtype == sq_norms.dtype == np.float32
        assert total.dtype in (np.float32, np.float64)
        assert rows.shape == (problem.batch, *v.shape)
        assert total.shape == tuple(v.shape)
    # One norm for each variable: scaled by all, since some of them vanish.
    scale = np.sqrt(measured.sq_norms)
    for rows, sq_norms in zip(measured.rows, measured.sq_norms_of):
        np.testing.assert_allclose(
            np.sqrt(sq_norms) / scale,
            model_zoo.norms([rows]) / scale,
            rtol=1e-5,
            atol=1e-7,
        )
    np.testing.assert_allclose(
        sum(measured.sq_norms_of), measured.sq_norms, rtol=1e-5
    )
    c = model_zoo.coefficients(problem)
    assert (
        model_zoo.relative_error(
            measured.weighted_sum, model_zoo.weighted(measured.rows, c)
        )
        < 1e-5
    )


@each(PROVED)
def test_inner_products_are_of_the_rows(name):
    """This includes products computed from factors, without rows."""
    measured = measured_by_graph(name)
    flat = [rows.reshape(len(rows), -1) for rows in measured.rows]
    products = sum(rows.astype("float64") @ rows.T for rows in flat)
    scale = np.sqrt(np.diag(products))
    np.testing.assert_allclose(
        measured.gram / np.outer(scale, scale),
        products / np.outer(scale, scale),
        atol=1e-5,
    )


@each(PROVED)
def test_bounds_hold_and_are_close(name):
    problem, rows = truth(name)
    measured = measured_by_graph(name)
    bounds = measured.sq_norm_bounds.astype("float64")
    assert (bounds >= measured.sq_norms).all()
    assert (bounds >= model_zoo.norms(measured.rows) ** 2).all()
    assert (bounds <= 1.01 * measured.sq_norms + 1e-12).all()
    if ZOO[name].tolerance == 1e-5:
        assert (bounds >= model_zoo.norms(rows) ** 2).all()


@each(PROVED)
def test_bounds_cover_what_enters_a_sum(name):
    """One example moves a sum by no more than its bound, rounding included."""
    problem = truth(name)[0]
    step = traced_graph(name)
    for i, only_i in enumerate(np.eye(problem.batch, dtype="float32")):
        measured = step(problem.inputs, only_i)
        moved = sum(
            np.sum(np.square(t, dtype="float64")) for t in measured.weighted_sum
        )
        assert 0.0 < moved <= measured.sq_norm_bounds[i]


@each(PROVED)
def test_other_examples_do_not_move_a_row(name):
    assert_untouched(truth(name)[0], traced_graph(name))


@each(REFUSED)
def test_graph_refuses(name):
    with pytest.raises(gradients.Unproven):
        measured_by_graph(name)


@each(NAMES)
def test_fallback_equals_truth(name):
    problem = truth(name)[0]
    # As in a step of a model, whose choice was made before.
    measured = model_zoo.measure(
        problem, ZOO[name].fallback, is_vectorizable=True
    )
    assert_truth(name, measured)
    assert (measured.sq_norm_bounds >= measured.sq_norms).all()


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "paper_cnn",
        "einsum_dense_over_time",
        "multi_head_attention_causal",
    ],
)
def test_fallback_is_chosen(name):
    problem = truth(name)[0]
    assert vectorized.vectorizes(
        problem.loss_fn, problem.inputs, problem.variables
    ) == (ZOO[name].fallback == "vectorized_map")


@pytest.mark.parametrize(
    "implementation", ["graph", "vectorized_map", "map_fn"]
)
def test_aux_is_passed_on(implementation):
    problem = truth("mlp")[0]

    @tf.function(autograph=False)
    def step(inputs):
        return gradients.per_example_gradients(
            problem.loss_fn,
            inputs,
            problem.variables,
            implementation=implementation,
        )[1]

    expected = problem.loss_fn(problem.inputs)[1]
    aux = step(problem.inputs)
    assert aux.keys() == expected.keys()
    np.testing.assert_allclose(aux["logits"], expected["logits"], rtol=1e-5)


@pytest.mark.parametrize(
    "implementation", ["graph", "vectorized_map", "map_fn"]
)
def test_norms_of_some_variables(implementation):
    problem, rows = truth("mlp")

    @tf.function(autograph=False)
    def step(inputs):
        matrix, _ = gradients.per_example_gradients(
            problem.loss_fn,
            inputs,
            problem.variables,
            implementation=implementation,
        )
        some = [problem.variables[2], problem.variables[0]]
        return matrix.sq_norms(some)

    np.testing.assert_allclose(
        np.sqrt(step(problem.inputs)),
        model_zoo.norms([rows[2], rows[0]]),
        rtol=1e-5,
    )


@pytest.mark.parametrize("name", ["mlp", "paper_cnn", "gpt2_tied", "lstm"])
def test_microbatches_in_a_loop(name):
    """A step sums its microbatches in a `tf.while_loop`."""
    problem, rows = truth(name)
    inputs = tf.nest.map_structure(
        lambda t: tf.stack([t, tf.reverse(t, [0])]), problem.inputs
    )
    c = model_zoo.coefficients(problem)

    @tf.function(autograph=False)
    def step(inputs, passes):
        def body(i, norms, sums):
            matrix, _ = gradients.per_example_gradients(
                problem.loss_fn,
                tf.nest.map_structure(lambda t: t[i], inputs),
                problem.variables,
            )
            more = matrix.weighted_sum(tf.constant(c))
            norms = norms + matrix.sq_norms()
            return i + 1, norms, [s + m for s, m in zip(sums, more)]

        zeros = [tf.zeros(v.shape) for v in problem.variables]
        return tf.while_loop(
            lambda i, *_: i < passes,
            body,
            (0, tf.zeros(problem.batch), zeros),
        )[1:]

    sq_norms, sums = step(inputs, tf.constant(2))
    squares = model_zoo.norms(rows) ** 2
    np.testing.assert_allclose(sq_norms, squares + squares[::-1], rtol=2e-5)
    expected = model_zoo.weighted(rows, c + c[::-1])
    sums = [s.numpy() for s in sums]
    assert model_zoo.relative_error(sums, expected) < 1e-5


@pytest.mark.parametrize(
    "name", ["mlp", "dense_on_series", "embedding", "recurrent_masked"]
)
def test_compiled_by_xla(name):
    problem, rows = truth(name)

    @tf.function(jit_compile=True, autograph=False)
    def step(inputs, c):
        matrix, _ = gradients.per_example_gradients(
            problem.loss_fn, inputs, problem.variables
        )
        return matrix.sq_norms(), matrix.weighted_sum(c)

    c = model_zoo.coefficients(problem)
    sq_norms, sums = step(problem.inputs, tf.constant(c))
    np.testing.assert_allclose(
        np.sqrt(sq_norms), model_zoo.norms(rows), rtol=1e-5
    )
    sums = [s.numpy() for s in sums]
    expected = model_zoo.weighted(rows, c)
    assert model_zoo.relative_error(sums, expected) < 1e-5
