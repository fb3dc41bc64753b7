"""Text in, text out, by a T5: every task is a prefix and a target text."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call
from transformers import T5ForConditionalGeneration

from client_app.datasets.dataset import Example
from client_app.models import load, merge_lora, prepared
from client_app.task import Batch, Tensors
from regionfed.config import Config

MAX_SOURCE = 32
MAX_TARGET = 40
# Added to attention scores of what must not be seen; exp(-1e9) is 0 and, unlike -inf, a row
# that is all masked stays finite.
_HIDDEN = -1e9
_SCORING_BATCH = 256


class TextToText:
    """A T5 with its tokenizer.

    Parameters
    ----------
    module : T5ForConditionalGeneration
        Put into eval mode for good: dropout would make a search along losses noisy, and noise
        for privacy regularises already.
    tokenizer
        Turns ``"task: source"`` into token ids; appends the end token itself.
    limit : int
        Tokens of a source that are read; longer ones are cut.
    """

    def __init__(
        self, module: T5ForConditionalGeneration, tokenizer: Any, limit: int = MAX_SOURCE
    ) -> None:
        self._module = module.eval()
        self._tokenizer = tokenizer
        self._limit = limit
        self._pad = int(module.config.pad_token_id or 0)

    @property
    def module(self) -> nn.Module:
        """The T5."""
        return cast(nn.Module, self._module)

    def encode(self, examples: Sequence[Example]) -> Batch:
        """Return ``source``, ``source_hidden``, ``inputs`` and ``labels``, each (B, length)."""
        sources = self._ids([f"{e.task}: {e.source}" for e in examples], self._limit)
        labels = self._ids([e.target for e in examples], MAX_TARGET)
        # The decoder reads the labels shifted right by its start token.
        inputs = torch.nn.functional.pad(labels, (1, -1), value=self._pad)
        return {
            "source": sources,
            "source_hidden": (sources == self._pad).float() * _HIDDEN,
            "inputs": inputs,
            "labels": labels.masked_fill(labels == self._pad, -100),
        }

    def _ids(self, texts: list[str], limit: int) -> torch.Tensor:
        ids = self._tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
        longest = max(map(len, ids))
        padded = [row + [self._pad] * (longest - len(row)) for row in ids]
        return torch.tensor(padded, device=self._module.device)

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy over each example's valid target tokens, (B,)."""
        labels = batch["labels"]
        valid = labels >= 0
        token_loss = torch.nn.functional.cross_entropy(
            self._logits(weights, batch).transpose(1, 2), labels.clamp(min=0), reduction="none"
        )
        return (token_loss * valid).sum(1) / valid.sum(1).clamp(min=1)

    def _logits(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        length = batch["inputs"].shape[1]
        # The model's own: adapters are float32 whatever it computes in.
        dtype, device = self._module.dtype, self._module.device
        future = torch.full((length, length), _HIDDEN, dtype=dtype, device=device).triu(1)
        logits: torch.Tensor = functional_call(
            self.module,
            dict(weights),
            kwargs={
                "input_ids": batch["source"],
                # Masks of four axes are used as they are; building them from two axes
                # branches on their values, which vmap cannot follow.
                "attention_mask": batch["source_hidden"][:, None, None, :].to(dtype),
                "decoder_input_ids": batch["inputs"],
                "decoder_attention_mask": future[None, None],
                "use_cache": False,
            },
        ).logits
        return logits

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        """Return each example's score: 1 if the greedy answer is the target, else partial credit.

        Greedy decoding gives the target exactly when, fed the target, the model's best token is
        right at every position: one pass tells. Only tasks with partial credit (token F1 for
        entities) need the wrong answers themselves, and only those are generated.
        """
        out: list[float] = []
        for start in range(0, len(examples), _SCORING_BATCH):
            part = examples[start : start + _SCORING_BATCH]
            batch = self.encode(part)
            with torch.no_grad():
                best = self._logits(weights, batch).argmax(-1)
            right = ((best == batch["labels"]) | (batch["labels"] < 0)).all(1).tolist()
            wrong = [e for e, r in zip(part, right, strict=True) if not r and e.task in PARTIAL]
            answers = iter(self.answers(weights, wrong))
            for example, is_right in zip(part, right, strict=True):
                if is_right or example.task not in PARTIAL:
                    out.append(float(is_right))
                else:
                    out.append(PARTIAL[example.task](next(answers), example.target))
        return out

    def answers(self, weights: Tensors, examples: Sequence[Example]) -> list[str]:
        """Return the model's greedy answers."""
        if not examples:
            return []
        batch = self.encode(examples)
        with torch.no_grad():
            ids = functional_call(
                _Generate(self._module),
                {f"t5.{name}": value for name, value in weights.items()},
                (batch["source"], batch["source"] != self._pad),
            )
        return [str(s).strip() for s in self._tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def save(self, weights: Tensors, folder: Path) -> None:
        """Write a Hugging Face folder: configuration, all weights, tokenizer."""
        module = copy.deepcopy(self._module)
        with torch.no_grad():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if name in weights:
                    parameter.copy_(weights[name])
        module = cast(T5ForConditionalGeneration, merge_lora(module))
        # What is frozen here was a choice of the federation; whoever loads it may train all.
        module.requires_grad_(True)
        module.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def usage(self, task: str) -> str:
        """Return code that needs `transformers` and nothing of this package."""
        return _USAGE.format(task=task, limit=self._limit, answer=MAX_TARGET)


_USAGE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)

query = tokenizer(
    "{task}: red trainrs size 9", truncation=True, max_length={limit}, return_tensors="pt"
)
answer = model.generate(
    input_ids=query["input_ids"], attention_mask=query["attention_mask"], max_new_tokens={answer}
)
print(tokenizer.decode(answer[0], skip_special_tokens=True))"""


class _Generate(nn.Module):
    """Greedy decoding as a module call, so that weights can be swapped for it too."""

    def __init__(self, t5: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.t5 = t5

    def forward(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        generate = cast(Callable[..., torch.Tensor], self.t5.generate)
        return generate(
            input_ids=source, attention_mask=mask, max_new_tokens=MAX_TARGET, do_sample=False
        )


def token_f1(answer: str, target: str) -> float:
    """Return the F1 of one query's entity tokens.

    The texts hold one type per word; ``other`` is no entity. A prediction is right when its
    position and type are. A query without entities scores 1 if none is predicted, else 0.
    """
    predicted = Counter(_entities(answer))
    expected = Counter(_entities(target))
    total = predicted.total() + expected.total()
    return 2.0 * (predicted & expected).total() / total if total else 1.0


def _entities(text: str) -> list[tuple[int, str]]:
    return [(i, kind) for i, kind in enumerate(text.split()) if kind != "other"]


PARTIAL: dict[str, Callable[[str, str], float]] = {"entities": token_f1}
"""Tasks in which a wrong answer may be worth something, and what."""


def make_task(config: Config) -> TextToText:
    """Load the T5 that a configuration names."""
    loaded = load(config, "t5")
    module = cast(T5ForConditionalGeneration, prepared(loaded.module, config))
    return TextToText(module, loaded.tokenizer, config.max_length or MAX_SOURCE)
