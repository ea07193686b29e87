"""The defenses of a table's row as tables of a config: published, or scaled to a small world."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from frostglass.core.errors import DataError

Method = dict[str, Any]
Values = Mapping[str, float]
NUMBER = r"(\w+)=(-?\d+(?:\.\d+)?)"
ACTIVATION = re.compile(r"activation=(\w+)")
FROZEN = re.compile(r"freeze ratio (\d+) percent")
# Crafter's code divides by 64 * 64 * 64 where a feature has 64 * 16 * 16 values.
CRAFTER_Z_BETA = 16
# For images in [-1, 1]; ours are in [0, 1].
ADV_LEARN_PIXEL = 4


def published_methods(defense: str, setting: str) -> list[Method]:
    """Return the defenses of a row; parameters that the row does not state are left out."""
    if defense.startswith("none"):
        return []
    values = {name: float(number) for name, number in re.findall(NUMBER, setting)}
    names = defense.split("+")
    if unknown := [name for name in names if name not in MAKERS]:
        raise DataError(f"no method for the published defense {unknown[0]!r}: expected {MAKERS}")
    return [MAKERS[name](values, setting) for name in names]


def _mid(values: Values, setting: str) -> Method:
    return {"name": "mid"} | _renamed(values, {"lambda": "weight"})


def _bido(measure: str) -> Callable[[Values, str], Method]:
    def make(values: Values, setting: str) -> Method:
        weights = {name: values.get(name, 0.0) for name in ("lambda_x", "lambda_y")}
        return {"name": "bido", "measure": measure} | (weights if any(weights.values()) else {})

    return make


def _smoothing(values: Values, setting: str) -> Method:
    return {"name": "label_smoothing"} | _renamed(values, {"alpha": "alpha"})


def _transfer(values: Values, setting: str) -> Method:
    if frozen := FROZEN.search(setting):
        return {"name": "transfer", "ratio": int(frozen[1]) / 100}
    # "theta_C/theta_T=13.9/16.8 M" reads as theta_T = 13.9.
    millions = values.get("theta_C", values.get("theta_T"))
    if millions is None:
        return {"name": "transfer"}
    return {"name": "transfer", "boundary": "parameters", "parameters": round(millions * 1e6, 3)}


def _calor(adapted: bool) -> Callable[[Values, str], Method]:
    def make(values: Values, setting: str) -> Method:
        method: Method = {"name": "calor", "a": 1.0 if adapted else 0.0}
        if "rank" in values:
            method["rank"] = int(values["rank"])
        if activation := ACTIVATION.search(setting):
            method["activation"] = activation[1].lower()
        elif not adapted:
            method["activation"] = "tanh"
        return method

    return make


def _adv_learn(values: Values, setting: str) -> Method:
    return {
        "name": "adv_learn",
        "pixel": ADV_LEARN_PIXEL * values.get("lambda1", 1.0),
        "perceptual": values.get("lambda2", 0.0),
    }


def _crafter_z(values: Values, setting: str) -> Method:
    named = {"lr": values["lr_z"], "beta": values["beta"] / CRAFTER_Z_BETA}
    return {"name": "crafter_z", "variant": "published"} | named


def _renamed(values: Values, names: Mapping[str, str]) -> Method:
    return {ours: values[theirs] for theirs, ours in names.items() if theirs in values}


MAKERS: dict[str, Callable[[Values, str], Method]] = {
    "MID": _mid,
    "BiDO-COCO": _bido("coco_frobenius"),
    "BiDO-HSIC": _bido("hsic_nocco"),
    "LS": _smoothing,
    "TL": _transfer,
    "CALoR": _calor(adapted=True),
    "LoR (no confidence adaptation)": _calor(adapted=False),
    "adversarial reconstruction": _adv_learn,
    "Crafter-z": _crafter_z,
}


def small_methods(
    defense: str,
    setting: str,
    strengths: Mapping[str, Mapping[str, Any]],
    extras: Mapping[str, Method],
) -> list[Method]:
    """Return the defenses of a row at strengths that a small network can take.

    `strengths` has `ranks`, `frozen` and `unstated`; `extras` are parameters by defense.
    """
    methods = published_methods(defense, setting)
    if any(set(method) <= {"name", "measure", "a"} for method in methods):
        methods = published_methods(defense, strengths.get("unstated", {}).get(defense, ""))
    return [_scaled(method, strengths) | extras.get(method["name"], {}) for method in methods]


def _scaled(method: Method, strengths: Mapping[str, Mapping[str, Any]]) -> Method:
    scaled = {name: value for name, value in method.items() if name != "variant"}
    if "rank" in scaled:
        scaled["rank"] = _entry(strengths, "ranks", f"{scaled['rank']}")
    if millions := scaled.pop("parameters", None):
        del scaled["boundary"]
        scaled["ratio"] = _entry(strengths, "frozen", f"{millions / 1e6:g}")
    return scaled


def _entry(strengths: Mapping[str, Mapping[str, Any]], kind: str, key: str) -> Any:
    if key not in strengths.get(kind, {}):
        raise DataError(f"the small world has no entry {key!r} in strengths.{kind}: add it")
    return strengths[kind][key]
