"""A model by its name: a folder, a name on the Hugging Face hub, or random weights of a size.

===============================  ==================================================================
``model``                        what it is
===============================  ==================================================================
``retail-t5``                    the T5 that is shipped
``/path/of/a/folder``            as ``save_pretrained`` writes it; nothing else is looked at
``google-t5/t5-small``           a name on the hub: from its cache, and from the hub itself unless
                                 ``HF_HUB_OFFLINE=1`` forbids that; ``@`` and a commit may follow
``t5:small``                     random weights of a known size (`FAMILIES`)
``t5:d_model=64,num_layers=2``   random weights of one's own size: attributes of the configuration
``t5:3b,num_layers=1``           a known size with changes; ``tokenizer=/path`` is one, too
===============================  ==================================================================

Random weights are drawn from the run's seed, so that every device and the server draw the same.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import constants as hub
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.randomness import derive_seed
from regionfed.registry import nearest

SHIPPED = "retail-t5"
TOKENIZER = "tokenizer"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes
    ----------
    config, model : type
        Classes of transformers.
    sizes : Mapping[str, Mapping[str, int]]
        Attributes of the configuration by the name of a size, as published.
    fixed : Mapping[str, object]
        Attributes that every size has.
    """

    config: type[Any]
    model: type[Any]
    sizes: Mapping[str, Mapping[str, int]]
    fixed: Mapping[str, object] = field(default_factory=dict)


def _t5(d_model: int, d_ff: int, layers: int, heads: int, d_kv: int = 64) -> dict[str, int]:
    return {
        **{"d_model": d_model, "d_ff": d_ff, "num_heads": heads, "d_kv": d_kv},
        **{"num_layers": layers, "num_decoder_layers": layers, "vocab_size": 32_128},
    }


