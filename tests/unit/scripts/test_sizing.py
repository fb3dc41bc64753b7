"""The sizes in docs/deployment.md: formulas against the models themselves, and the page itself."""

from pathlib import Path

import torch
from torch import nn
from transformers import RobertaConfig, RobertaForMaskedLM, T5Config, T5ForConditionalGeneration

from regionfed.vector import Layout
from scripts.sizing import T5, Roberta, tables

ROOT = Path(__file__).resolve().parents[3]


def weights_of(module: nn.Module) -> int:
    return Layout.of(module).size


def test_t5() -> None:
    """A small shape of no symmetry; every factor matters."""
    config = T5Config(
        vocab_size=101,
        d_model=12,
        d_ff=20,
        num_layers=3,
        num_heads=2,
        d_kv=5,
        tie_word_embeddings=True,
    )
    module = T5ForConditionalGeneration(config)
    assert T5(12, 20, 3, 2, 5, vocabulary=101).weights == weights_of(module)
    queries = [m for n, m in module.named_modules() if n.rpartition(".")[2] in {"q", "v"}]
    adapters = sum(4 * (m.in_features + m.out_features) for m in queries)  # type: ignore[union-attr,operator]
    assert T5(12, 20, 3, 2, 5).adapters(4) == adapters


def test_roberta() -> None:
    config = RobertaConfig(
        vocab_size=101,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=17,
        type_vocab_size=1,
    )
    shape = Roberta(12, 20, 3, vocabulary=101, positions=17)
    with torch.device("cpu"):
        assert shape.weights == weights_of(RobertaForMaskedLM(config))


def test_the_page_shows_what_the_script_says() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert tables(microbatch=8, rank=8) in page
