"""Activation checkpointing: a block's activations are computed again where its gradient needs them.

A model then holds what goes into each of its blocks and, in the backward pass, the activations of
one block at a time (Chen et al. 2016, *Training deep nets with sublinear memory cost*, a segment
for each block). It costs one more forward pass.

`torch.utils.checkpoint` cannot do it here: it needs hooks on saved tensors, which `torch.func`
forbids, and it recomputes with the module's own weights, while gradients of single examples are
taken of weights that are handed in. So a block is made a function of all tensors that it reads, the
weights of that moment among them: one that can be mapped over examples and differentiated twice.
"""

from collections.abc import Callable
from itertools import compress
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call, vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

from regionfed.errors import ConfigurationError

Tensors = tuple[torch.Tensor, ...]


def recompute_blocks(module: nn.Module) -> None:
    """Have each block of a model recompute its activations: changed in place, its values are not.

    A block must be a function of the tensors that it is called with and of its weights: without
    dropout, without state.

    Raises
    ------
    ConfigurationError
        If the model has no blocks.
    """
    blocks = blocks_of(module)
    if not blocks:
        raise ConfigurationError(
            f"gradient-checkpointing=true: {type(module).__name__} has no list of blocks "
            f"(nn.ModuleList) that could be recomputed one by one. Set it to false, and a smaller "
            f"microbatch where memory is short."
        )
    for block in blocks:
        # A method of an object, unlike a closure, follows a block into its deep copies.
        block.forward = _Block(block).recomputed


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the members of every outermost `nn.ModuleList`, as transformers have them."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in blocks_of(child)]


class _Block(nn.Module):
    """A block as it was, and as one that recomputes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._as_it_was = block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block as it was."""
        return self._as_it_was(*args, **kwargs)

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Call it such that nothing is kept but what it reads; without gradients, as it was."""
        if not torch.is_grad_enabled():
            return self(*args, **kwargs)
        # Within a functional_call these are the tensors that were handed in.
        weights = dict(self.named_parameters(remove_duplicate=False))
        given, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)]
        result: list[Any] = []  # leaves of what the block returned, and their form

        def call(*tensors: torch.Tensor) -> Tensors:
            leaves = list(given)
            for place, tensor in zip(places, tensors[len(weights) :], strict=True):
                leaves[place] = tensor
            handed = dict(zip(weights, tensors[: len(weights)], strict=True))
            args, kwargs = tree_unflatten(leaves, form)
            result[:] = tree_flatten(functional_call(self, handed, args, kwargs, tie_weights=False))
            return tuple(leaf for leaf in result[0] if isinstance(leaf, torch.Tensor))

        read = (*weights.values(), *(given[place] for place in places))
        found = iter(cast(Any, _Recomputed).apply(call, *read))
        returned, form_returned = result
        whole = [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in returned]
        return tree_unflatten(whole, form_returned)


class _Recomputed(torch.autograd.Function):
    """Calls a function of tensors, and again for its gradient; for `torch.func`, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Callable[..., Tensors], *tensors: torch.Tensor) -> Tensors:
        # What is returned as it came in would be an input and an output at once.
        return tuple(output.view_as(output) for output in call(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *tensors = inputs
        ctx.numbers = [tensor.is_floating_point() for tensor in output]
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Views: what a transform that has ended left is a tensor again after any operation.
        tensors = [tensor.view_as(tensor) for tensor in ctx.saved_tensors]
        places = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]

        def again(*some: torch.Tensor) -> Tensors:
            whole = list(tensors)
            for place, tensor in zip(places, some, strict=True):
                whole[place] = tensor
            return tuple(compress(ctx.call(*whole), ctx.numbers))

        pull_back = vjp(again, *(tensors[place] for place in places))[1]
        # Where this is differentiated once more, gradients are enabled.
        back = pull_back(
            tuple(compress(gradients, ctx.numbers)), retain_graph=torch.is_grad_enabled()
        )
        found = dict(zip(places, back, strict=True))
        return (None, *(found.get(place) for place in range(len(tensors))))
