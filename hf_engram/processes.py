"""For scripts: as many processes as were launched must work together, or each would do all of the work."""

import os


# What torchrun, accelerate and the launchers of MPI say.
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_processes(number: int = 1) -> None:
    """Ends the script unless it was launched in as many processes as work together: two that know nothing of each
    other would write into one folder.

    Args:
        number: the processes that work together; 1 for a script that knows no others.
    """
    for name in SIZES:
        size = os.environ.get(name, str(number))
        if size != str(number):
            together = "processes work together" if number > 1 else "process works"
            raise SystemExit(
                f"error: {size} processes were launched ({name}), but {number} {together} here. Start it with `python`"
                " alone; if it trains, with `torchrun` and ACCELERATE_USE_CPU=true for several on the CPU."
            )
