"""The ``ddp`` command. Whatever the dashboard can do to a run, this can, by the same functions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ddp_core import cli_output as out
from ddp_core import runs
from ddp_core.config import apply_overrides, describe_fields, from_dict, load_dict
from ddp_core.errors import UserError
from ddp_core.runs import RunDir, Store
from ddp_core.runs.evidence import latest

app = typer.Typer(
    name="ddp",
    help="Launch, watch and stop PyTorch DistributedDataParallel runs.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Folder of the runs; default $DDP_STORE, else ./experiments.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, such as digits-1.")]

Document = TypeVar("Document")

_SHOW_EVERY_S = 1.0
_INTERRUPTED = 130  # what typer makes of Ctrl-C
_LAUNCH_HELP = """Start a run from a config file.

The run goes on by itself when this command ends. Fields, for the file and for --set:

""" + "\n\n".join(f"\b\n{field}" for field in describe_fields())


@app.command("launch", help=_LAUNCH_HELP)
def launch_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The config file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field, such as lr=0.1.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Stay and print progress until the run ends.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start a run; with ``--follow`` the exit code is 1 unless it finishes."""
    run = runs.launch(from_dict(apply_overrides(load_dict(config), overrides or [])), Store(store))
    if as_json:
        out.json_line({"id": run.id, "dir": str(run.path), "state": "queued"})
    else:
        out.say(f"{run.id} is launched; its directory is {run.path}")
    return _follow(run, as_json) if follow else 0


@app.command("ls")
def ls_command(store: StoreOption = None, as_json: JsonOption = False) -> int:
    """List the runs, newest first."""
    _print(runs.ls(Store(store)), as_json, out.run_table)
    return 0


@app.command("show")
def show_command(run: RunArgument, store: StoreOption = None, as_json: JsonOption = False) -> int:
    """Show everything known about a run."""
    _print(runs.show(Store(store).run(run)), as_json, out.run_details)
    return 0


@app.command("stop")
def stop_command(
    run: RunArgument,
    grace: Annotated[
        float | None, typer.Option("--grace", min=0, help="Seconds to let it end by itself, instead of its own.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Stop a run and wait until nothing of it is left."""
    found = Store(store).run(run)
    runs.stop(found, grace, wait=True)
    _print(runs.show(found), as_json, lambda document: out.say(f"{run}: {document['reason'] or document['state']}"))
    return 0


@app.command("resume")
def resume_command(
    run: RunArgument,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="One of the run's (model_epoch3.pth, latest, best) or a path; default: its newest whole one.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Stay and print progress until the run ends.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Continue a run that has ended, from a checkpoint; with ``--follow`` the exit code is 1 unless it finishes."""
    opened = Store(store)
    found = opened.run(run)
    runs.resume(found, opened, from_checkpoint=checkpoint)
    if as_json:
        out.json_line({"id": found.id, "dir": str(found.path), "state": "queued"})
    else:
        out.say(f"{run} goes on from {checkpoint or 'its newest checkpoint'}")
    return _follow(found, as_json) if follow else 0


@app.command("logs")
def logs_command(
    run: RunArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Stay and print new lines until the run ends.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Print what the ranks of the latest attempt wrote to stdout and stderr."""
    found = Store(store).run(run)
    nproc = found.state().nproc_per_node
    if rank is not None and rank >= nproc:
        raise UserError(f"{run} has ranks 0 to {nproc - 1}, no rank {rank}")
    for number, stream, line in out.log_lines(found, [rank] if rank is not None else list(range(nproc)), follow):
        if as_json:
            out.json_line({"rank": number, "stream": stream, "line": line})
        else:
            out.say(line if rank is not None else f"[rank{number}] {line}")
    return 0


@app.command("gpus")
def gpus_command(
    watch: Annotated[bool, typer.Option("--watch", help="Print again every second until interrupted.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show every GPU of this machine, its load and who uses it."""
    while True:
        _print(runs.gpus_document(), as_json, out.gpu_table)
        if not watch:
            return 0
        time.sleep(_SHOW_EVERY_S)


def _print(document: Document, as_json: bool, for_people: Callable[[Document], None]) -> None:
    if as_json:
        out.json_line(document)
    else:
        for_people(document)


def _follow(run: RunDir, as_json: bool) -> int:
    """Print changes of state, progress once a second, and at last the show document."""
    for line in _progress(run):
        _print(line, as_json, out.progress)
    document = runs.show(run)
    _print(document, as_json, out.run_details)
    return 0 if document["state"] == "finished" else 1


def _progress(run: RunDir) -> Iterator[dict[str, Any]]:
    said, next_progress = "queued", 0.0
    while True:
        state = runs.ensure_supervised(run)
        changed = state.state != said
        if changed or (state.state == "running" and time.monotonic() >= next_progress):
            said, next_progress = state.state, time.monotonic() + _SHOW_EVERY_S
            line: dict[str, Any] = {"id": run.id, "state": str(state.state)}
            if state.state != "starting":
                last = latest(run, state.attempt, state.nproc_per_node)
                loss = {str(rank): value for rank, value in last["loss"].items()}
                line |= {"step": last["step"], "epoch": last["epoch"], "loss": loss}
            yield line
        if state.state.ended:
            return
        time.sleep(0.1)


def main() -> None:
    """Run the command: exit code 0 done, 1 the run failed, 2 bad usage or config in one line on stderr."""
    try:
        # With nothing to do, say what there is to do.
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UserError as error:
        code = _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except typer.TyperException as error:
        # Bad usage. Its own text may add a usage line and a hint; the first line says what was wrong.
        code = _refuse(error.format_message())
    except (BrokenPipeError, SystemExit):  # typer turns the first into the second
        code = 0  # the reader, such as head, has seen enough
        sys.stdout = None  # nothing is left to flush it to
    if code == _INTERRUPTED:
        print("interrupted; a launched run goes on by itself, `ddp stop RUN` ends it", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> int:
    print(f"ddp: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