def _roberta(hidden: int, layers: int, heads: int) -> dict[str, int]:
    return {
        **{"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "max_position_embeddings": 514, "vocab_size": 50_265},
    }


FAMILIES: dict[str, Family] = {
    "t5": Family(
        T5Config,
        T5ForConditionalGeneration,
        {
            "small": _t5(512, 2048, 6, 8),
            "base": _t5(768, 3072, 12, 12),
            "large": _t5(1024, 4096, 24, 16),
            "3b": _t5(1024, 16_384, 24, 32, 128),
        },
        {"decoder_start_token_id": 0, "tie_word_embeddings": True, "dropout_rate": 0.0},
    ),
    "roberta": Family(
        RobertaConfig,
        RobertaForTokenClassification,
        {
            "tiny": _roberta(64, 2, 4),
            "base": _roberta(768, 12, 12),
            "large": _roberta(1024, 24, 16),
        },
    ),
}


def model_folder(model: str) -> str:
    """Return what transformers loads a model from: a folder, or a name on the hub.

    Raises
    ------
    ConfigurationError
        If it can be neither.
    """
    if model == SHIPPED:
        return str(resources.files("client_app.tasks") / "retail_t5")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", model):
        raise ConfigurationError(
            f"model='{model}': no such folder. Give '{SHIPPED}', a folder made by save_pretrained, "
            f"a name on the Hugging Face hub, or random weights as 't5:small'."
        )
    return model


def parse_random(model: str) -> tuple[Family, dict[str, Any]] | None:
    """Read ``family:size,key=value,...``; None if `model` is no such text.

    Raises
    ------
    ConfigurationError
        If the size, or a key, is unknown, or a value is not what the configuration takes.
    """
    name, colon, rest = model.partition(":")
    if not colon or name not in FAMILIES:
        return None
    family = FAMILIES[name]
    values: dict[str, Any] = dict(family.fixed)
    default = family.config()
    for part in filter(None, map(str.strip, rest.split(","))):
        key, equals, value = map(str.strip, part.partition("="))
        if not equals:
            if key not in family.sizes:
                raise ConfigurationError(
                    f"model='{model}': no size '{key}'{nearest(key, list(family.sizes))} "
                    f"There are {', '.join(family.sizes)}, or give key=value."
                )
            values |= family.sizes[key]
        elif key == TOKENIZER:
            values[TOKENIZER] = value
        else:
            values[key] = _number(model, key, value, getattr(default, key, None))
    return family, values


def _number(model: str, key: str, value: str, default: object) -> float:
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        raise ConfigurationError(f"model='{model}': {key} is no number of this model's sizes.")
    try:
        return type(default)(value)
    except ValueError as error:
        raise ConfigurationError(
            f"model='{model}': {key}={value} is no {type(default).__name__}."
        ) from error


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and its tokenizer."""

    module: PreTrainedModel
    tokenizer: Any


def load(config: Config, family: str, **head: Any) -> Loaded:
    """Load the model that a configuration names, with the weights that it trains marked.

    Parameters
    ----------
    config : Config
    family : str
        Name of the architecture that the task needs, of `FAMILIES`.
    **head
        Attributes of the model's configuration that the task sets, such as its labels. What they
        add to a pretrained model has random weights.

    Raises
    ------
    ConfigurationError
        If there is no such model, or it is not of that family.
    """
    transformers_logging.disable_progress_bar()  # a bar per process would bury the rounds
    drawn = parse_random(config.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "model"))
        loaded = _draw(config.model, family, drawn, head) if drawn else _read(config, family, head)
    if len(loaded.tokenizer) > loaded.module.config.vocab_size:
        raise ConfigurationError(
            f"model='{config.model}': its tokenizer has {len(loaded.tokenizer)} tokens, its "
            f"embedding rows for {loaded.module.config.vocab_size}: they are not of one model."
        )
    return loaded


def _draw(
    model: str, family: str, drawn: tuple[Family, dict[str, Any]], head: Mapping[str, Any]
) -> Loaded:
    found, values = drawn
    if found is not FAMILIES[family]:
        raise ConfigurationError(f"model='{model}': this task needs '{family}:...'.")
    folder = values.pop(TOKENIZER, None)
    tokenizer = tokenizer_of(folder, family) if folder else DEFAULT_TOKENIZERS[family]()
    ids = {
        name: value
        for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if (value := getattr(tokenizer, name)) is not None
    }
    settings = {"vocab_size": len(tokenizer), **ids, **values, **head}
    # Padded to more rows than there are tokens, as published ones are; never to fewer.
    settings["vocab_size"] = max(settings["vocab_size"], len(tokenizer))
    try:
        config = found.config(**settings)
        config._attn_implementation = "eager"
        return Loaded(found.model(config).eval(), tokenizer)
    except (ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ConfigurationError(f"model='{model}' cannot be built: {error}") from error


def _read(config: Config, family: str, head: Mapping[str, Any]) -> Loaded:
    source = model_folder(config.model)
    kind = FAMILIES[family]
    # Eager attention: fused kernels cannot be differentiated twice (meta, order 2).
    options = {**_place(source), "attn_implementation": "eager"}
    try:
        known = AutoConfig.from_pretrained(**_place(source))
        if known.model_type != family:
            raise ConfigurationError(
                f"model='{config.model}' is a {known.model_type}; this task needs a {family}."
            )
        _check_head(config.model, known, head)
        module = kind.model.from_pretrained(**options, **head)
        return Loaded(module.eval(), tokenizer_of(source, family))
    except (OSError, ValueError) as error:
        offline = (
            "no hub is asked (HF_HUB_OFFLINE=1)" if hub.HF_HUB_OFFLINE else "the hub was asked"
        )
        raise ConfigurationError(
            f"model='{config.model}' cannot be loaded, {offline}: {str(error).splitlines()[0]} "
            f"Give a folder made by save_pretrained, a name that is in the cache, '{SHIPPED}', or "
            f"random weights as '{family}:{next(iter(kind.sizes))}'."
        ) from error


def _check_head(model: str, known: Any, head: Mapping[str, Any]) -> None:
    """Refuse a head that was trained for other labels: its rows would mean something else."""
    labels = dict(known.id2label or {})
    trained = any(label != f"LABEL_{i}" for i, label in labels.items())
    if "id2label" in head and trained and labels != head["id2label"]:
        raise ConfigurationError(
            f"model='{model}' has a head for {len(labels)} labels that are not the "
            f"{len(head['id2label'])} of this dataset. Give the model that it was made from."
        )


def local_only(source: str) -> bool:
    """Say whether no hub may be asked: for a folder never, else as ``HF_HUB_OFFLINE`` says."""
    return Path(source).is_dir() or bool(hub.HF_HUB_OFFLINE)


def _place(source: str) -> dict[str, Any]:
    """Return where Hugging Face looks: in a folder, or on the hub, at a revision after an ``@``."""
    name, _, revision = source.partition("@")
    if not revision or Path(source).is_dir():
        return {"pretrained_model_name_or_path": source, "local_files_only": local_only(source)}
    return {
        "pretrained_model_name_or_path": name,
        "revision": revision,
        "local_files_only": local_only(name),
    }


def tokenizer_of(source: str, family: str) -> Any:
    """Load a tokenizer from a folder or by a name on the hub.

    RoBERTa's takes words only if told to put a space before each.
    """
    options = _place(source)
    if family == "roberta":
        options["add_prefix_space"] = True
    try:
        return AutoTokenizer.from_pretrained(**options)
    except (OSError, ValueError):
        # A folder with a vocabulary and nothing that says of which model.
        return AutoTokenizer.from_pretrained(**options, tokenizer_type=family)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with RoBERTa's special tokens: made here, of no file.

    A byte at the start of a word, with the space before it, is one token as well.
    """
    from tokenizers import Tokenizer, pre_tokenizers  # noqa: PLC0415
    from tokenizers.models import BPE  # noqa: PLC0415
    from tokenizers.processors import RobertaProcessing  # noqa: PLC0415

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how ByteLevel writes one
    tokens = [*special, *alphabet, *(space + byte for byte in alphabet)]
    merges = [(space, byte) for byte in alphabet]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = cast(Any, pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.post_processor = cast(Any, RobertaProcessing(("</s>", 2), ("<s>", 0)))
    names = dict(zip(("bos", "pad", "eos", "unk", "mask"), special, strict=True))
    names |= {"cls": "<s>", "sep": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_prefix_space=True,
        **{f"{name}_token": token for name, token in names.items()},
    )


DEFAULT_TOKENIZERS = {
    "t5": lambda: tokenizer_of(model_folder(SHIPPED), "t5"),
    "roberta": byte_tokenizer,
}
"""What a model with random weights reads with, unless its name says otherwise."""


# What is trained ---------------------------------------------------------------------------


def prepared(module: nn.Module, config: Config, head: str = "(?!)") -> nn.Module:
    """Put a model on its device in its precision, with the weights marked that are trained.

    Parameters
    ----------
    module : nn.Module
        Changed in place.
    config : Config
        `trainable` chooses by name. With `lora-rank` above 0 the linear layers that it chooses
        are frozen and each gets a LoRA adapter of that rank (Hu et al. 2021); nothing else of
        what it chooses is trained then.
    head : str
        Regular expression of weights that are trained in any case: random until they are.

    Returns
    -------
    nn.Module
        In evaluation mode: dropout would make a search along losses noisy, and noise for privacy
        regularises already.
    """
    module.to(device_of(config.device), DTYPES[config.precision])
    if config.lora_rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(config.seed, "lora"))
            module = add_lora(module, config.lora_rank, config.trainable)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" in name or re.search(head, name) is not None)
    else:
        select_trainable(module, config.trainable, head)
    return module.eval()


def device_of(name: str) -> torch.device:
    """Return a device by the setting: ``"auto"`` takes CUDA where there is any."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device='cuda', and PyTorch finds none: set device='auto'.")
    return torch.device(name)


def select_trainable(module: nn.Module, pattern: str, head: str = "(?!)") -> None:
    """Freeze the parameters whose name does not match; noise grows with what is trained.

    Raises
    ------
    ConfigurationError
        If nothing matches, naming some parameters that are there.
    """
    chosen = _compiled(pattern)
    names = [name for name, _ in module.named_parameters()]
    if not any(map(chosen.search, names)):
        raise ConfigurationError(
            f"trainable='{pattern}' matches no parameter; there are {', '.join(names[:5])}, ... "
            f'Set trainable="" to train all, or a regular expression over such names.'
        )
    for name, parameter in module.named_parameters():
        trained = chosen.search(name) or re.search(head, name)
        parameter.requires_grad_(trained is not None)


def add_lora(module: nn.Module, rank: int, pattern: str) -> nn.Module:
    """Give the linear layers whose weight's name matches a LoRA adapter; by `peft`, in place.

    The layers' names gain ``base_layer`` and ``lora_A``/``lora_B``. The sum that an adapter adds
    is zero at first.

    Raises
    ------
    ConfigurationError
        If `peft` is not installed, or no linear layer matches.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"lora-rank={rank} needs peft ({error}): pip install 'regionfed[lora]'."
        ) from error
    chosen = _compiled(pattern)
    tied = _tied(module)
    targets = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and chosen.search(f"{name}.weight")
        and id(layer.weight) not in tied
    ]
    if not targets:
        raise ConfigurationError(
            f"trainable='{pattern}' matches no linear layer for lora-rank={rank}. Set "
            f'trainable="" for adapters on all of them.'
        )
    settings = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=targets)
    adapted: nn.Module = inject_adapter_in_model(settings, module)
    return adapted


def merge_lora(module: nn.Module) -> nn.Module:
    """Return a model whose adapters, if it has any, are added to its weights; changed in place."""
    for name, layer in list(module.named_modules()):
        if hasattr(layer, "lora_A") and hasattr(layer, "get_base_layer"):
            cast(Any, layer).merge()
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, layer.get_base_layer())
    return module


def _compiled(pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"trainable='{pattern}' is no regular expression: {error}."
        ) from error


def _tied(module: nn.Module) -> set[int]:
    """Return the ids of weights that have more than one name (on the meta device, too)."""
    found = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {one for one, names in found.items() if names > 1}
