"""The shipped model: loads offline, is small, and knows what is the same everywhere."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from client_app.datasets.dataset import DataConfig
from client_app.datasets.retail import load, public_examples
from client_app.datasets.retail.generator import TASKS
from client_app.datasets.retail.lexicon import FORMS, INTENTS, TYPES

FOLDER = Path(str(resources.files("client_app.tasks") / "retail_t5"))
FLOOR = {"intent": 0.95, "spelling": 0.8, "entities": 0.95}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration.from_pretrained(FOLDER, local_files_only=True).eval()


def test_it_is_small_and_fits_its_tokenizer(model, tokenizer) -> None:
    assert model.num_parameters() < 3_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.dropout_rate == 0
    assert model.config.decoder_start_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == model.config.eos_token_id == 1


def test_labels_prefixes_and_regional_forms_are_single_tokens(tokenizer) -> None:
    for text in (*INTENTS, *TYPES, *FORMS, *(f"{task}:" for task in TASKS)):
        assert len(tokenizer(text)["input_ids"]) == 2, text  # and the end token


def test_text_survives_the_tokenizer(tokenizer) -> None:
    dataset = load(DataConfig(clients_per_region=1, examples_per_client=60))
    for region in dataset.regions:
        for example in dataset.client(region, 0).train:
            ids = tokenizer(example.target)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=True) == example.target
            assert len(ids) <= 16
            assert len(tokenizer(f"{example.task}: {example.source}")["input_ids"]) <= 24


def test_capitals_accents_and_strange_letters_are_read(tokenizer) -> None:
    assert tokenizer("Café")["input_ids"] == tokenizer("cafe")["input_ids"]
    assert tokenizer.unk_token_id in tokenizer("靴")["input_ids"]


def test_it_solves_neutral_queries_of_kinds_it_has_not_seen(model, tokenizer) -> None:
    examples = public_examples(7, 300, test=True)
    batch = tokenizer(
        [f"{e.task}: {e.source}" for e in examples], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        ids = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=24,
        )
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for task, floor in FLOOR.items():
        right = [a == e.target for a, e in zip(answers, examples, strict=True) if e.task == task]
        assert sum(right) / len(right) >= floor, task
