import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_dpsub.data import PoissonBatches
from tf_dpsub.data.person_batches import PersonBatches

# Of 1, 2, ... rows; the rows of a person stand nowhere side by side.
COUNTS = np.array([1, 2, 3, 5, 5, 5, 5, 5, 5, 5])
IDS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), COUNTS))
ROWS = len(IDS)
STEPS = 2000


def person_batches(rows_per_step, x=None, batch_size=4, **settings):
    """Batches whose inputs are numbers of rows, and whose targets persons."""
    if x is None:
        settings = {"y": IDS, **settings}
        x = np.arange(ROWS)
    rows = PoissonBatches(x, batch_size=batch_size, **settings)
    return PersonBatches(rows, IDS, rows_per_step)


@pytest.fixture(scope="module", name="drawn")
def _drawn():
    """Persons, rows and which of these are given, of each step."""
    batches = person_batches(3, seed=0)
    return [
        tuple(batch[name][batch["real"] == 1] for name in ("y", "x", "rows"))
        for batch in batches.dataset(views=3).take(STEPS).as_numpy_iterator()
    ]


class TestLaw:
    def test_sizes_count_persons(self):
        batches = person_batches(3)
        assert batches.examples == 10
        assert batches.sampling_rate == 0.4
        assert batches.steps_per_epoch == 3
        assert batches.unit == "person"

    def test_every_person_has_the_rate(self, drawn):
        counts = np.zeros(10)
        for persons, _, _ in drawn:
            assert len(set(persons[:, 0])) == len(persons)
            counts[persons[:, 0]] += 1
        statistic = np.sum((counts - STEPS * 0.4) ** 2) / (STEPS * 0.4 * 0.6)
        low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], 10)
        assert low < statistic < high

    def test_rows_are_those_of_the_person_and_differ(self, drawn):
        for persons, rows, given in drawn:
            np.testing.assert_array_equal(IDS[rows], persons)
            counts = COUNTS[persons[:, 0]]
            np.testing.assert_array_equal(given, np.arange(3) < counts[:, None])
            for own, is_given in zip(rows, given == 1):
                assert len(set(own[is_given])) == is_given.sum()

    def test_every_row_of_a_person_is_as_likely(self, drawn):
        """Of five rows three are taken, in each of about 800 draws."""
        counts = np.zeros(ROWS)
        for _, rows, given in drawn:
            np.add.at(counts, rows[given == 1], 1)
        of_persons = np.bincount(IDS, counts)
        for person in range(3, 10):
            own = counts[IDS == person]
            draws = of_persons[person] / 3
            # Six standard deviations of a binomial number.
            spread = 6 * np.sqrt(draws * 0.6 * 0.4)
            assert np.all(np.abs(own - 0.6 * draws) < spread)

    def test_places_are_drawn_anew(self, drawn):
        seen = {
            tuple(row)
            for persons, rows, _ in drawn
            for row in rows[persons[:, 0] == 5]
        }
        # Any of five rows is the first of three.
        assert len(seen) == 5


class TestParts:
    def test_one_row_has_no_axis(self):
        (batch,) = person_batches(1, batch_size=10).dataset().take(1)
        assert "rows" not in batch
        assert sorted(batch["y"].numpy()[batch["real"] == 1]) == list(range(10))

    def test_sources_are_asked_for_ascending_distinct_rows(self):
        asked = []

        class Source:
            def __len__(self):
                return ROWS

            def __getitem__(self, indices):
                asked.append(indices)
                return np.asarray(indices, "float32"), IDS[indices]

        batches = person_batches(3, Source(), batch_size=10)
        (batch,) = batches.dataset(views=3).take(1)
        assert all(np.all(np.diff(indices) > 0) for indices in asked)
        rows = batch["x"].numpy()[batch["real"] == 1].astype(int)
        np.testing.assert_array_equal(
            IDS[rows], batch["y"].numpy()[batch["real"] == 1]
        )

    def test_map_makes_each_row_anew(self):
        def noisy(x, y, seed):
            return tf.random.stateless_uniform([], seed), y

        batches = person_batches(5, map=noisy, batch_size=10)
        (batch,) = batches.dataset(views=5).take(1)
        given = batch["rows"].numpy() == 1
        assert batch["x"].shape == (len(given), 5)
        assert len(set(batch["x"].numpy()[given])) == given.sum() == ROWS

    def test_replicas_draw_their_own_persons(self):
        batches = person_batches(2, batch_size=10)
        for r in range(2):
            (batch,) = batches.dataset(shard=(r, 2), views=2).take(1)
            persons = batch["y"].numpy()[batch["real"] == 1][:, 0]
            assert sorted(persons) == list(range(r, 10, 2))


class TestBadInput:
    def test_number_of_ids(self):
        rows = PoissonBatches(np.arange(8), batch_size=2)
        with pytest.raises(ValueError, match="one id for each of 8 rows"):
            PersonBatches(rows, IDS, 1)

    def test_batch_of_more_persons_than_there_are(self):
        with pytest.raises(ValueError, match="<= 10, the number of persons"):
            person_batches(1, batch_size=11)

    def test_rates_of_rows(self):
        rates = np.full(ROWS, 0.1)
        with pytest.raises(ValueError, match="person_ids or sampling_rates"):
            person_batches(1, sampling_rates=rates)

    @pytest.mark.parametrize("rows", [0, 1.5, None])
    def test_rows_of_a_step(self, rows):
        with pytest.raises(ValueError, match="rows_per_person_per_step >= 1"):
            person_batches(rows)
