"""The commands of `splice` that train from one file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.processes.logs import log_to_stderr
from orchestrator.protocol.config import Device
from splice.client.run_file import R, folder_of, load_as, stop_command
from splice.cluster import up
from splice.cluster.elsewhere import Elsewhere
from splice.run_cli import (
    UP_TIMEOUT_S,
    Claim,
    CpusPerGpu,
    DryRun,
    FileArgument,
    GpusPerHost,
    InferenceImage,
    MemoryPerGpu,
    On,
    Overrides,
    RayAddress,
    Sbatch,
    TimeoutS,
    TrainerImage,
    say_submitted,
)

if TYPE_CHECKING:
    from splice.train.sections import TrainFile

app = typer.Typer()
KeepUp = Annotated[bool, typer.Option("--keep-up", help="Leave the run up at the end, serving.")]
Join = Annotated[
    bool, typer.Option("--join", help="Train a run whose roles others start, and end it.")
]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder to which data and rewards are relative.")
]
_HERE = Path()


def _command(name: str, about: str) -> None:
    """Add a command that trains what a file says."""

    @app.command(name, help=about)
    def command(
        file: FileArgument = _HERE,
        overrides: Overrides = None,
        keep_up: KeepUp = False,
        timeout_s: TimeoutS = UP_TIMEOUT_S,
        on: On = "host",
        dry_run: DryRun = False,
        gpus_per_host: GpusPerHost = 8,
        cpus_per_gpu: CpusPerGpu = 8,
        memory_per_gpu: MemoryPerGpu = 64,
        sbatch: Sbatch = "",
        ray_address: RayAddress = "auto",
        trainer_image: TrainerImage = "",
        inference_image: InferenceImage = "",
        claim: Claim = "splice-run",
        join: Join = False,
        data_folder: DataFolder = None,
    ) -> None:
        from splice.train import sections

        run = _loaded(getattr(sections, _FILES[name]), file, overrides)
        elsewhere = None
        if on != "host" or dry_run:
            elsewhere = Elsewhere(
                on=on,
                dry_run=dry_run,
                gpus_per_host=gpus_per_host,
                cpus_per_gpu=cpus_per_gpu,
                memory_per_gpu=memory_per_gpu,
                sbatch=sbatch,
                ray_address=ray_address,
                trainer_image=trainer_image,
                inference_image=inference_image,
                claim=claim,
            )
        folder = (data_folder or folder_of(file)).absolute()
        _run(run, folder, elsewhere, keep_up=keep_up, join=join, timeout_s=timeout_s)


_FILES = {"train": "TrainFile", "sft": "SftFile"}
_command(
    "train",
    """Train what a run.toml says, from checks to the adapter. The same command continues.

    On Slurm, Ray or Kubernetes the loop is one of the roles: it publishes @0, trains, and ends the
    run. `splice logs loop` shows its progress.
    """,
)
_command(
    "sft",
    """Train on given answers: rows with `prompt` and `completion`, or with whole `messages`.

    The file is that of `splice train`, without a reward. The same command continues, and runs on
    Slurm, Ray or Kubernetes as `splice train` does.
    """,
)


def _loaded(model: type[R], file: Path, overrides: list[str] | None) -> R:
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("splice").setLevel(logging.WARNING)  # the steps are printed
    return load_as(model, file, overrides or ())


def _run(
    run: TrainFile,
    folder: Path,
    elsewhere: Elsewhere | None,
    *,
    keep_up: bool,
    join: bool,
    timeout_s: float,
) -> None:
    """Take all steps here, or have a cluster take them."""
    from splice.train import command

    made = command.plan(run, folder)
    said = ""

    def say(text: str) -> None:
        nonlocal said
        if text != said:
            said = text
            typer.echo(text)

    say(command.step_text(made))
    if (version := command.done(made)) is None:
        if elsewhere is not None:
            state = elsewhere.start(
                run,
                resume=True,
                publish=True,
                timeout_s=timeout_s,
                on_wait=say,
                data_folder=folder,
            )
            if elsewhere.on != "ray":
                say_submitted(state, as_json=False)
            say(f"splice logs loop --follow --run {run.run_dir}")
            return
        try:
            if join:
                command.join(run, timeout_s=timeout_s, say=say)
            else:
                command.bring_up(run, timeout_s=timeout_s, say=say)
            asyncio.run(command.train(made, say))
        except (KeyboardInterrupt, SpliceError) as error:
            if join:
                up.stop(run.run_dir)
            elif up.is_alive(up.read_state(run.run_dir)):
                end = stop_command(run.run_dir)
                typer.echo(f"the run is up: the same command continues, `{end}` ends it", err=True)
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(130) from None
            raise
        version = command.done(made)
        if not keep_up:
            up.stop(run.run_dir)
    assert version is not None, "the loop ends after its last step"
    typer.echo(command.ending(made, version))


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="A run.toml, the folder that holds one, or the folder of a run.")
    ],
    hf: Annotated[
        Path | None, typer.Option(help="New folder for the whole model, merged, as HF files.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="New folder for the adapter, in PEFT's files.")
    ] = None,
    version: Annotated[
        str, typer.Option(help="A number, best (by the run's evaluations) or latest.")
    ] = "latest",
    push: Annotated[
        str, typer.Option(help="USER/NAME of a repository on the Hub, which gets the folder.")
    ] = "",
    public: Annotated[bool, typer.Option("--public", help="A new repository is public.")] = False,
    device: Annotated[
        Device, typer.Option(help="Where a version that is not served is merged.")
    ] = "cpu",
) -> None:
    """Take a version out of a run that is up or stopped, as an adapter or a whole model."""
    from splice.train import export as exporting

    if (hf is None) == (adapter is None):
        raise ConfigError("name one of --hf FOLDER and --adapter FOLDER")
    of = exporting.run_of(run)
    number = exporting.version_of(of.run_dir, version)
    if adapter is not None:
        exporting.adapter(of, number, adapter)
    elif hf is not None:
        exporting.model(of, number, hf, device=device)
    out = adapter or hf
    assert out is not None
    typer.echo(f"{of.name}@{number}: {out.absolute()}")
    if push:
        typer.echo(exporting.push(of, out, push, private=not public))


@app.command()
def mirror(
    run: Annotated[
        Path, typer.Argument(help="A run.toml, the folder that holds one, or the folder of a run.")
    ],
    store: Annotated[
        str, typer.Argument(help="A folder or a URL, such as s3://bucket/path: where to.")
    ],
    key: Annotated[
        Path | None,
        typer.Option(help="File with the private key; made if it is not there. RUN/store.key."),
    ] = None,
    full_every: Annotated[
        int, typer.Option(min=1, help="Versions from one that is written whole to the next.")
    ] = 50,
    keep: Annotated[
        int, typer.Option(min=1, help="Newest versions that stay, with what they need.")
    ] = 100,
    poll_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Write the newest version, then end.")] = (
        False
    ),
    device: Annotated[Device, typer.Option(help="Where versions are merged.")] = "cpu",
) -> None:
    """Write a run's versions to a store, from which other runs follow it.

    The run may be up. Each version is written as what changed since the one before. Runs elsewhere
    serve them under the same numbers: `trainer.follow` has the store and the public key.
    """
    from splice.train import export as exporting

    of = exporting.run_of(run)
    key = key or of.run_dir / "store.key"
    options = {"full-every": full_every, "keep": keep, "device": device}
    code = exporting.mirror(of, store, key, options, poll_s=None if once else poll_s)
    raise typer.Exit(code)


@app.command()
def replay(
    run: Annotated[
        Path, typer.Argument(help="A run.toml, the folder that holds one, or the folder of a run.")
    ],
    first: Annotated[int, typer.Option("--from", min=0, help="Version to begin from.")],
    last: Annotated[int, typer.Option("--to", min=1, help="Last version to make again.")],
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample the answers of these steps again too.")
    ] = False,
) -> None:
    """Train a stopped run's versions again, and compare each with the one on disk, bit for bit.

    With --sample also the answers that they were trained on, of a run with numerics = "exact" and
    sampling.seed. Exit code 1: a version or an answer differs.
    """
    from splice.train import export as exporting
    from splice.train import replaying, resampling

    def note(version: int, count: int) -> None:
        typer.echo(f"@{version} samples {count} answers again", err=True)

    of, differ = exporting.run_of(run), 0
    answers = resampling.repeat(of, first, last, on_version=note) if sample else {}
    for made in replaying.replay(of, first, last):
        how = "equal, bit for bit"
        if made.elements:
            how = f"{made.elements} elements differ, by at most {made.largest:.3g}"
        if (own := answers.get(made.version)) is not None:
            how += f"; {own}"
        differ += made.elements > 0 or (own is not None and bool(own.differ))
        typer.echo(f"@{made.version}: {how} ({made.seconds:.1f} s)")
    raise typer.Exit(int(differ > 0))
