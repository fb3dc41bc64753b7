"""The server's state after each round, written atomically; the regions keep their own."""

from pathlib import Path

from regionfed.config import Config
from regionfed.tensors import load_facts, load_state, save_state
from strategies.regionfed import ServerState

NAME = "checkpoint.safetensors"


def save_checkpoint(folder: Path, config: Config, state: ServerState) -> None:
    """Replace the checkpoint of a run by this round's."""
    optimiser = {f"optimiser.{k}": v for k, v in state.optimiser.items()}
    save_state(
        folder / NAME,
        {"theta": state.theta, "average": state.average, **optimiser},
        {
            "round": state.round,
            "centre": state.centre,
            "spread": state.spread,
            "config": config.to_run_config(),
        },
    )


def load_config(folder: Path) -> Config:
    """Return the configuration of a run, and read none of its state.

    Raises
    ------
    RunError
        If there is no readable checkpoint.
    """
    return Config.from_run_config(load_facts(folder / NAME)["config"])


def load_checkpoint(folder: Path) -> tuple[Config, ServerState]:
    """Return the configuration and state of a run's last completed round.

    Raises
    ------
    RunError
        If there is no readable checkpoint.
    """
    tensors, facts = load_state(folder / NAME)
    config = Config.from_run_config(facts["config"])
    state = ServerState(
        round=facts["round"],
        theta=tensors["theta"],
        average=tensors["average"],
        centre=facts["centre"],
        spread=facts["spread"],
        optimiser={
            name.removeprefix("optimiser."): value
            for name, value in tensors.items()
            if name.startswith("optimiser.")
        },
    )
    return config, state
