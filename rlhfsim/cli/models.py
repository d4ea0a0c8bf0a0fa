"""`rlhfsim models`: the model presets and their shapes."""

from __future__ import annotations

import click

from rlhfsim.cli.params import emit, json_option, on_command_line
from rlhfsim.present.terminal import models as view
from rlhfsim.specs.model.presets import preset, preset_name, preset_names, resolve_model

EPILOG = """\b
Examples:
  rlhfsim models
  rlhfsim models 70b
  rlhfsim models ./config.json
"""


@click.command(epilog=EPILOG)
@click.argument("name", required=False)
@json_option
def models(name: str | None, as_json: bool) -> None:
    """List the models rlhfsim knows by name, or show the shape of one.

    NAME is a preset, an alias (8b, 70b), a Hugging Face id or a config.json.
    """
    if name is None:
        rows = [view.row(preset(known), known) for known in preset_names()]
        emit(as_json, lambda: {"schema": view.SCHEMA, "models": rows}, lambda: view.listing(rows))
        return
    with on_command_line():
        spec = resolve_model(name)
    details = view.details(spec, preset_name(name))
    emit(as_json, lambda: {"schema": view.SCHEMA, "models": [details]}, lambda: view.sheet(spec, details))
