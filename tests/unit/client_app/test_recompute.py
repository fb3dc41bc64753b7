"""Activation checkpointing: the same values and gradients from less that is held."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from client_app.datasets.dataset import Example
from client_app.gradients import example_gradients
from client_app.local_steps import Steps, walk
from client_app.recompute import blocks_of, recompute_blocks
from client_app.task import Task, task_of
from regionfed.errors import ConfigurationError
from regionfed.vector import Layout
from tests.conftest import tiny_cnn, tiny_config

DEEP = {
    "t5": {
        "task": "text-to-text",
        "model": "t5:d_model=16,d_kv=8,d_ff=16,num_layers=2,num_decoder_layers=2,num_heads=2",
    },
    "roberta": {
        "task": "labels",
        "model": "roberta:hidden_size=16,num_hidden_layers=3,num_attention_heads=2,"
        "intermediate_size=16",
    },
}
TEXTS = [Example("intent", "red shoes", "footwear", "a"), Example("spelling", "te", "tea", "b")]


def pair(family: str, **settings: Any) -> tuple[Task, Task]:
    """Return a model as it is and one that recomputes, of the same weights."""
    plain, recomputing = (
        task_of(tiny_config(**DEEP[family], gradient_checkpointing=on, **settings))
        for on in (False, True)
    )
    assert not any("forward" in vars(block) for block in blocks_of(plain.module))
    assert all("forward" in vars(block) for block in blocks_of(recomputing.module))
    return plain, recomputing


def start(task: Task) -> tuple[Layout, torch.Tensor]:
    """Return weights that are not those of the module: what is handed in has to count."""
    layout = Layout.of(task.module)
    generator = torch.Generator().manual_seed(1)
    return layout, layout.read(task.module) + 0.2 * torch.randn(layout.size, generator=generator)


def per_example(task: Task, eta: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    layout, point = start(task)
    weights = layout.tensors(point)
    gradients, losses = example_gradients(task, weights, task.encode(TEXTS), eta)
    rows = [layout.flatten({n: g[i] for n, g in gradients.items()}) for i in range(len(TEXTS))]
    return torch.stack(rows), losses


@pytest.mark.parametrize("family", list(DEEP))
@pytest.mark.parametrize("eta", [0.0, 0.3])
def test_gradients_of_single_examples_are_the_same(family: str, eta: float) -> None:
    """By one backward pass, and through each example's own step (differentiated twice)."""
    plain, recomputing = pair(family)
    (expected, losses), (found, found_losses) = (
        per_example(plain, eta),
        per_example(recomputing, eta),
    )
    assert torch.allclose(found_losses, losses, atol=1e-6)
    assert torch.allclose(found, expected, atol=1e-5)
    assert all(float(row.norm()) > 1e-3 for row in expected)


@pytest.mark.parametrize("family", list(DEEP))
def test_steps_of_a_device_are_the_same(family: str) -> None:
    """By plain autograd, without a transform."""
    ends = []
    for task in pair(family):
        layout, point = start(task)
        ends.append(walk(task, layout, point, TEXTS, Steps(3, 0.1, 0, "sgd")))
    assert torch.allclose(ends[1], ends[0], atol=1e-6) and float(ends[0].norm()) > 1e-3


@pytest.mark.parametrize("family", list(DEEP))
def test_without_gradients_nothing_changes(family: str, tmp_path: Path) -> None:
    """Losses, answers, and what is saved for others."""
    plain, recomputing = pair(family)
    weights = start(plain)[0].tensors(start(plain)[1])
    answers = [task.answers(weights, TEXTS) for task in (plain, recomputing)]  # type: ignore[attr-defined]
    assert answers[0] == answers[1]
    with torch.no_grad():
        losses = [task.losses(weights, task.encode(TEXTS)) for task in (plain, recomputing)]
    assert torch.equal(*losses)
    for name, task in (("plain", plain), ("recomputing", recomputing)):
        task.save(weights, tmp_path / name)  # type: ignore[attr-defined]
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "recomputing")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_adapters_and_frozen_weights_are_handled() -> None:
    """LoRA: most of what a block reads has no gradient."""
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    plain, recomputing = pair("t5", lora_rank=2, trainable=r"\.(q|v)$|\.(q|v)\.")
    assert torch.allclose(per_example(recomputing)[0], per_example(plain)[0], atol=1e-6)


