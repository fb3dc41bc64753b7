"""Settings are chosen on examples that are neither trained on nor tested on."""

from client_app.app import dataset_of
from client_app.datasets.validation import ValidationDataset
from regionfed.config import Config


def datasets(**settings):
    config = {"clients-per-region": 3, "examples-per-client": 120, "regions": 2, **settings}
    return tuple(
        dataset_of(Config.from_run_config({**config, "held-out": side}))
        for side in ("test", "validation")
    )


def devices(dataset):
    return [
        dataset.client(region, i)
        for region in dataset.regions
        for i in range(dataset.clients(region))
    ]


def test_validation_takes_from_training_and_never_from_test():
    plain, tuning = datasets()
    for before, after in zip(devices(plain), devices(tuning), strict=True):
        assert sorted([*after.train, *after.test], key=str) == sorted(before.train, key=str)
        assert not {e.group for e in after.test} & {e.group for e in before.test}


def test_a_kind_of_query_is_on_one_side_for_all_devices():
    tuning = datasets()[1]
    learnt = {e.group for device in devices(tuning) for e in device.train}
    judged = {e.group for device in devices(tuning) for e in device.test}
    assert judged
    assert not learnt & judged


def test_about_a_tenth_is_kept_out():
    tuning = datasets()[1]
    sizes = [(len(d.train), len(d.test)) for d in devices(tuning)]
    share = sum(test for _, test in sizes) / sum(map(sum, sizes))
    assert 0.05 < share < 0.15


def test_it_is_off_unless_asked_for():
    plain, tuning = datasets()
    assert not isinstance(plain, ValidationDataset)
    assert isinstance(tuning, ValidationDataset)
    assert (tuning.regions, tuning.tasks) == (plain.regions, plain.tasks)
