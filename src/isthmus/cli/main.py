"""The command line. One file per command; this one turns errors into one line and the exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from isthmus import __version__
from isthmus.cli import (
    advise,
    audit,
    client_keys,
    compare,
    data,
    demo,
    disclose,
    link,
    listing,
    predict,
    report,
    reproduce,
    resume,
    run,
    server,
    status,
    stop,
    submit,
    sweep,
    trilemma,
    watch,
)
from isthmus.errors import IsthmusError

# typer carries click inside since 0.26 and depended on it before: its public exceptions lead to the base class in both.
ClickException: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    name="isthmus",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated graph learning: train graph neural networks over graphs that are split between owners.",
)


@app.callback(invoke_without_command=True)
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"isthmus {__version__}")
        raise typer.Exit
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s"
    )


SUMMARIES = {
    demo: "Five banks, eight methods: table, report, predictions.",
    run: "Run a method and write a run folder.",
    resume: "Continue a stopped run, or give a finished one more rounds.",
    compare: "Run several methods on the same data, splits and seeds.",
    sweep: "Run a method over a grid of settings.",
    report: "Write one HTML page about finished runs.",
    watch: "Show a run in a browser while it is going on.",
    predict: "Predict with trained models, also on new data.",
    advise: "Propose methods for a data set; trains nothing.",
    trilemma: "Compare score, bytes and what attacks recover.",
    reproduce: "Run a published table, ours beside the paper's numbers.",
    disclose: "Print who will see what, before a run.",
    audit: "List, or carry out, the attacks on what a run sent.",
    link: "Count the edges that two owners of tables both list.",
    submit: "Submit a run to a federation and wait for its result.",
    status: "Show a federation: server, organisations, runs.",
    stop: "Stop a run of a federation, or its server.",
}
"""Commands in the order of the help, each with its line there; a command's own help says more."""

for module, summary in SUMMARIES.items():
    app.command(module.NAME, short_help=summary)(module.command)
app.command("methods", short_help="List methods, or the settings of one.")(listing.methods)
app.command("datasets", short_help="List everything --dataset accepts.")(data.datasets)
app.command("partitions", short_help="List partitions and splits, or what one does to a graph.")(data.partitions)
for group in (data, server, client_keys):
    app.add_typer(group.app, name=group.NAME)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code. 0 success, 2 usage, 3 data, 4 failed run, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    given = [g for g in given if g != "--debug"] or ["--help"]
    try:
        code = app([*(["--debug"] if debug else []), *given], standalone_mode=False, prog_name="isthmus")
        sys.stdout.flush()
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its message is the help
            print(error, file=sys.stderr)
            return 2
        return _print_error(_one_line(error), 2, debug)
    except IsthmusError as error:
        return _print_error(str(error), error.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _output_closed()
    except OSError as error:
        if error.filename is None:  # no path that the user could mend
            raise
        code = 4 if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else 2
        return _print_error(f"{error.filename}: {error.strerror}; name another file or folder", code, debug)
    except SystemExit as exit_:  # how typer and rich react to a broken pipe
        if isinstance(exit_.__context__, BrokenPipeError):
            return _output_closed()
        raise
    return code if isinstance(code, int) else 0


def _output_closed() -> int:
    """`isthmus methods | head` is no error. What is still in the buffer must not fail when Python closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print_error(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"isthmus: {' '.join(message.split())}", file=sys.stderr)
    return code


def _one_line(error: Any) -> str:
    """The error, and what is allowed."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    if context is None:
        return str(message)
    options = {name for parameter in context.command.params for name in parameter.opts}
    if message.startswith("Got unexpected extra") and "--dataset" in options:
        return f"{message} (a data set is given as --dataset NAME; see {context.command_path} --help)"
    if not message.startswith("No such"):
        return f"{message} (see {context.command_path} --help)"
    commands = sorted(getattr(context.command, "commands", {}))
    return f"{message} (allowed: {', '.join(commands or sorted(name for name in options if name.startswith('--')))})"


if __name__ == "__main__":
    sys.exit(main())
