"""The sketch: linear, right on average, and the same on every device."""

import pytest
import torch
from torch import nn

from regionfed.sketch import sketch, sketch_signs
from regionfed.vector import Layout
from tests.conftest import tiny_t5


def layout_of(*sizes: int) -> Layout:
    module = nn.Module()
    for i, n in enumerate(sizes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(n)))
    return Layout.of(module)


def sketched(layout: Layout, vectors: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    return sketch(layout.views(vectors), sketch_signs(layout, size, seed))


@pytest.mark.parametrize("size", [1, 4, 7, 64])
@pytest.mark.parametrize("sizes", [(5,), (8, 3), (4, 4), (1, 17, 2)])
def test_it_is_the_count_sketch_that_is_documented(sizes: tuple[int, ...], size: int) -> None:
    """Coordinate i of a tensor goes to bucket i mod k with its sign; nothing is lost."""
    layout = layout_of(*sizes)
    vectors = torch.arange(3.0 * layout.size).view(3, layout.size) - 7.0
    signs = sketch_signs(layout, size, 0)
    expected = torch.zeros(3, size)
    for name, view in layout.views(vectors).items():
        for i in range(view.shape[1]):
            expected[:, i % size] += signs[name].reshape(-1)[i] * view[:, i]
    assert torch.allclose(sketched(layout, vectors, size, 0), expected, atol=1e-4)


def test_signs_are_signs_and_the_padding_is_zero() -> None:
    """Every coordinate counts exactly once."""
    layout = layout_of(10)
    (signs,) = sketch_signs(layout, 4, 0).values()
    flat = signs.reshape(-1)
    assert torch.equal(flat[:10].abs(), torch.ones(10))
    assert torch.equal(flat[10:], torch.zeros(2))
    assert -10 < float(flat.sum()) < 10


def test_it_is_linear() -> None:
    """The sketch of a sum is the sum of sketches, so regions' sketches can be averaged."""
    layout = Layout.of(tiny_t5())
    a, b = torch.randn(2, 1, layout.size, generator=torch.Generator().manual_seed(0))
    left = sketched(layout, 2.0 * a - b, 32, 1)
    right = 2.0 * sketched(layout, a, 32, 1) - sketched(layout, b, 32, 1)
    assert torch.allclose(left, right, atol=1e-3)


def test_rows_do_not_mix() -> None:
    """Each example has its own sketch."""
    layout = layout_of(9, 4)
    vectors = torch.randn(3, 13, generator=torch.Generator().manual_seed(0))
    together = sketched(layout, vectors, 5, 0)
    alone = torch.cat([sketched(layout, row[None], 5, 0) for row in vectors])
    assert torch.allclose(together, alone, atol=1e-6)


def test_the_squared_norm_is_right_on_average_over_seeds() -> None:
    """E ||S g||^2 = ||g||^2, within four standard errors of 2000 seeds."""
    layout = layout_of(50, 23)
    g = torch.randn(1, 73, generator=torch.Generator().manual_seed(0))
    norms = torch.stack([sketched(layout, g, 8, seed).square().sum() for seed in range(2000)])
    standard_error = float(norms.std()) / 2000**0.5
    assert abs(float(norms.mean() - g.square().sum())) < 4.0 * standard_error
    assert float(norms.max()) > float(g.square().sum())  # it can lengthen: hence its own clip


def test_devices_of_a_run_agree_on_the_signs() -> None:
    """The same layout, size and seed give the same signs; another seed gives others."""
    layout = layout_of(40)
    one = sketch_signs(layout, 8, 3)["p0"].clone()
    sketch_signs.cache_clear()
    torch.manual_seed(99)
    assert torch.equal(one, sketch_signs(layout, 8, 3)["p0"])
    assert not torch.equal(one, sketch_signs(layout, 8, 4)["p0"])


def test_it_stays_on_the_device_of_the_gradients() -> None:
    """Sums on an accelerator need no copy; the meta device stands for one."""
    layout = layout_of(9, 4)
    signs = {name: sign.to("meta") for name, sign in sketch_signs(layout, 5, 0).items()}
    found = sketch(layout.views(torch.zeros(3, 13, device="meta")), signs)
    assert found.device.type == "meta" and found.shape == (3, 5)


def test_an_empty_batch_has_an_empty_sketch() -> None:
    """No example, no row; not an error."""
    layout = layout_of(9)
    assert sketched(layout, torch.zeros(0, 9), 4, 0).shape == (0, 4)
