"""Labels: public, at most one an example, and none where a dataset states none."""

from client_app.datasets.dataset import (
    ClientData,
    DataConfig,
    Example,
    LabelledDataset,
    histogram,
    labels_of,
)
from client_app.datasets.retail import load
from client_app.datasets.validation import ValidationDataset

RETAIL = load(DataConfig(regions=2, clients_per_region=2, examples_per_client=60))


class Plain:
    regions = ("A",)
    tasks = ("t",)

    def clients(self, region: str) -> int:
        return 1

    def client(self, region: str, index: int) -> ClientData:
        return ClientData((Example("t", "x", "y", "g"),), ())


def test_retail_labels_are_the_departments_of_intent_queries() -> None:
    """Each intent example counts once, the others not at all."""
    examples = RETAIL.client("US", 0).train
    counts = histogram(RETAIL, examples)
    assert len(counts) == len(RETAIL.labels) == 8
    intents = [e.target for e in examples if e.task == "intent"]
    assert counts == [float(intents.count(label)) for label in RETAIL.labels]
    assert sum(counts) == len(intents) == 20


def test_one_example_changes_one_count_by_one() -> None:
    """The bound that the noise is calibrated to."""
    examples = RETAIL.client("UK", 1).train
    whole = histogram(RETAIL, examples)
    for i in range(len(examples)):
        without = histogram(RETAIL, examples[:i] + examples[i + 1 :])
        changes = [a - b for a, b in zip(whole, without, strict=True) if a != b]
        assert changes in ([], [1.0])


def test_labels_do_not_depend_on_anybody_s_examples() -> None:
    """Without examples the histogram is as long, and zero."""
    assert histogram(RETAIL, []) == [0.0] * 8


def test_a_dataset_without_labels_has_an_empty_histogram() -> None:
    """So that the divergence is 0; also behind the validation split."""
    for dataset in (Plain(), ValidationDataset(Plain())):
        assert labels_of(dataset) == ()
        assert histogram(dataset, dataset.client("A", 0).train) == []
    assert not isinstance(Plain(), LabelledDataset)


def test_the_validation_split_has_the_dataset_s_labels() -> None:
    """It only takes examples away."""
    split = ValidationDataset(RETAIL)
    assert labels_of(split) == RETAIL.labels
    train = split.client("US", 0).train
    assert sum(histogram(split, train)) == sum(e.task == "intent" for e in train)
