"""The base of private optimizers: arguments, refusals, and one release."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub import optimizers
from tf_dpsub.primitives import noise

ARGUMENTS = {"noise_multiplier": 1.5, "l2_norm_clip": 0.5, "batch_size": 10}


def dpsgd(inner="sgd", **arguments):
    return optimizers.DPSGD(inner, **{**ARGUMENTS, **arguments})


def zeros(*shape):
    return keras.Variable(np.zeros(shape, "float32"), name="kernel")


def built(*variables, **arguments):
    """An optimizer whose inner one subtracts the gradient."""
    optimizer = dpsgd(keras.optimizers.SGD(1.0), **arguments)
    optimizer.build(list(variables))
    return optimizer


def take_step(optimizer, sums, regularization=None):
    optimizer.apply_noisy(optimizer.noisy(sums), regularization)


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("noise_multiplier", -0.1),
            ("noise_multiplier", math.nan),
            ("noise_multiplier", math.inf),
            ("l2_norm_clip", 0.0),
            ("l2_norm_clip", -1.0),
            ("l2_norm_clip", math.nan),
            ("batch_size", 0),
            ("batch_size", -4),
            ("batch_size", 2.5),
            ("batch_size", True),
            ("batch_size", None),
            ("microbatch_size", 0),
            ("microbatch_size", 1.5),
            ("per_example", "ghost"),
            ("per_example", None),
            ("seed", -1),
            ("seed", 0.5),
        ],
    )
    def test_out_of_range(self, name, value):
        with pytest.raises(ValueError, match=f"Expected .*{name}.* got "):
            dpsgd(**{name: value})

    def test_noise_without_a_clip(self):
        with pytest.raises(ValueError, match="finite l2_norm_clip.*without a"):
            dpsgd(l2_norm_clip=math.inf)
        dpsgd(l2_norm_clip=math.inf, noise_multiplier=0)

    @pytest.mark.parametrize("name", ARGUMENTS)
    def test_privacy_must_be_stated(self, name):
        others = {k: v for k, v in ARGUMENTS.items() if k != name}
        with pytest.raises((TypeError, ValueError), match=name):
            optimizers.DPSGD("sgd", **others)

    @pytest.mark.parametrize("name", ["noise_multiplier", "l2_norm_clip"])
    def test_privacy_must_be_a_number(self, name):
        with pytest.raises(ValueError, match=f"{name} to be a number.*'1'"):
            dpsgd(**{name: "1"})

    @pytest.mark.parametrize(
        "name, told",
        [
            ("learning_rate", "give it to the inner optimizer"),
            ("num_microbatches", "each example is clipped alone"),
            ("microbatchsize", "Did you mean 'microbatch_size'?"),
            ("xyz", "It has .*batch_size, .*, seed"),
        ],
    )
    @pytest.mark.parametrize("kind", [optimizers.DPSGD, optimizers.RGP])
    def test_unknown(self, kind, name, told):
        expected = f"{kind.__name__} has no argument '{name}'.*{told}"
        with pytest.raises(TypeError, match=expected):
            kind("sgd", **ARGUMENTS, **{name: 1})

    def test_numbers_of_numpy(self):
        optimizer = dpsgd(
            noise_multiplier=np.float32(2),
            batch_size=np.int64(3),
            microbatch_size=np.int32(2),
            seed=np.int64(1),
        )
        assert optimizer.batch_size == 3
        json.dumps(keras.saving.serialize_keras_object(optimizer))

    @pytest.mark.parametrize(
        "name", ["noise_multiplier", "l2_norm_clip", "batch_size", "seed"]
    )
    def test_what_the_ledger_records_is_frozen(self, name):
        optimizer = dpsgd()
        before = getattr(optimizer, name)
        with pytest.raises(AttributeError):
            setattr(optimizer, name, 1)
        assert getattr(optimizer, name) == before

    def test_effective_noise_multiplier(self):
        assert dpsgd().effective_noise_multiplier == 1.5
        with pytest.raises(AttributeError):
            dpsgd().effective_noise_multiplier = 3.0


class TestInnerOptimizer:
    def test_by_name(self):
        inner = dpsgd("adam").inner_optimizer
        assert type(inner) is keras.optimizers.Adam

    def test_class(self):
        with pytest.raises(ValueError, match=r"the class Adam. Call it: Adam"):
            dpsgd(keras.optimizers.Adam)

    def test_private_one(self):
        with pytest.raises(
            ValueError, match="plain inner optimizer, got DPSGD.*inner_optim"
        ):
            dpsgd(dpsgd())

    @pytest.mark.parametrize(
        "inner",
        [
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            lambda: keras.optimizers.SGD(0.1, loss_scale_factor=2.0),
        ],
    )
    def test_loss_scaling(self, inner):
        with pytest.raises(
            ValueError, match="without loss scaling.*against the clip.*Pass the"
        ):
            dpsgd(inner())

    def test_learning_rate(self):
        optimizer = dpsgd(keras.optimizers.SGD(0.25))
        assert float(optimizer.learning_rate) == 0.25
        optimizer.learning_rate = 0.5
        assert float(optimizer.inner_optimizer.learning_rate) == 0.5

    def test_learning_rate_of_a_schedule(self):
        schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
        kernel = zeros(2)
        optimizer = dpsgd(keras.optimizers.SGD(schedule), noise_multiplier=0.0)
        optimizer.build([kernel])
        for expected in (1.0, 0.5, 0.25):
            assert float(optimizer.learning_rate) == expected
            take_step(optimizer, [tf.fill([2], 10.0)])
        np.testing.assert_allclose(kernel, [-1.75, -1.75], rtol=1e-6)
        assert int(optimizer.iterations) == 3

    def test_moving_average_is_taken_over_at_the_end(self):
        kernel = zeros(1)
        optimizer = dpsgd(
            keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5),
            noise_multiplier=0.0,
        )
        optimizer.build([kernel])
        for _ in range(2):
            take_step(optimizer, [tf.constant([10.0])])
        np.testing.assert_allclose(kernel, [-2.0])
        optimizer.finalize_variable_values([kernel])
        assert -2.0 < kernel.numpy()[0] < 0.0


class TestSerialisation:
    def test_round_trip(self):
        optimizer = dpsgd(
            keras.optimizers.AdamW(
                keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9),
                weight_decay=0.01,
            ),
            microbatch_size=5,
            per_example="graph",
            seed=7,
            secure_noise=True,
            name="mine",
        )
        config = json.loads(
            json.dumps(keras.saving.serialize_keras_object(optimizer))
        )
        again = keras.saving.deserialize_keras_object(config)
        assert type(again) is optimizers.DPSGD
        assert again.get_config() == optimizer.get_config()
        for name, value in {
            **ARGUMENTS,
            "microbatch_size": 5,
            "per_example": "graph",
            "seed": 7,
            "secure_noise": True,
            "name": "mine",
        }.items():
            assert getattr(again, name) == value

    def test_infinite_clip(self):
        optimizer = dpsgd(noise_multiplier=0, l2_norm_clip=math.inf)
        again = optimizers.DPSGD.from_config(optimizer.get_config())
        assert again.l2_norm_clip == math.inf

    def test_config_is_checked(self):
        config = {**dpsgd().get_config(), "noise_multiplier": -1.0}
        with pytest.raises(ValueError, match="noise_multiplier >= 0"):
            optimizers.DPSGD.from_config(config)

    @pytest.mark.parametrize("earlier", [False, True])
    def test_state_is_that_of_the_inner_optimizer(self, earlier):
        kernel = zeros(3)
        optimizer = dpsgd(keras.optimizers.Adam(), noise_multiplier=0.0)
        optimizer.build([kernel])
        inner = optimizer.inner_optimizer.variables
        assert {id(v) for v in inner} <= {id(v) for v in optimizer.variables}
        take_step(optimizer, [tf.ones([3])])
        saved, of_inner = {}, {}
        optimizer.save_own_variables(saved)
        optimizer.inner_optimizer.save_own_variables(of_inner)
        # Once, not twice.
        assert len(saved) + len(of_inner) == len(optimizer.variables)
        if earlier:
            # Earlier versions numbered the variables.
            saved = {
                str(i): v.numpy() for i, v in enumerate(optimizer.variables)
            }
        again = dpsgd(keras.optimizers.Adam(), noise_multiplier=0.0)
        again.build([kernel])
        again.load_own_variables(saved)
        again.inner_optimizer.load_own_variables(of_inner)
        for own, other in zip(
            again.variables, optimizer.variables, strict=True
        ):
            np.testing.assert_array_equal(own, other)
        assert int(again.iterations) == 1


class TestOutsideOfAPrivateModel:
    @pytest.mark.parametrize(
        "use",
        [
            lambda o, v: o.apply([tf.ones([2])], [v]),
            lambda o, v: o.apply([tf.ones([2])]),
            lambda o, v: o.apply_gradients([(tf.ones([2]), v)]),
            lambda o, v: o.stateless_apply(
                o.variables, [tf.ones([2])], [v.value]
            ),
            lambda o, v: o.scale_loss(tf.constant(1.0)),
        ],
        ids=[
            "apply",
            "apply_to_built",
            "apply_gradients",
            "stateless_apply",
            "scale_loss",
        ],
    )
    def test_raises(self, use):
        kernel = zeros(2)
        optimizer = built(kernel)
        with pytest.raises(
            RuntimeError, match="outside of a private model.*make_private"
        ):
            use(optimizer, kernel)
        np.testing.assert_array_equal(kernel, [0, 0])
        assert int(optimizer.iterations) == 0


class TestRelease:
    def test_noise_has_the_promised_variance(self):
        """(sigma C / B)^2 in every weight, around the mean of the sums."""
        kernel, bias = zeros(300, 300), zeros(80_000)
        optimizer = built(kernel, bias, seed=0)
        take_step(optimizer, [tf.fill([300, 300], 20.0), tf.zeros([80_000])])
        stddev = 1.5 * 0.5 / 10
        for variable, mean in ((kernel, -2.0), (bias, 0.0)):
            z = (np.ravel(variable.numpy()) - mean) / stddev
            assert abs(z.mean()) < 5 / np.sqrt(z.size)
            assert abs(np.square(z).mean() - 1) < 5 * np.sqrt(2 / z.size)

    def test_without_noise_is_exact(self):
        kernel = zeros(3)
        take_step(
            built(kernel, noise_multiplier=0), [tf.constant([10.0, 2, 0])]
        )
        np.testing.assert_array_equal(
            kernel, -np.float32([10.0, 2.0, 0.0]) / np.float32(10)
        )

    def test_without_noise_draws_none(self, monkeypatch):
        """Zero times an infinite clip would be NaN."""
        monkeypatch.setattr(noise, "noisy", None)
        kernel = zeros(2)
        optimizer = built(kernel, noise_multiplier=0, l2_norm_clip=math.inf)
        take_step(optimizer, [tf.fill([2], 10.0)])
        np.testing.assert_array_equal(kernel, [-1, -1])

    def test_regularizers_enter_after_the_noise(self):
        """They are neither divided by the batch size nor noisy."""
        kernel, bias = zeros(2), zeros(2)
        optimizer = built(kernel, bias, noise_multiplier=0)
        take_step(
            optimizer,
            [tf.fill([2], 10.0), tf.fill([2], 10.0)],
            [tf.fill([2], 7.0), None],
        )
        np.testing.assert_array_equal(kernel, [-8, -8])
        np.testing.assert_array_equal(bias, [-1, -1])

    def test_every_step_has_noise_of_its_own(self):
        kernel = zeros(50)
        optimizer = built(kernel, seed=0)
        step = tf.function(lambda: take_step(optimizer, [tf.zeros([50])]))
        moved, before = [], kernel.numpy()
        for _ in range(3):
            step()
            moved.append(kernel.numpy() - before)
            before = kernel.numpy()
        assert np.unique(np.round(moved, 6)).size > 140

    def test_much_noise_does_not_wait_in_memory_for_the_sums(self, monkeypatch):
        """Each piece of it is drawn where it is added."""
        monkeypatch.setattr(noise, "COMPILED", 1000)
        monkeypatch.setattr(noise, "PIECE", 500)
        monkeypatch.setattr(noise, "_MANY_PIECES", 2)
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
        optimizer = built(zeros(1000))
        step = tf.function(lambda s: take_step(optimizer, [s]))
        graph = step.get_concrete_function(tf.TensorSpec([1000])).graph
        after = {graph.inputs[0].op}
        loops = []
        for op in graph.get_operations():
            if after & {*(i.op for i in op.inputs), *op.control_inputs}:
                after.add(op)
            if "While" in op.type:
                loops.append(op in after)
            assert not op.type.startswith("StatelessRandomUniformFullInt") or (
                op.outputs[0].shape.num_elements() < 10
            )
        assert loops == [True]

    def test_secure_noise(self):
        kernel = zeros(3000)
        optimizer = built(kernel, secure_noise=True)
        tf.function(lambda: take_step(optimizer, [tf.zeros([3000])]))()
        variance = np.square(kernel.numpy() * 10 / 0.75).mean()
        assert abs(variance - 1) < 6 * np.sqrt(2 / 3000)

    def test_gradients_have_the_type_of_the_variable(self):
        kernel = keras.Variable(np.zeros(2), dtype="bfloat16")
        take_step(built(kernel, noise_multiplier=0), [tf.fill([2], 10.0)])
        np.testing.assert_array_equal(
            tf.cast(kernel.value, "float32"), [-1, -1]
        )

    def test_build_again_keeps_the_key(self):
        kernel = zeros(2)
        optimizer = built(kernel)
        key = optimizer._noise_key
        optimizer.build([kernel])
        assert optimizer._noise_key is key


def test_mechanism_must_be_complete():
    class Forgetful(optimizers.DPSGD):
        clipped_sums = optimizers.PrivateOptimizer.clipped_sums

    with pytest.raises(TypeError, match="abstract.*clipped_sums"):
        Forgetful("sgd", **ARGUMENTS)
    with pytest.raises(TypeError, match="abstract"):
        optimizers.PrivateOptimizer("sgd", **ARGUMENTS)
