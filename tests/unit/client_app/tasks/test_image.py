"""The LEAF network as a task."""

import pytest
import torch
from torch.func import functional_call

from client_app.datasets.dataset import Example
from client_app.tasks.image import make_task, network
from regionfed.errors import ConfigurationError, DataError
from regionfed.vector import Layout
from tests.conftest import tiny_cnn, tiny_config, tiny_images


def test_the_network_is_leaf_s() -> None:
    """Shapes of models/femnist/cnn.py: two 5 x 5 convolutions, 2048 units, 62 classes."""
    shapes = [tuple(p.shape) for p in network((32, 64), 2048, 62).parameters() if p.dim() > 1]
    assert shapes == [(32, 1, 5, 5), (64, 32, 5, 5), (2048, 3136), (62, 2048)]
    assert not list(network((4, 4), 4, 3).buffers())  # A3: no batch statistics


def test_a_loss_is_the_cross_entropy_of_each_image() -> None:
    """And depends on the image alone: no statistic mixes a batch, not even one of one (M11)."""
    task, images = tiny_cnn(), tiny_images(5)
    layout = Layout.of(task.module)
    weights = layout.tensors(layout.read(task.module))
    batch = task.encode(images)
    assert batch["pixels"].shape == (5, 1, 28, 28)
    assert float(batch["pixels"].min()) >= 0.0 and float(batch["pixels"].max()) <= 1.0
    logits = functional_call(task.module, weights, (batch["pixels"],))
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
    assert torch.allclose(task.losses(weights, batch), expected)
    alone = torch.cat([task.losses(weights, task.encode([image])) for image in images])
    assert torch.allclose(alone, expected, atol=1e-5)


def test_a_network_that_learned_its_images_scores_one() -> None:
    """End to end."""
    task, images = tiny_cnn(), tiny_images(6)
    layout = Layout.of(task.module)
    weights = {
        n: w.clone().requires_grad_() for n, w in layout.tensors(layout.read(task.module)).items()
    }
    optimiser = torch.optim.Adam(list(weights.values()), lr=0.01)
    for _ in range(100):
        optimiser.zero_grad()
        task.losses(weights, task.encode(images)).sum().backward()
        optimiser.step()
    learned = {n: w.detach() for n, w in weights.items()}
    assert task.answers(learned, images) == [image.target for image in images]
    assert task.scores(learned, images) == [1.0] * 6
    assert task.scores(learned, []) == []


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("no base64!", "0", "no base64"),
        ("AAAA", "0", "3 pixels; expected 28 x 28"),
        (tiny_images(1)[0].source, "7", "unknown label '7'"),
    ],
)
def test_what_is_no_image_or_no_label_is_refused(source: str, target: str, said: str) -> None:
    """M11: with the reason."""
    with pytest.raises(DataError, match=said):
        tiny_cnn().encode([Example("digit", source, target, "g")])


def test_a_size_that_does_not_exist_or_a_dataset_of_texts_is_refused() -> None:
    """The error says what there is."""
    with pytest.raises(ConfigurationError, match="cnn:leaf, cnn:small"):
        make_task(tiny_config(task="image", model="cnn:large"))
    with pytest.raises(ConfigurationError, match="intent, spelling, entities"):
        make_task(tiny_config(task="image", model="cnn:small"))
