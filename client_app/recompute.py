"""Activation checkpointing: a block's activations are computed again where its gradient needs them.

A model then holds what goes into each of its blocks and, in the backward pass, the activations of
one block at a time (Chen et al. 2016, *Training deep nets with sublinear memory cost*, a segment
for each block). It costs one more forward pass.

`torch.utils.checkpoint` cannot do it here: it needs hooks on saved tensors, which `torch.func`
forbids, and it recomputes with the module's own weights, while gradients of single examples are
taken of weights that are handed in. So a block is made a function of all tensors that it reads, the
weights of that moment among them: one that can be mapped over examples and differentiated twice.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call, vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

from regionfed.errors import ConfigurationError

Tensors = tuple[torch.Tensor, ...]


# What may be among a block's arguments and results besides tensors: nothing that could hide one.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def recompute_blocks(module: nn.Module) -> None:
    """Have each block of a model recompute its activations: changed in place, its values are not.

    A block must be a function of its arguments and its weights, which returns all that it is called
    for: no dropout, no state, and no tensor but in (nested) lists, tuples, dictionaries and the
    results of transformers. Any other object raises `ConfigurationError` when it is met; a tensor
    that takes another way has no gradient, which ``regionfed check`` finds.

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
        if not isinstance(getattr(block.forward, "__self__", None), _Block):
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
        weights = self._weights()
        given = self._flat((args, kwargs))
        returned: list[_Flat] = []

        def call(*tensors: torch.Tensor) -> Tensors:
            handed = dict(zip(weights, tensors[: len(weights)], strict=True))
            args, kwargs = given.filled(tensors[len(weights) :])
            found = functional_call(self, handed, args, kwargs, tie_weights=False)
            result = self._flat(found)
            returned[:] = [result.emptied()]
            return result.tensors

        read = (*weights.values(), *given.tensors)
        given = given.emptied()  # what is kept for the way back is not kept twice
        found = cast(Any, _Recomputed).apply(call, *read)
        return returned[0].filled(found)

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by name, each place once; those handed in by a functional_call."""
        return {
            name: weight
            for prefix, layer in self.named_modules()
            for name, weight in layer.named_parameters(prefix, False, False)
        }

    def _flat(self, tree: Any) -> "_Flat":
        leaves, form = tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise ConfigurationError(
                    f"gradient-checkpointing=true: {type(self.block).__name__} takes or returns "
                    f"a {type(leaf).__name__}, which could hide a tensor from its gradient. Pass "
                    f"tensors in lists, tuples or dictionaries, or set it to false."
                )
        return _Flat(leaves, form)


@dataclass(frozen=True)
class _Flat:
    """The leaves of a tree, and its form."""

    leaves: list[Any]
    form: Any

    @property
    def tensors(self) -> Tensors:
        """Return the leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def emptied(self) -> "_Flat":
        """Return the same with places for its tensors."""
        leaves = [_PLACE if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return _Flat(leaves, self.form)

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the tree with these tensors in its places."""
        tensors = iter(tensors)
        leaves = [next(tensors) if leaf is _PLACE else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.form)


_PLACE = object()


class _Recomputed(torch.autograd.Function):
    """Calls a function of tensors, and again for its gradient; for `torch.func`, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Callable[..., Tensors], *tensors: torch.Tensor) -> Tensors:
        # What is returned as it came in would be an input and an output at once; and nothing that
        # is a view may be changed in place by whoever gets it.
        came_in = set(map(id, tensors))
        return tuple(
            o.view_as(o) if id(o) in came_in else o.clone() if o._is_view() else o
            for o in call(*tensors)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *tensors = inputs
        ctx.numbers = [one.is_floating_point() or one.is_complex() for one in output]
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
