"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from realmops.options import Options as Options

Command = Callable[..., Iterable[str] | None]

PATH = click.Path(path_type=Path)
file = partial(click.option, type=PATH)
flag = partial(click.option, is_flag=True)
folders = partial(file, metavar="FOLDER", multiple=True)
count = partial(click.option, type=click.IntRange(min=1))


def repeated(option: str, name: str, metavar: str, help: str, type: Any = None) -> Callable[[Command], Command]:
    return click.option(option, name, multiple=True, metavar=metavar, help=f"{help} Repeatable.", type=type)


existing_folder = partial(click.option, type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="FOLDER")


def _root(must_exist: bool) -> Callable[[Command], Command]:
    folder = click.Path(path_type=Path, exists=must_exist, file_okay=False)
    help = "The folder of the run, with data/, models/ and results/."
    return click.option("--root", type=folder, default=Path(), help=help)


new_root, existing_root = _root(False), _root(True)
watch_parent = click.option("--watch-parent", type=int, metavar="PID", help="End when this parent process ends.")
question_files = click.argument("files", nargs=-1, required=True, type=PATH)
format = click.option(
    "--format", default="auto", metavar="NAME", help="jsonl, json, curatedtrec, dpr, csv, or auto: detect by content."
)
model = click.option(
    "--model",
    metavar="models:/NAME@champion",
    help="The champion in MLflow's registry; default: the run in --root, with its newest update.",
)


_params = file(
    "--params",
    default=Path("params.yaml"),
    help="The file of options that differ from the defaults; paths in it are relative to its folder.",
)
_preset = repeated(
    "--preset", "presets", "NAME", "Apply a preset: presets/NAME.yaml, a built-in preset NAME, or the file NAME."
)
_set = repeated("--set", "settings", "SECTION.KEY=VALUE", "Set one option, for example pretrain.steps=100.")


def params(command: Command) -> Command:
    return _params(_preset(_set(command)))


def load_options(params: Path, presets: Sequence[str], settings: Sequence[str]) -> Options:
    from realmops import config

    return config.load_params(params, presets=presets, settings=settings)


def options(command: Command) -> Command:
    """Add --params, --preset and --set to a command, which gets ``options`` and the folder of the file, ``project``."""

    @params
    @wraps(command)
    def with_options(params: Path, presets: Sequence[str], settings: Sequence[str], **others: Any) -> Any:
        return command(options=load_options(params, presets, settings), project=params.parent, **others)

    return with_options
