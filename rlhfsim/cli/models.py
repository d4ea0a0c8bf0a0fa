"""`rlhfsim models`: the model presets and their shapes."""

from __future__ import annotations

from typing import Any

import click

from rlhfsim.cli.params import Told, command, json_option, on_command_line
from rlhfsim.present.answers import models as view
from rlhfsim.specs.model.presets import preset, preset_name, preset_names, resolve_model

EPILOG = """\b
Examples:
  rlhfsim models
  rlhfsim models 70b
  rlhfsim models ./config.json
"""


@command(EPILOG)
@click.argument("name", required=False)
@json_option
def models(name: str | None, **_: Any) -> Told:
    """List the models rlhfsim knows by name, or show the shape of one.

    NAME is a preset, an alias (8b, 70b), a Hugging Face id or a config.json.
    """
    if name is None:
        return Told(view.listing(view.NamedModel(preset(n), n) for n in preset_names()))
    with on_command_line():
        spec = resolve_model(name)
    return Told(view.sheet(view.NamedModel(spec, preset_name(name))))
