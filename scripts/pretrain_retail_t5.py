"""Make the embedded T5: train its tokenizer and pretrain it on region-neutral queries.

    python -m scripts.pretrain_retail_t5 --out client_app/tasks/retail_t5

Two parts: it learns the tasks, with noise on its weights, then to be taught (meta_learning.py).

The model sees no regional query, no regional spelling and no kind of query that any device keeps
for test or validation. The tokenizer is trained on the lexicon, regional words included, so that
they split into few pieces; it learns nothing of their meaning. With equal versions of torch,
transformers and tokenizers on one kind of processor, two runs write equal files.
"""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from client_app.datasets.dataset import Example
from client_app.datasets.retail import public_examples
from client_app.datasets.retail.generator import TASKS
from client_app.datasets.retail.invented import COINED
from client_app.datasets.retail.lexicon import FORMS, INTENTS, NEUTRAL_WORDS, REGIONAL_WORDS, TYPES
from client_app.tasks.text_to_text import TextToText
from regionfed.config import Config
from scripts.meta_learning import MetaOptions, learn_to_be_taught, warm_cosine

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
PREFIXES = tuple(f"{task}:" for task in TASKS)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-.,&'/+%"


def main() -> None:
    """Run the script."""
    options = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(options.vocabulary)
    model = make_model(len(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, options)
    task = TextToText(model, tokenizer)
    taught = frozenset(n for n in dict(model.named_parameters()) if re.search(options.taught, n))
    coined = torch.tensor([tokenizer(word)["input_ids"][0] for word in COINED])
    meta = MetaOptions(options.regions, options.meta_lr, seed=options.seed)
    learn_to_be_taught(task, taught, coined, meta)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    for file in options.out.iterdir():
        file.chmod(0o644)
    held_out = public_examples(options.seed, 3000, test=True)
    print(json.dumps(score(model, tokenizer, held_out)))
    print(f"written to {options.out.resolve()}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and queries")
    parser.add_argument("--steps", type=int, default=4000, help="number of updates")
    parser.add_argument("--batch", type=int, default=96, help="queries an update")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--weight-noise", type=float, default=0.03, help="std on each weight")
    parser.add_argument("--regions", type=int, default=1500, help="invented regions to learn from")
    parser.add_argument("--meta-lr", type=float, default=3e-3, help="the same, in this second part")
    parser.add_argument(
        "--taught", default=Config().trainable, help="what a federation will train (expression)"
    )
    parser.add_argument("--vocabulary", type=int, default=2300, help="number of tokens")
    return parser.parse_args()


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Train a BPE on the words of the lexicon.

    The labels become whole tokens first, then the regional forms (so that one embedding can
    hold what a form means), then words of public queries; the rest is in pieces. Text is
    lowered and stripped of accents; a letter outside the alphabet is unknown.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    counts = dict.fromkeys(sorted(REGIONAL_WORDS), 3) | dict.fromkeys(sorted(NEUTRAL_WORDS), 4)
    counts |= dict.fromkeys((*FORMS, *COINED), 6) | dict.fromkeys((*INTENTS, *TYPES), 100)
    words = [word for word, count in counts.items() for _ in range(count)]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(PREFIXES),
        special_tokens=[PAD, EOS, UNK],
        initial_alphabet=[*ALPHABET, "▁"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens([AddedToken(prefix, normalized=False) for prefix in PREFIXES])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def make_model(vocabulary: int) -> T5ForConditionalGeneration:
    """Make a T5 small enough for per-example gradients and for noise on every parameter."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        pad_token_id=0,
        eos_token_id=1,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def train(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    options: argparse.Namespace,
) -> None:
    """Pretrain by AdamW on queries that never repeat, with a warm-up and a cosine."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    steps: int = options.steps
    warmup = min(500, steps // 10)
    generator = torch.Generator().manual_seed(options.seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, warm_cosine(steps, warmup))
    started, total = time.perf_counter(), 0.0
    for step, examples in enumerate(batches(options.seed, options.steps, options.batch), 1):
        noise = perturb(model, options.weight_noise * min(1.0, 2 * step / steps), generator)
        loss = loss_of(model, tokenizer, examples)
        optimiser.zero_grad()
        loss.backward()
        for parameter, added in zip(model.parameters(), noise, strict=True):
            parameter.data.sub_(added)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        total += loss.item()
        if step % 500 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step:6d}  loss {total / 500:.4f}  {seconds:5.0f} s", flush=True)
            total = 0.0


def perturb(
    model: T5ForConditionalGeneration, std: float, generator: torch.Generator
) -> list[torch.Tensor]:
    """Add noise to every weight in place and return it.

    Training under privacy will add noise to the weights; a model whose answers survive such noise
    loses less of what it knows. Public data pay for that here, once.
    """
    noise = [std * torch.randn(p.shape, generator=generator) for p in model.parameters()]
    for parameter, added in zip(model.parameters(), noise, strict=True):
        parameter.data.add_(added)
    return noise


def batches(seed: int, steps: int, size: int) -> Iterator[tuple[Example, ...]]:
    """Yield batches of fresh queries; half of each is spelling, the hardest task."""
    for step in range(steps):
        examples = public_examples(seed * 1_000_000 + step, size * 3 // 2)
        spelling = [e for e in examples if e.task == "spelling"]
        others = [e for e in examples if e.task != "spelling"]
        yield (*spelling, *others[: size - len(spelling)])


def loss_of(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    examples: tuple[Example, ...],
) -> torch.Tensor:
    """Return the mean cross-entropy of the target tokens."""
    source, mask = encode(tokenizer, [f"{e.task}: {e.source}" for e in examples])
    target, valid = encode(tokenizer, [e.target for e in examples])
    labels = target.masked_fill(valid == 0, -100)
    logits = model(input_ids=source, attention_mask=mask, labels=labels).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def encode(tokenizer: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, each (B, length)."""
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


@torch.no_grad()
def score(
    model: T5ForConditionalGeneration, tokenizer: Any, examples: tuple[Example, ...]
) -> dict[str, float]:
    """Return the share of exact greedy answers by task."""
    right: Counter[str] = Counter()
    for start in range(0, len(examples), 500):
        part = examples[start : start + 500]
        source, mask = encode(tokenizer, [f"{e.task}: {e.source}" for e in part])
        ids = model.generate(input_ids=source, attention_mask=mask, max_new_tokens=24)
        answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for example, text in zip(part, answers, strict=True):
            right[example.task] += text.strip() == example.target
    counts = Counter(example.task for example in examples)
    return {task: round(right[task] / counts[task], 4) for task in TASKS}


if __name__ == "__main__":
    main()
