"""Dynamic: Grad, Interp or Meta, by what the region is like."""

from regionfed.config import Config
from regionfed.personaliser import Personaliser, Proposal, Query, Released
from strategies.personalisers.grad import Grad
from strategies.personalisers.interp import Interp
from strategies.personalisers.meta import Meta


def route(
    released: Released,
    *,
    conflict_threshold: float,
    divergence_threshold: float,
    size_threshold: float,
) -> tuple[str, str]:
    """Return the name of the personaliser for a region, and why in words.

    * d_r > tau_d and h_r > tau_h: ``meta``. The region pulls another way and asks for other
      things, so it needs a start from which it can go its own way.
    * else n_r > tau_n times the mean: ``interp``. It has enough data to walk by itself.
    * else ``grad``, which costs nothing.

    tau_d is `conflict_threshold` times round 1's median, so that it means the same whatever the
    size of gradients. A pure function of released values: free, and the same whenever asked.
    """
    d, tau_d = released.conflict, conflict_threshold * released.median_conflict
    h, tau_h = released.divergence, divergence_threshold
    n, tau_n = released.examples, size_threshold * released.mean_examples
    by_conflict = f"conflict {d:.3g} {_side(d > tau_d)} {tau_d:.3g}"
    by_labels = f"label divergence {h:.3g} {_side(h > tau_h)} {tau_h:.3g}"
    by_size = (
        f"size {n:.0f} {_side(n > tau_n)} {size_threshold:g} x mean {released.mean_examples:.0f}"
    )
    if d > tau_d and h > tau_h:
        return "meta", f"{by_conflict} and {by_labels}"
    name = "interp" if n > tau_n else "grad"
    short = by_conflict if d <= tau_d else by_labels
    return name, f"{by_size}; not meta, for {short}"


def _side(above: bool) -> str:
    return "above" if above else "not above"


class Dynamic:
    """Routes each region by `route`, anew each time; the noise is planned for the dearest way."""

    measures_conflict = True
    searches_rho = True
    accumulates = False
    compares_labels = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ways: dict[str, Personaliser] = {
            "grad": Grad(config),
            "interp": Interp(config),
            "meta": Meta(config),
        }
        self.queries = max(way.queries for way in self._ways.values())

    def propose(self, released: Released, query: Query) -> Proposal:
        """Let the personaliser that fits the region propose."""
        config = self._config
        name, why = route(
            released,
            conflict_threshold=config.conflict_threshold,
            divergence_threshold=config.divergence_threshold,
            size_threshold=config.size_threshold,
        )
        proposal = self._ways[name].propose(released, query)
        return Proposal(proposal.direction, name, f"{why}; {proposal.reason}")
