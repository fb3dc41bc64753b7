"""The ServerApp: Flower's door to a run."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from regionfed.config import Config
from server_app.backend import spare_ray
from server_app.run import execute
from server_app.stopping import StopWatch

app = ServerApp()

spare_ray()  # now, for Flower loads its backend right after this module


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the simulated federation that the run configuration describes.

    In simulation the regions live in processes of this app, behind a Grid of its own: Flower's
    simulation backend carries no message and no gradient.
    """
    del grid
    with StopWatch() as watch:
        execute(
            Config.from_run_config(context.run_config),
            run_id=context.run_id,
            stopping=watch.reason,
        )
