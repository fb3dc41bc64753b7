"""Models by name: folders, random weights by size, LoRA, precision; no hub when offline."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from client_app import models
from client_app.datasets.dataset import Example
from client_app.gradients import clipped_sums
from client_app.models import FAMILIES, merge_lora, parse_random
from client_app.task import Task
from client_app.tasks.labels import make_task as make_labels
from client_app.tasks.text_to_text import make_task
from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.sketch import sketch_signs
from regionfed.vector import Layout
from tests.conftest import brute_force, tiny_config

T5 = "t5:d_model=16,d_kv=8,d_ff=16,num_layers=1,num_decoder_layers=1,num_heads=2"
ROBERTA = "roberta:hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
TEXTS = [Example("intent", "red shoes", "footwear", "a"), Example("intent", "tea", "grocery", "b")]


def layout_and_point(task: Task) -> tuple[Layout, torch.Tensor]:
    layout = Layout.of(task.module)
    return layout, layout.read(task.module)


# ---------------------------------------------------------------------------------------- names
def test_random_weights_of_a_size_are_the_same_everywhere_and_change_with_the_seed() -> None:
    """A device and the server draw the same, from the run's seed and nothing else."""
    torch.manual_seed(1)
    one = layout_and_point(make_task(tiny_config(model=T5)))[1]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = layout_and_point(make_task(tiny_config(model=T5)))[1]
    assert torch.equal(one, other) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, layout_and_point(make_task(tiny_config(model=T5, seed=1)))[1])


@pytest.mark.parametrize(
    ("family", "size", "millions"),
    [("t5", "small", 60.5), ("t5", "3b", 2851.6), ("roberta", "base", 124.1)],
)
def test_named_sizes_have_the_published_number_of_parameters(
    family: str, size: str, millions: float
) -> None:
    """At true shapes, without memory: on the meta device."""
    kind = FAMILIES[family]
    with torch.device("meta"):
        model = kind.model(kind.config(**kind.fixed, **kind.sizes[size]))
    # RoBERTa's count is without the pooler and the language model's head, with two labels.
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_size_can_be_changed() -> None:
    """Reduced depth at true widths."""
    found = parse_random("t5:3b,num_layers=1,tokenizer=/somewhere")
    assert found is not None
    assert found[1]["d_ff"] == 16_384 and found[1]["num_layers"] == 1
    assert found[1]["tokenizer"] == "/somewhere"
    assert parse_random("google-t5/t5-small") is None


def test_names_of_another_model_say_what_to_type() -> None:
    """The default of `trainable` is made for a T5: a RoBERTa has no such names."""
    default = Config().trainable
    with pytest.raises(ConfigurationError, match=r"matches no parameter.*Set trainable=\"\""):
        make_labels(tiny_config(task="labels", model=ROBERTA, trainable=default))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("t5:smal", "no size 'smal'; did you mean 'small'"),
        ("t5:d_model=x", "d_model=x is no int"),
        ("t5:nothing=3", "nothing is no number"),
        ("roberta:base", "needs 't5:...'"),
        ("no such folder/at all", "no such folder"),
    ],
)
def test_a_name_that_means_nothing_is_refused(model: str, said: str) -> None:
    """Naming what there is."""
    with pytest.raises(ConfigurationError, match=said):
        make_task(tiny_config(model=model))


# ---------------------------------------------------------------------------------------- offline
@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be looked up or connected to."""

    def blocked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the network was asked: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "create_connection", blocked)


def test_m10_local_models_contact_no_hub(
    no_network: None, t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M10.

    The tokenizer or model contacts a hub although offline. -> local files only when asked; here
    even where a hub is allowed: a folder is all that is read.
    """
    monkeypatch.setattr(models.hub, "HF_HUB_OFFLINE", False)
    for model in ("retail-t5", str(t5_folder), T5):
        make_task(tiny_config(model=model))
    labels = make_labels(tiny_config(task="labels", model=ROBERTA))
    layout, point = layout_and_point(labels)
    labels.save(layout.tensors(point), tmp_path)
    again = make_labels(tiny_config(task="labels", model=str(tmp_path)))
    assert torch.equal(layout_and_point(again)[1], point)


