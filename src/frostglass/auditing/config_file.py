"""Reads a TOML config, with settings from the command line on top."""

import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from frostglass.auditing.expand import assign, merge
from frostglass.core.errors import ConfigError


def demo_config() -> dict[str, Any]:
    """Return the config of the demo, which ships with the package."""
    return tomllib.loads(resources.files("frostglass.auditing").joinpath("demo.toml").read_text())


def read_config(path: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file and apply settings, as `parse_settings` does."""
    return parse_settings(_read(path), settings)


def parse_settings(config: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings to a config, in their order; return the new one.

    A setting is `a.b=value` (a TOML value, or a bare word as text), or the path of a TOML file:
    its tables are merged into the config's, and a method's table replaces another's.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals and key.endswith(".toml"):
            config = merge(config, _read(Path(key)))
            continue
        if not equals or not key.strip():
            raise ConfigError(
                "expected name=value, such as attack.steps=100, or a TOML file of settings; got "
                f"{setting!r}"
            )
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):
            value = text
        assign(config, key.strip(), value)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; give the path of a TOML file"
        ) from None
    # Also of numbers with thousands of digits, and of lists nested a thousand times.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}; correct it there, as UTF-8 text"
        ) from None


def read_with_generator(
    path: Path,
    settings: Sequence[str],
    source: str | None,
    latent: str | None,
    span: str | None,
    *,
    resize: bool,
    trust: bool = False,
) -> dict[str, Any]:
    """Read a config; a generator of the user's own, if given, replaces its prior."""
    generator = generator_settings(source, latent, span, resize=resize, trust=trust)
    values = read_config(path, [*generator, *settings])
    grid = values.get("grid", {})
    cases = grid.get("case", []) if isinstance(grid, dict) else []
    with_prior = [
        str(case.get("case", number))
        for number, case in enumerate(cases if isinstance(cases, list) else [])
        if isinstance(case, dict) and "prior" in case
    ]
    if source is not None and with_prior:
        raise ConfigError(
            f"--prior replaces the prior of the whole config, and its case {with_prior[0]!r} "
            "sets its own: remove one of the two"
        )
    return values


def generator_settings(
    source: str | None, latent: str | None, span: str | None, *, resize: bool, trust: bool
) -> list[str]:
    """Return the setting that makes a user's generator the config's prior; [] without one."""
    if source is None:
        options = {"--latent": latent, "--range": span, "--resize": resize, "--trust": trust}
        if used := [name for name, value in options.items() if value]:
            raise ConfigError(
                f"{used[0]} describes a generator, got none: name it with --prior, such as "
                "--prior onnx:gen.onnx"
            )
        return []
    if latent is None:
        raise ConfigError("--prior needs --latent, the generator's input: --latent normal:512")
    black, _, white = ("-1:1" if span is None else span).partition(":")
    try:
        values = [float(black), float(white)]
    except ValueError:
        raise ConfigError(
            "--range: expected the generator's output for black and white, such as -1:1 or 0:255, "
            f"got {span!r}"
        ) from None
    # A JSON text is a TOML text.
    text = [json.dumps(value, ensure_ascii=False) for value in (source, latent)]
    return [
        f'prior={{ name = "generator", source = {text[0]}, latent = {text[1]}, range = {values}, '
        f"resize = {str(resize).lower()}, trust = {str(trust).lower()} }}"
    ]