class Odd(nn.Module):
    """A block that takes and returns more than a tensor, and counts its calls."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, extra: dict[str, Any], *, label: str) -> dict[str, Any]:
        self.calls[label] += 1
        y = torch.tanh(self.linear(x)) * extra["scale"][0]
        return {"y": y, "x": x, "best": y.argmax(-1), "label": label, "none": None}


class Stack(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            out = block(x, {"scale": [self.scale]}, label="odd")
            assert out["label"] == "odd" and out["none"] is None
            assert out["best"].dtype == torch.int64
            x = out["y"] + out["x"]
        return x.square().sum()


def gradients(module: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = functional_call(module, weights, (row,))
        return value

    found: dict[str, torch.Tensor] = vmap(grad(loss), in_dims=(None, 0))(weights, rows)
    return found


def test_a_block_may_take_and_return_anything_around_its_tensors() -> None:
    """Nested arguments that need gradients, integers, text, none, an input as an output."""
    torch.manual_seed(0)
    plain = Stack()
    recomputing = copy.deepcopy(plain)
    recompute_blocks(recomputing)
    rows = torch.randn(4, 3)
    expected = gradients(plain, rows)
    before = Odd.calls["odd"]
    found = gradients(recomputing, rows)
    assert Odd.calls["odd"] - before == 4  # two blocks, each forward and again backward
    assert expected.keys() == found.keys() and float(expected["scale"].abs().min()) > 0.0
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    loss = recomputing(rows)
    loss.backward()
    plain(rows).backward()
    for one, other in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) or not bool(one.grad.any())  # type: ignore[union-attr]
        if other.grad is not None:
            assert one.grad is not None and torch.allclose(one.grad, other.grad, atol=1e-6)


class Twice(nn.Module):
    """Blocks that are awkward in one way each, and their sum of squares."""

    def __init__(self, make: Callable[[], nn.Module], then: Callable[..., Any] | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.then = then or (lambda y: y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.then(block(x))
        return x.abs().square().sum()


class TwoNames(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.second(torch.tanh(self.first(x))))
        return y


class Spectrum(nn.Module):
    """Complex within a block, and as what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.linear(x.real))


def changed_in_place(y: torch.Tensor) -> torch.Tensor:
    return y.add_(1.0)


@pytest.mark.parametrize(
    ("make", "then"),
    [(TwoNames, None), (Spectrum, None), (lambda: nn.Linear(3, 3), changed_in_place)],
    ids=["one layer, two names", "complex", "changed in place"],
)
def test_awkward_blocks_have_the_same_gradients(make: Any, then: Any) -> None:
    """Under a transform and without, and the model is left as it was."""
    torch.manual_seed(0)
    plain = Twice(make, then)
    recomputing = copy.deepcopy(plain)
    recompute_blocks(recomputing)
    rows = torch.randn(4, 3)
    for module in (plain, recomputing):
        module(rows[0]).backward()
    for one, other in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert isinstance(one, nn.Parameter) and torch.equal(one, other)
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-5)
    expected, found = gradients(plain, rows), gradients(recomputing, rows)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


def test_a_block_that_is_there_twice_is_called_twice_a_pass_and_place() -> None:
    """However often it stands in the list, or the model is prepared."""
    module = Stack()
    module.blocks = nn.ModuleList([module.blocks[0]] * 4)
    recompute_blocks(module)
    recompute_blocks(module)
    before = Odd.calls["odd"]
    module(torch.ones(3)).backward()
    assert Odd.calls["odd"] - before == 8


@dataclass
class Opaque:
    """What no tree of tensors is."""

    y: torch.Tensor


class Hiding(nn.Linear):
    """Returns a tensor in an object, or takes one in it."""

    def forward(self, x: Any) -> Any:
        return Opaque(super().forward(x)) if isinstance(x, torch.Tensor) else super().forward(x.y)


@pytest.mark.parametrize("given", [torch.ones(3), Opaque(torch.ones(3))], ids=["result", "given"])
def test_what_could_hide_a_tensor_from_its_gradient_is_refused(given: Any) -> None:
    """Not a gradient that is silently wrong; without gradients it is called as it was."""
    module = nn.ModuleList([Hiding(3, 3)])
    recompute_blocks(module)
    with pytest.raises(ConfigurationError, match="Hiding takes or returns a Opaque"):
        module[0](given)
    with torch.no_grad():
        module[0](given)


def test_a_copy_of_a_model_has_blocks_of_its_own() -> None:
    """What is copied to be saved must not compute with the original's weights."""
    module = Stack()
    recompute_blocks(module)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    row = torch.ones(3)
    assert not torch.allclose(module(row), other(row))
    assert module.state_dict().keys() == Stack().state_dict().keys()


def test_a_model_without_blocks_is_refused_by_the_setting_s_name() -> None:
    """A small CNN has nothing to recompute."""
    with pytest.raises(ConfigurationError, match=r"gradient-checkpointing=true: .* no list of bl"):
        recompute_blocks(tiny_cnn().module)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_a_deep_model_takes_less_memory() -> None:
    """T5-small's encoder, 24 layers deep: gradients agree, at less than half the peak."""
    model = "t5:small,num_layers=24,num_decoder_layers=1"
    texts = [Example("intent", "red shoes " * 128, "footwear", str(i)) for i in range(8)]
    found, peaks = [], []
    for on in (False, True):
        task = task_of(
            tiny_config(
                model=model,
                trainable="relative_attention_bias",
                device="cuda",
                max_length=256,
                gradient_checkpointing=on,
            )
        )
        layout = Layout.of(task.module)
        weights = layout.tensors(layout.read(task.module).cuda())
        batch = task.encode(texts)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients, _ = example_gradients(task, weights, batch)
        peaks.append(torch.cuda.max_memory_allocated() - held)
        found.append(torch.cat([g.flatten().cpu() for g in gradients.values()]))
        del task, weights, batch, gradients
    assert torch.allclose(found[1], found[0], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))
    assert peaks[1] < 0.5 * peaks[0]