def test_m10_a_name_is_looked_for_in_the_cache_alone_when_offline(
    no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M10: HF_HUB_OFFLINE=1 is respected, and the error says so."""
    monkeypatch.setattr(models.hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="no hub is asked"):
        make_task(tiny_config(model="google-t5/t5-small-not-here"))


def test_a_head_for_other_labels_is_refused(tmp_path: Path) -> None:
    """M11: rows of a head mean labels; other labels would silently take their place."""
    labels = make_labels(tiny_config(task="labels", model=ROBERTA))
    labels.module.config.id2label = {i: f"x:{i}" for i in range(len(labels.module.config.id2label))}
    layout, point = layout_and_point(labels)
    labels.save(layout.tensors(point), tmp_path)
    with pytest.raises(ConfigurationError, match="head for"):
        make_labels(tiny_config(task="labels", model=str(tmp_path)))
    with pytest.raises(ConfigurationError, match="is a roberta"):
        make_task(tiny_config(model=str(tmp_path)))


def test_a_tokenizer_of_another_model_is_refused(t5_folder: Path, tmp_path: Path) -> None:
    """M11: a token id beyond the embedding would end a round somewhere in a kernel."""
    for file in t5_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    models.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="not of one model"):
        make_task(tiny_config(model=str(tmp_path)))


# -------------------------------------------------------------------------------------- precision
def test_m8_fp16_is_refused_with_the_reason() -> None:
    """M8.

    fp16 T5 overflows. -> fp32 or bf16; fp16 is refused with the reason.
    """
    with pytest.raises(ConfigurationError, match=r"65504.*'bf16'"):
        tiny_config(precision="fp16")


def test_bf16_computes_in_bf16_and_crosses_as_float32() -> None:
    """The vector stays float32: small steps would vanish in 8 bits."""
    task = make_task(tiny_config(model=T5, precision="bf16"))
    layout, point = layout_and_point(task)
    assert set(layout.dtypes) == {torch.bfloat16} and point.dtype == torch.float32


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And 'auto' falls back."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert next(make_task(tiny_config(model=T5)).module.parameters()).device.type == "cpu"
    with pytest.raises(ConfigurationError, match="device='auto'"):
        make_task(tiny_config(model=T5, device="cuda"))


# ------------------------------------------------------------------------------------------- LoRA
@pytest.fixture(params=["t5", "roberta"])
def adapted(request: pytest.FixtureRequest) -> tuple[Task, Any]:
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    kind, model = {"t5": (make_task, T5), "roberta": (make_labels, ROBERTA)}[request.param]
    settings = {"task": "labels"} if request.param == "roberta" else {}
    config = tiny_config(model=model, lora_rank=2, trainable="Attention|attention", **settings)
    return kind(config), lambda **more: kind(tiny_config(model=model, **settings, **more))


def test_adapters_alone_are_trained_and_begin_as_nothing(adapted: tuple[Task, Any]) -> None:
    """A small vector crosses; before training the model is that without adapters."""
    task, plain = adapted
    layout, point = layout_and_point(task)
    assert all("lora_" in name or name.startswith("classifier") for name in layout.names)
    whole = plain()
    everything = Layout.of(whole.module)
    assert layout.size < everything.size / 2
    batch = whole.encode(TEXTS)
    losses = whole.losses(everything.tensors(everything.read(whole.module)), batch)
    assert torch.allclose(task.losses(layout.tensors(point), batch), losses, atol=1e-6)


def test_gradients_of_adapters_equal_a_brute_force_loop(adapted: tuple[Task, Any]) -> None:
    """D7: LoRA too."""
    task, _ = adapted
    layout, point = layout_and_point(task)
    # B is zero at first, so that A would have no gradient: move away from there.
    point = point + 0.1 * torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
    gradients, _ = brute_force(task, layout, point, task.encode(TEXTS))
    sums = clipped_sums(
        task, layout, point, TEXTS, clip_norm=1e6, loss_cap=8.0, signs={}, microbatch=2
    )
    assert torch.allclose(sums.total, gradients.sum(0), atol=1e-5)
    assert float(gradients.norm()) > 0.0


def test_a_model_with_adapters_is_saved_merged(adapted: tuple[Task, Any], tmp_path: Path) -> None:
    """M3: the folder needs no peft, and gives the same losses."""
    task, plain = adapted
    layout, point = layout_and_point(task)
    point = point + 0.1 * torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
    task.save(layout.tensors(point), tmp_path)
    again = plain()
    kind = make_labels if "labels" in type(again).__module__ else make_task
    name = {"task": "labels"} if kind is make_labels else {}
    loaded = kind(tiny_config(model=str(tmp_path), **name))
    whole = Layout.of(loaded.module)
    batch = task.encode(TEXTS)
    expected = task.losses(layout.tensors(point), batch)
    found = loaded.losses(whole.tensors(whole.read(loaded.module)), batch)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not any("lora" in name for name, _ in loaded.module.named_parameters())
    # The task's own model keeps its adapters.
    assert Layout.of(task.module).fingerprint == layout.fingerprint


def test_lora_without_a_linear_layer_or_without_peft_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says what to install, or what matches nothing."""
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"regionfed\[lora\]"):
        make_task(tiny_config(model=T5, lora_rank=2))
    monkeypatch.undo()
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    with pytest.raises(ConfigurationError, match="no linear layer"):
        make_task(tiny_config(model=T5, lora_rank=2, trainable="layer_norm"))


