"""The procedural people: traits fixed by identity and moods fixed by photo, from a hash.

A trait depends only on (world, identity, trait name), so person 7 is the same person in every
dataset, batch and order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frostglass.data._looks import Look

ATTRIBUTES = (
    "glasses", "sunglasses", "beard", "moustache", "bald", "long_hair", "fringe", "curly_hair",
    "blond_hair", "grey_hair",
    "dark_skin", "freckles", "earrings", "lipstick", "smiling", "mouth_open", "hat",
)  # fmt: skip

SKIN = (
    (0.99, 0.87, 0.77), (0.93, 0.74, 0.60), (0.80, 0.58, 0.42), (0.58, 0.38, 0.25),
    (0.36, 0.23, 0.16),
)  # fmt: skip
HAIR = {
    "black": (0.07, 0.06, 0.07), "dark brown": (0.22, 0.13, 0.08), "brown": (0.42, 0.26, 0.14),
    "auburn": (0.50, 0.18, 0.09),
    "ginger": (0.80, 0.40, 0.12), "blond": (0.90, 0.74, 0.40), "platinum": (0.95, 0.90, 0.74),
    "grey": (0.60, 0.60, 0.62),
    "white": (0.92, 0.92, 0.92), "blue": (0.20, 0.35, 0.75), "pink": (0.92, 0.42, 0.62),
}  # fmt: skip
IRIS = (
    (0.22, 0.13, 0.07), (0.35, 0.22, 0.10), (0.30, 0.42, 0.25), (0.25, 0.45, 0.68),
    (0.45, 0.52, 0.58),
)  # fmt: skip
EARRINGS = ((0.95, 0.80, 0.30), (0.90, 0.92, 0.95))
STYLES = ("bald", "crop", "side", "bob", "long", "afro")
FRAMES = (
    (0.06, 0.06, 0.07), (0.50, 0.12, 0.10), (0.15, 0.22, 0.50), (0.78, 0.62, 0.25),
    (0.90, 0.90, 0.92),
)  # fmt: skip


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers with the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _text_hash(text: str) -> np.uint64:
    value = np.uint64(0xCBF29CE484222325)
    with np.errstate(over="ignore"):
        for byte in text.encode():
            value = (value ^ np.uint64(byte)) * np.uint64(0x100000001B3)
    return value


@dataclass(frozen=True)
class TraitRng:
    """Named uniform numbers in [0, 1), one per row; a name always gives the same numbers."""

    rows: np.ndarray  # one hash per row

    @classmethod
    def of(cls, world: int, *columns: Tensor) -> "TraitRng":
        rows = np.full(len(columns[0]), world, dtype=np.uint64)
        for column in columns:
            with np.errstate(over="ignore"):
                rows = _mix(
                    rows * np.uint64(0x9E3779B97F4A7C15)
                    + column.numpy().astype(np.uint64)
                    + np.uint64(1)
                )
        return cls(rows)

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> Tensor:
        bits = _mix(self.rows ^ _text_hash(name)) >> np.uint64(11)
        return torch.from_numpy(
            (low + (high - low) * bits.astype(np.float64) / 2**53).astype(np.float32)
        )

    def bell(self, name: str, centre: float, spread: float) -> Tensor:
        """Roughly normal numbers, at most 2.1 spreads off: the sum of three uniforms."""
        total = self.uniform(name + "/1") + self.uniform(name + "/2") + self.uniform(name + "/3")
        return centre + spread * 1.4 * (total - 1.5)

    def flip(self, name: str, share: float) -> Tensor:
        return (self.uniform(name) < share).float()

    def choice(self, name: str, shares: tuple[float, ...]) -> Tensor:
        return torch.bucketize(self.uniform(name), torch.tensor(shares).cumsum(0)[:-1])

    def colour(self, name: str, low: float, high: float) -> Tensor:
        return torch.stack([self.uniform(f"{name}/{channel}", low, high) for channel in "rgb"], 1)

    def muted(self, name: str, look: Look) -> Tensor:
        """A greyish colour, for walls."""
        return (
            self.uniform(name + "/grey", *look.wall)[:, None]
            + look.wall_colour * (self.colour(name, 0, 1) - 0.5)
        ).clamp(0.02, 0.98)


def _ramp(stops: tuple[tuple[float, ...], ...], position: Tensor) -> Tensor:
    table = torch.tensor(stops)
    scaled = position.clamp(0, 0.9999) * (len(stops) - 1)
    lower = scaled.long()
    part = (scaled - lower)[:, None]
    return table[lower] * (1 - part) + table[lower + 1] * part


def _lip(d: TraitRng, skin: Tensor, lipstick: Tensor) -> Tensor:
    bare_lip = skin * torch.tensor([0.86, 0.60, 0.58])
    ranges = {"lip r": (0.6, 0.85), "lip g": (0.05, 0.2), "lip b": (0.12, 0.4)}
    painted_lip = torch.stack([d.uniform(name, *limits) for name, limits in ranges.items()], 1)
    return torch.where(lipstick[:, None] > 0, painted_lip, bare_lip)


def traits(world: int, identity: Tensor, look: Look) -> dict[str, Tensor]:
    """Return everything that stays the same in all photos of a person."""
    d = TraitRng.of(world, identity)
    style, hair = d.choice("style", look.styles), d.choice("hair", look.hair)
    tone = d.uniform("tone", *look.tone)
    glasses = d.flip("glasses", look.glasses)
    beard_kind = d.choice("beard", look.beards)  # none, full, goatee, stubble
    has_chin_hair = ((beard_kind == 1) | (beard_kind == 2)).float()
    jitter = 0.10 * (d.colour("hair jitter", 0, 1) - 0.5)
    hair_colour = (torch.tensor(tuple(HAIR.values()))[hair] + jitter).clamp(0.03, 0.97)
    lipstick = d.flip("lipstick", 0.18) * (beard_kind == 0)
    skin = (_ramp(SKIN, tone) + 0.06 * (d.colour("skin jitter", 0, 1) - 0.5)).clamp(0.05, 1)
    return {
        "skin": skin, "hair_colour": hair_colour, "style": style, "tone": tone,
        "iris": torch.tensor(IRIS)[d.choice("iris", (0.3, 0.25, 0.15, 0.2, 0.1))],
        "lip": _lip(d, skin, lipstick),
        "width": d.bell("width", *look.width), "height": d.bell("height", *look.height),
        "jaw": d.uniform("jaw", *look.jaw),
        "square": d.uniform("square", 0.0, 0.40),
        "eye_gap": d.bell("eye gap", 0.205, 0.020), "eye_y": d.bell("eye y", -0.07, 0.025),
        "eye_size": d.bell("eye size", *look.eye_size),
        "eye_shape": d.uniform("eye shape", *look.eye_shape),
        "eye_tilt": d.bell("eye tilt", 0.0, 0.12), "brow_y": d.bell("brow y", 0.155, 0.020),
        "brow_thick": d.uniform("brow thick", *look.brow_thick),
        "brow_tilt": d.bell("brow tilt", -0.05, 0.18),
        "nose_length": d.bell("nose length", 0.175, 0.032),
        "nose_width": d.uniform("nose width", *look.nose_width),
        "mouth_y": d.bell("mouth y", 0.335, 0.025),
        "mouth_width": d.bell("mouth width", *look.mouth_width),
        "lip_thick": d.uniform("lip thick", 0.022, 0.060),
        "ear": d.uniform("ear", 0.07, 0.13),
        "hairline": d.bell("hairline", -0.36, 0.045), "parting": d.uniform("parting", -0.55, 0.55),
        "volume": d.uniform("volume", 0.05, 0.17),
        "length": d.uniform("length", 0.55, 1.0), "curl": d.flip("curl", look.curl) * (style >= 2),
        "fringe": d.flip("fringe", 0.30) * (style >= 1) * (style <= 4),
        "glasses": glasses, "sunglasses": glasses * d.flip("sunglasses", 0.22),
        "frame": torch.tensor(FRAMES)[d.choice("frame", (0.45, 0.15, 0.15, 0.15, 0.10))],
        "lens": d.uniform("lens", 0.135, 0.175), "lens_square": d.flip("lens square", 0.5),
        "rim": d.uniform("rim", 0.022, 0.042),
        "beard_kind": beard_kind,
        "moustache": torch.maximum(d.flip("moustache", 0.10), has_chin_hair),
        "lipstick": lipstick, "freckles": d.flip("freckles", 0.15) * (tone < 0.55),
        "freckle_seed": d.uniform("freckle seed", 0, 20), "earrings": d.flip("earrings", 0.20),
        "earring_colour": torch.tensor(EARRINGS)[d.choice("earring", (0.5, 0.5))],
        "mole": d.flip("mole", 0.20), "mole_x": d.uniform("mole x", -0.26, 0.26),
        "mole_y": d.uniform("mole y", 0.12, 0.36), "blush": d.uniform("blush", 0.0, 0.25),
        "smiler": d.uniform("smiler", -0.25, 0.35),
        "hair_class": hair,
    }  # fmt: skip


def moods(world: int, identity: Tensor, photo: Tensor, look: Look) -> dict[str, Tensor]:
    """Return what changes between photos: pose, expression, light, clothes, background."""
    d = TraitRng.of(world, identity, photo)
    angle = d.uniform("light angle", *look.light_angle)
    return {
        "x": d.bell("x", 0.0, 0.105), "y": d.bell("y", 0.03, 0.085),
        "zoom": d.bell("zoom", *look.zoom), "roll": d.bell("roll", 0.0, 0.20),
        "yaw": d.bell("yaw", 0.0, 0.60), "pitch": d.bell("pitch", 0.0, 0.35),
        "smile": d.bell("smile", 0.25, 0.42), "open": (d.bell("open", 0.10, 0.45)).clamp(0, 1),
        "lids": d.bell("lids", 1.0, 0.13).clamp(0.55, 1.3),
        "gaze_x": d.bell("gaze x", 0, 0.35), "gaze_y": d.bell("gaze y", 0, 0.2),
        "brow_lift": d.bell("brow lift", 0.0, 0.018),
        "light_x": angle.cos(), "light_y": angle.sin(), "light": d.uniform("light", *look.light),
        "exposure": d.bell("exposure", *look.exposure),
        "warmth": d.bell("warmth", *look.warmth), "contrast": d.bell("contrast", *look.contrast),
        "back_a": d.muted("back a", look), "back_b": d.muted("back b", look),
        "back_angle": d.uniform("back angle", 0, 6.2832),
        "blob_x": d.uniform("blob x", -1, 1), "blob_y": d.uniform("blob y", -1, 0.5),
        "blob_r": d.uniform("blob r", 0.2, 0.8), "blob": d.muted("blob", look),
        "shirt": d.colour("shirt", 0.1, 0.9), "collar": d.flip("collar", 0.4),
        "hat": d.flip("hat", look.hat), "hat_colour": d.colour("hat colour", 0.05, 0.9),
        "grain": d.uniform("grain", *look.grain), "grain_seed": d.uniform("grain seed", 0, 50),
        "shelves": d.flip("shelves", look.shelves), "shelf": d.muted("shelf", look),
        "shelf_gap": d.uniform("shelf gap", 0.35, 0.7), "shelf_y": d.uniform("shelf y", -1, 1),
        "vignette": d.uniform("vignette", *look.vignette),
    }  # fmt: skip


def attributes(person: dict[str, Tensor], mood: dict[str, Tensor]) -> Tensor:
    """Return the binary attributes of each photo, (N, len(ATTRIBUTES)), in that order."""
    colour = [tuple(HAIR).index(name) for name in ("blond", "platinum", "grey", "white")]
    hair, style = person["hair_class"], person["style"]
    smile = mood["smile"] + person["smiler"]
    bald = style == STYLES.index("bald")
    return torch.stack([
        person["glasses"] > 0, person["sunglasses"] > 0, person["beard_kind"] > 0,
        person["moustache"] > 0, bald,
        (style == STYLES.index("long")) | (style == STYLES.index("bob")), person["fringe"] > 0,
        (person["curl"] > 0) | (style == STYLES.index("afro")),
        ((hair == colour[0]) | (hair == colour[1])) & ~bald,
        ((hair == colour[2]) | (hair == colour[3])) & ~bald, person["tone"] > 0.6,
        person["freckles"] > 0, person["earrings"] > 0, person["lipstick"] > 0, smile > 0.3,
        mood["open"] > 0.3, mood["hat"] > 0,
    ], 1)  # fmt: skip
