"""``python -m tvm_comfuse.verify.fuzz``: a fuzzing campaign, or one example of a seed."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def fuzz(
    count: Annotated[int, typer.Option("--examples", min=1, help="How many examples to run.")] = 2000,
    seed: Annotated[
        int | None, typer.Option(help="The same seed draws the same examples; default: a random one.")
    ] = None,
    save: Annotated[Path, typer.Option(help="Folder for the replay files of failures.")] = Path("tests/fuzz_failures"),
    profile: Annotated[str, typer.Option(help="Steps of an example: long, or ci for the quicker selection.")] = "long",
) -> None:
    """Draw clusters and plans, and run each through discovery, lowering, checks and interpreter."""
    from hypothesis import configuration

    # hypothesis would leave a folder wherever it is run
    configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "comfuse-hypothesis")
    from tvm_comfuse.verify.fuzz.campaign import CI, LONG, Summary, campaign

    efforts = {"ci": CI, "long": LONG}
    if profile not in efforts:
        raise typer.BadParameter(f"profile must be one of {', '.join(efforts)}")
    chosen = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    sys.stdout.write(f"seed {chosen}\n")

    def progress(summary: Summary) -> None:
        sys.stdout.write(f"{summary.examples} examples, {len(summary.failures)} failures\n")
        sys.stdout.flush()

    summary = campaign(count, chosen, efforts[profile], save=save, progress=progress)
    sys.stdout.write(f"{summary}\n")
    raise typer.Exit(bool(summary.failures))


if __name__ == "__main__":
    typer.run(fuzz)
