"""The second part of pretraining makes a model easier to teach."""

import pytest
import torch

from client_app.datasets.retail.invented import COINED
from client_app.tasks.text_to_text import TextToText
from scripts.meta_learning import MetaOptions, learn_to_be_taught, warm_cosine
from scripts.pretrain_retail_t5 import make_model, make_tokenizer


@pytest.fixture(scope="module")
def taught_model() -> tuple[TextToText, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(2300)
    task = TextToText(make_model(len(tokenizer)), tokenizer)
    before = {n: p.detach().clone() for n, p in task.module.named_parameters()}
    coined = torch.tensor([tokenizer(word)["input_ids"][0] for word in COINED])
    options = MetaOptions(steps=2, lr=1e-2, inner_steps=1, support=6, query=6)
    learn_to_be_taught(task, frozenset(n for n in before if "DenseReluDense" in n), coined, options)
    return task, before, coined


def test_coined_words_are_whole_tokens() -> None:
    tokenizer = make_tokenizer(2300)
    assert {len(tokenizer(word)["input_ids"]) for word in COINED} == {2}  # itself and the end


def test_all_weights_learn(taught_model) -> None:
    task, before, _ = taught_model
    after = dict(task.module.named_parameters())
    assert all(torch.isfinite(p).all() for p in after.values())
    assert all(not torch.equal(after[n].detach(), before[n]) for n in before)


def test_coined_words_stay_without_a_meaning_of_their_own(taught_model) -> None:
    """Weight decay alone moves their embeddings, so all of them by one factor."""
    task, before, coined = taught_model
    ratio = (
        dict(task.module.named_parameters())["shared.weight"][coined]
        / before["shared.weight"][coined]
    )
    assert ratio.std().item() < 1e-5


def test_the_rate_rises_and_falls() -> None:
    rate = warm_cosine(100, 10)
    assert rate(0) == pytest.approx(0.1)
    assert rate(10) == 1.0
    assert rate(100) == pytest.approx(0.0)
    assert all(rate(s) >= rate(s + 1) for s in range(10, 100))
