"""The command line's root: which commands there are, in the order in which they are used. What a
command does is in the module of its name beside this one."""

from __future__ import annotations

import typer

from kvbridge.cli.commands.asset import inspect, verify
from kvbridge.cli.commands.demo import demo
from kvbridge.cli.commands.evaluate import evaluation
from kvbridge.cli.commands.fit import fit
from kvbridge.cli.commands.gate import gate
from kvbridge.cli.commands.registry import registry_app
from kvbridge.cli.commands.screen import screen
from kvbridge.cli.ending import run_to_the_end

HELP = """Hand a conversation from one language model to another without reading it again.

While a model reads a text it fills its KV cache. When a conversation moves to another model, that
model would have to read everything again. kvbridge translates the first model's cache (the
sender's) into the second's (the receiver's) by linear maps, decides for each request whether the
translation is good enough, and measures whether it was worth it.

The commands below stand in the order in which they are used."""

TRY, MEASURE, KEEP = "1. Try it", "2. Fit a translator and measure it", "3. Gate, keep and share it"

app = typer.Typer(
    name="kvbridge",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command(rich_help_panel=TRY)(demo)
app.command(rich_help_panel=TRY)(screen)
app.command(rich_help_panel=MEASURE)(fit)
app.command(rich_help_panel=MEASURE)(inspect)
app.command(rich_help_panel=MEASURE)(verify)
app.add_typer(evaluation, name="eval", rich_help_panel=MEASURE)
app.add_typer(gate, name="gate", rich_help_panel=KEEP)
app.add_typer(registry_app, name="registry", rich_help_panel=KEEP)


def main() -> None:
    """The entry point `kvbridge`."""
    run_to_the_end(app)


if __name__ == "__main__":
    main()
