"""A second opinion on accounts, gradients of single examples and models, by a library of others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from client_app.gradients import example_gradients
from regionfed.privacy.accountant import count_releases, epsilon, epsilon_rdp
from regionfed.vector import Layout
from tests.conftest import FAMILIES, tiny_cnn, tiny_images

accountants: Any = pytest.importorskip("opacus.accountants")
opacus: Any = pytest.importorskip("opacus")
validators: Any = pytest.importorskip("opacus.validators")


@pytest.mark.parametrize(("z", "q", "rounds"), [(4.0, 0.1, 50), (1.2, 0.15, 25), (2.0, 0.01, 500)])
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
def test_its_accountants_agree(z: float, q: float, rounds: int) -> None:
    """Ours is between nothing and its PRV, which allows itself an error of 0.01; RDP is RDP."""
    counts = count_releases([(z, q)] * rounds)
    prv, rdp = accountants.PRVAccountant(), accountants.RDPAccountant()
    prv.history = rdp.history = [(z, q, rounds)]
    assert epsilon(counts, 1e-5) == pytest.approx(prv.get_epsilon(1e-5), abs=0.02)
    assert epsilon_rdp(counts, 1e-5) == pytest.approx(rdp.get_epsilon(1e-5), rel=0.02)
    assert epsilon(counts, 1e-5) < rdp.get_epsilon(1e-5)


def test_its_gradients_of_single_examples_are_ours() -> None:
    """Hooks on layers there, `vmap` of a functional call here; convolutions and GroupNorm."""
    task, examples = tiny_cnn(), tiny_images()
    batch = task.encode(examples)
    layout = Layout.of(task.module)
    ours, _ = example_gradients(task, layout.tensors(layout.read(task.module)), batch)
    hooked = opacus.GradSampleModule(copy.deepcopy(task.module).train(), loss_reduction="sum")
    nn.functional.cross_entropy(
        hooked(batch["pixels"]), batch["labels"], reduction="sum"
    ).backward()
    theirs = {name: p.grad_sample for name, p in hooked._module.named_parameters()}
    assert set(ours) <= set(theirs)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_finds_no_layer_that_mixes_examples(family: str) -> None:
    """T5, RoBERTa and the CNN; with BatchNorm in its place it does."""
    make, _ = FAMILIES[family]
    module = copy.deepcopy(make(0).module).train()
    assert validators.ModuleValidator.validate(module, strict=False) == []
    mixed = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).train()
    assert validators.ModuleValidator.validate(mixed, strict=False) != []
