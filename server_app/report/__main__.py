"""Render the report of a run again: ``python -m server_app.report RUN_FOLDER``."""

import argparse
import sys

from regionfed.errors import RunError
from server_app.report.report import write_report
from server_app.run_folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    """Render one report and say where it is; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m server_app.report", description=__doc__)
    parser.add_argument("run", nargs="?", default="latest", help="a run's folder, id, or 'latest'")
    try:
        page = write_report(RunFolder.open(parser.parse_args(arguments).run).path)
    except RunError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{page}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