def test_merging_a_model_without_adapters_changes_nothing() -> None:
    """What has none is returned as it is."""
    task = make_task(tiny_config(model=T5))
    before = layout_and_point(task)[1]
    merge_lora(task.module)
    assert torch.equal(layout_and_point(task)[1], before)


# -------------------------------------------------------------------------------------------- GPU
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_on_cuda_agree_with_those_of_the_processor(precision: str) -> None:
    """Sums and sketches come back on the CPU, of the same values up to rounding."""
    sums = []
    for device in ("cpu", "cuda"):
        task = make_task(tiny_config(model=T5, device=device, precision=precision))
        layout, point = layout_and_point(task)
        signs = sketch_signs(layout, 16, 0)
        sums.append(
            clipped_sums(
                task, layout, point, TEXTS, clip_norm=1.0, loss_cap=8.0, signs=signs, microbatch=2
            )
        )
    for found in ([one.total for one in sums], [one.sketch for one in sums]):
        assert found[1].device.type == "cpu"
        assert float(torch.nn.functional.cosine_similarity(*found, dim=0)) > 0.98


# ------------------------------------------------------------------------------------ T5-3B's path
def one_layer_of_3b(**changed: Any) -> Any:
    """T5-3B at its true widths, one layer deep, by LoRA in bf16."""
    model = "t5:3b,num_layers=1,num_decoder_layers=1"
    return tiny_config(
        model=model, lora_rank=8, trainable=r"\.(q|v)$|\.(q|v)\.", precision="bf16", **changed
    )


def walk(config: Any) -> None:
    """Let a model's adapters walk the path of a round: sums, wire in chunks, back into a step."""
    from regionfed.contract import GradientReply, decode, encode

    task = make_task(config)
    layout, point = layout_and_point(task)
    sums = clipped_sums(
        task, layout, point, TEXTS, clip_norm=0.5, loss_cap=20.0, signs={}, microbatch=2
    )
    records = encode(GradientReply(sums.total, sums.sketch, sums.loss))
    found = decode(GradientReply, records, {"p": layout.size, "k": 0})
    assert torch.equal(found.total, sums.total) and float(found.total.norm()) > 0.0
    stepped = task.losses(
        layout.tensors((point - 0.1 * found.total).to(next(task.module.parameters()).device)),
        task.encode(TEXTS),
    )
    assert bool(torch.isfinite(stepped.float()).all())


@pytest.mark.slow
def test_t5_3b_walks_the_path_at_reduced_depth() -> None:
    """True widths: what crosses is the adapters alone."""
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    config = one_layer_of_3b(device="cpu")
    walk(config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", ["t5:3b,num_layers=1,num_decoder_layers=1", "t5:3b"])
def test_t5_3b_walks_the_path_on_cuda(model: str) -> None:
    """All 24 layers, random weights of the true shapes."""
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    from dataclasses import replace

    walk(replace(one_layer_of_3b(device="cuda"), model=model))
