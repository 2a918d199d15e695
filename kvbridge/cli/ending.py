"""How every command line here ends: an exit code, and one line on stderr for a refusal."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from kvbridge.cli.interrupt import Interrupted, interruptible
from kvbridge.cli.output import say
from kvbridge.errors import KVBridgeError, UsageError


def run_to_the_end(app: typer.Typer, program: str = "kvbridge") -> NoReturn:
    """Runs what the arguments ask for and exits: 0 on success, 2 on a usage error, 1 on any other
    refusal, 130 after Ctrl-C and 143 after SIGTERM. A bug keeps its traceback. `program` is how a
    user calls the app, for the command that goes on."""
    try:
        with interruptible():
            code = app(standalone_mode=False)
    except Interrupted as interrupted:
        say(f"kvbridge: {interrupted.line([*program.split(), *sys.argv[1:]])}")
        code = interrupted.code
    except typer.Abort:
        code = 130
    except typer.TyperException as error:
        say(_argument_error(error))
        code = 2
    except UsageError as error:
        say(f"kvbridge: {error}")
        code = 2
    except (KVBridgeError, OSError) as error:
        say(f"kvbridge: {error}")
        code = 1
    sys.exit(code)


def _argument_error(error: typer.TyperException) -> str:
    """What the argument parser found wrong, in one line; the help alone where a command was given
    nothing."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if "Usage:" in text or context is None:
        return text
    return f"kvbridge: {' '.join(text.split()).rstrip('.')}; see `{context.command_path} --help`"
