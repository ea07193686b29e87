"""Drawing the procedural people: soft-edged shapes, painted back to front on whole batches."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from frostglass.data._people import STYLES

Values = dict[str, Tensor]
Layer = Callable[["Canvas", Values, Values, Tensor, Tensor], None]


class Canvas:
    """A batch of images being painted: coordinates from -1 to 1, y down, edges one pixel soft."""

    def __init__(self, count: int, size: int):
        axis = (torch.arange(size) + 0.5) / size * 2 - 1
        self.y, self.x = (
            g.expand(count, size, size) for g in torch.meshgrid(axis, axis, indexing="ij")
        )
        self.pixel = 2.0 / size
        self.image = torch.zeros(count, 3, size, size)

    def rows(self, rows: Tensor) -> "Canvas":
        """Return the images at `rows` as a canvas of their own."""
        part = Canvas(len(rows), self.image.shape[-1])
        part.image = self.image[rows]
        return part

    def paint(self, cover: Tensor, colour: Tensor) -> None:
        """Blend `colour` (N, 3) or (N, 3, H, W) over the images with opacity `cover` (N, H, W)."""
        colour = colour[:, :, None, None] if colour.ndim == 2 else colour
        self.image.lerp_(colour.expand_as(self.image), cover[:, None])

    def inside(self, distance: Tensor, softness: float = 1.0) -> Tensor:
        """Return the cover of the region where a signed distance is negative."""
        return (0.5 - distance / (self.pixel * softness)).clamp_(0, 1)


def _ellipse(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the first-order distance to an ellipse.

    Scaling (r - 1) by the shorter axis instead would smear the tips of thin lips and lids.
    """
    along, across = (x + 1e-5) / a, y / b
    radius = (along**2 + across**2).sqrt_()
    slope = ((along / a) ** 2 + (across / b) ** 2).sqrt_()
    return radius * (radius - 1) / slope


def _per_image(values: Values) -> Values:
    """Reshape scalars to (N, 1, 1), to broadcast over pixels; colours stay (N, 3)."""
    return {
        name: value.float()[:, None, None] if value.ndim == 1 else value
        for name, value in values.items()
    }


def draw(person: Values, mood: Values, size: int) -> Tensor:
    """Draw photos of `person` in `mood`, float32 (N, 3, size, size) in [0, 1]."""
    p, m = _per_image(person), _per_image(mood)
    count = len(person["style"])
    canvas = Canvas(count, size)
    _background(canvas, m)
    _some(mood["shelves"] > 0, _shelves, canvas, p, m, canvas.x, canvas.y)
    cos, sin = m["roll"].cos(), m["roll"].sin()
    dx, dy = canvas.x - m["x"], canvas.y - m["y"]
    u, v = (cos * dx + sin * dy) / m["zoom"], (-sin * dx + cos * dy) / m["zoom"]

    def at(depth: float) -> tuple[Tensor, Tensor]:
        # Parallax: nearer parts move further when the head turns.
        return u - m["yaw"] * depth, v - m["pitch"] * depth

    style = person["style"]
    _body(canvas, p, m, u, v)
    _some(style >= STYLES.index("bob"), _hair_behind, canvas, p, m, *at(-0.10))
    _ears(canvas, p, m, *at(-0.06))
    _some(person["earrings"] > 0, _earrings, canvas, p, m, *at(-0.06))
    _head(canvas, p, m, *at(0.0))
    _some((person["beard_kind"] > 0) | (person["moustache"] > 0), _beard, canvas, p, m, *at(0.05))
    _some(person["freckles"] > 0, _freckles, canvas, p, m, *at(0.07))
    _some(person["mole"] > 0, _mole, canvas, p, m, *at(0.07))
    _mouth(canvas, p, m, *at(0.10))
    _nose(canvas, p, m, *at(0.16))
    _eyes(canvas, p, m, *at(0.09))
    _some(style != STYLES.index("bald"), _hair_in_front, canvas, p, m, *at(0.03))
    _some(person["glasses"] > 0, _glasses, canvas, p, m, *at(0.12))
    _some(mood["hat"] > 0, _hat, canvas, p, m, *at(0.0))
    return _develop(canvas, m)


def _some(
    chosen: Tensor, layer: Layer, canvas: "Canvas", p: Values, m: Values, u: Tensor, v: Tensor
) -> None:
    """Paint a layer only on the chosen images; most people have no hat."""
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        part = canvas.rows(rows)
        p, m = ({name: value[rows] for name, value in values.items()} for values in (p, m))
        layer(part, p, m, u[rows], v[rows])
        canvas.image[rows] = part.image


def _background(c: Canvas, m: Values) -> None:
    slope = (0.5 + 0.4 * (c.x * m["back_angle"].cos() + c.y * m["back_angle"].sin())).clamp(0, 1)
    c.paint(torch.ones_like(c.x), m["back_a"])
    c.paint(slope, m["back_b"])
    blob = ((c.x - m["blob_x"]) ** 2 + (c.y - m["blob_y"]) ** 2) / m["blob_r"] ** 2
    c.paint(0.6 * torch.exp(-2 * blob), m["blob"])


def _shelves(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    """Paint boards, and upright things of alternating brightness that stand on them."""
    place = (v - m["shelf_y"]) / m["shelf_gap"]
    board = ((place - place.round()).abs() - 0.10) * m["shelf_gap"]
    spines = 1 + 0.3 * torch.sin(u * 17 + 5 * place.floor() + 9 * m["shelf_y"])
    c.paint(c.inside(-board) * 0.7, m["blob"][:, :, None, None] * spines[:, None])
    c.paint(c.inside(board), m["shelf"])


def _body(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    shoulders = _ellipse(u, v - 1.22, p["width"] * 1.75, torch.full_like(p["width"], 0.50))
    c.paint(c.inside(shoulders), m["shirt"])
    neck = torch.maximum(
        u.abs() - p["width"] * 0.55, torch.maximum(0.2 - v, v - 0.80 - 0.1 * m["collar"])
    )
    c.paint(c.inside(neck), p["skin"] * 0.80)


def _hair_behind(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    style = p["style"]
    afro, long, bob = (style == STYLES.index(name) for name in ("afro", "long", "bob"))
    ripple = p["curl"] * 0.035 * torch.sin(9 * torch.atan2(v, u)) + afro * 0.03 * torch.sin(
        13 * torch.atan2(v + 0.2, u)
    )
    wide = p["width"] + p["volume"] + 0.16 * afro
    tall = p["height"] * 0.86 + 0.10 * afro + p["volume"] * 0.5
    crown = _ellipse(u, v + 0.16, wide, tall) - ripple
    short = torch.where(bob, 0.30 + 0.2 * p["length"], torch.full_like(p["length"], -9.0))
    drop = torch.where(long, p["length"], short)
    curtain = torch.maximum(
        u.abs() - p["width"] - p["volume"] * 0.9 + ripple, torch.maximum(-0.2 - v, v - drop)
    )
    hair = torch.where(long | bob, torch.minimum(crown, curtain), crown)
    c.paint(c.inside(hair), p["hair_colour"] * 0.82)


def _ears(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    side = u.abs() - p["width"] * 0.98
    ear = _ellipse(side, v + 0.02, p["ear"] * 0.62, p["ear"] * 1.25)
    c.paint(c.inside(ear), p["skin"] * 0.90)


def _earrings(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    side = u.abs() - p["width"] * 0.98
    a, b = (torch.full_like(p["ear"], length) for length in (0.040, 0.045))
    ring = _ellipse(side, v - p["ear"] * 1.25 - 0.03, a, b)
    c.paint(c.inside(ring), p["earring_colour"])


def _head(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    norm = _skull(p, u, v)
    distance = (norm - 1) * p["width"]
    lit = m["light"] * (m["light_x"] * u / p["width"] + m["light_y"] * v / p["height"])
    round_off = 1.04 - 0.20 * norm.clamp(0, 1.2) ** 4
    c.paint(c.inside(distance), p["skin"][:, :, None, None] * ((1 + lit) * round_off)[:, None])
    a, b = (torch.full_like(p["blush"], length) for length in (0.13, 0.09))
    cheek = _ellipse(u.abs() - p["width"] * 0.55, v - 0.17, a, b)
    rosy = p["skin"] * torch.tensor([1.0, 0.62, 0.58])
    c.paint(c.inside(cheek, 4) * p["blush"] * c.inside(distance), rosy)


def _skull(p: Values, u: Tensor, v: Tensor) -> Tensor:
    """Return a norm that is 1 on the outline of the head and less inside."""
    low = (v / p["height"]).clamp(0, 1)
    across = (u / (p["width"] * (1 - p["jaw"] * low**1.5))).abs()
    along = (v / p["height"]).abs()
    # Between a round head (2-norm) and a square one (max-norm).
    return (1 - p["square"]) * (across**2 + along**2).sqrt() + p["square"] * torch.maximum(
        across, along
    )


def _beard(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    kind = p["beard_kind"]
    head = (_skull(p, u, v) - 1) * p["width"]
    edge = p["mouth_y"] - 0.13 + 1.1 * (u.abs() - p["mouth_width"]).clamp(min=0) * -0.7
    full = torch.maximum(head - 0.015, edge - v)
    chin = _ellipse(u, v - p["height"] * 0.86, p["mouth_width"] * 0.80, p["height"] * 0.24)
    region = torch.where(kind == 2, torch.maximum(chin, head - 0.03), full)
    density = torch.where(kind == 3, 0.38, 0.94) * (kind > 0)
    c.paint(c.inside(region, 1.5) * density, p["hair_colour"] * 0.88)
    below = v - p["mouth_y"] + p["lip_thick"] + 0.035
    lip = _ellipse(u, below, p["mouth_width"] * 1.05, torch.full_like(u[:, :1, :1], 0.036))
    c.paint(c.inside(lip) * p["moustache"] * 0.94, p["hair_colour"] * 0.85)


def _freckles(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    speckle = torch.sin(u * 47 + p["freckle_seed"]) * torch.sin(v * 53 + 2 * p["freckle_seed"])
    band = torch.exp(-(((v - 0.13) / 0.10) ** 2) - (u.abs() - 0.20).abs() ** 2 / 0.03)
    cover = ((speckle - 0.25) * 1.6).clamp(0, 1) * band * 0.8
    c.paint(cover, p["skin"] * torch.tensor([0.70, 0.50, 0.38]))


def _mole(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    radius = torch.full_like(p["mole"], 0.026)
    mole = _ellipse(u - p["mole_x"], v - p["mole_y"], radius, radius)
    c.paint(c.inside(mole), p["skin"] * 0.30)


def _mouth(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    smile = m["smile"] + p["smiler"]
    half = p["mouth_width"] * (1 + 0.18 * smile)
    bend = v - p["mouth_y"] + smile * 0.075 * ((u / half) ** 2 - 0.6)  # corners go up when smiling
    gap = 0.070 * m["open"]
    lips = _ellipse(u, bend, half, p["lip_thick"] + gap)
    c.paint(c.inside(lips), p["lip"])
    opening = _ellipse(u, bend, half * 0.84, gap + 1e-3)
    dark = torch.tensor([0.20, 0.05, 0.06]).expand(len(u), 3)
    c.paint(c.inside(opening) * (m["open"] > 0.03), dark)
    teeth = torch.maximum(opening, bend + gap * 0.10)
    c.paint(
        c.inside(teeth) * (m["open"] > 0.15), torch.tensor([0.95, 0.94, 0.90]).expand(len(u), 3)
    )
    line = _ellipse(u, bend, half * 0.95, torch.full_like(half, 0.010))
    c.paint(c.inside(line) * (m["open"] <= 0.03), p["lip"] * 0.45)


def _nose(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    tip = p["eye_y"] + p["nose_length"] + 0.06
    wings = _ellipse(u, v - tip, p["nose_width"], p["nose_width"] * 0.52)
    c.paint(c.inside(wings, 1.5), p["skin"] * 0.86)
    side = torch.where(m["light_x"] > 0, -1.0, 1.0)
    ridge = torch.maximum(
        (u - side * p["nose_width"] * 0.50).abs() - 0.020, torch.maximum(p["eye_y"] - v, v - tip)
    )
    c.paint(c.inside(ridge, 1.5) * 0.45, p["skin"] * 0.74)
    x, wide = u.abs() - p["nose_width"] * 0.50, p["nose_width"] * 0.24
    nostrils = _ellipse(x, v - tip - 0.020, wide, p["nose_width"] * 0.17)
    c.paint(c.inside(nostrils) * 0.85, p["skin"] * 0.40)
    shine = _ellipse(
        u + side * 0.012, v - tip + 0.030, p["nose_width"] * 0.40, p["nose_width"] * 0.34
    )
    c.paint(c.inside(shine, 2) * 0.35, (p["skin"] * 1.25).clamp(max=1))


def _eyes(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    x = u.abs() - p["eye_gap"]  # both eyes at once, mirrored
    y = v - p["eye_y"] - p["eye_tilt"] * x
    tall = p["eye_size"] * p["eye_shape"] * m["lids"]
    socket = _ellipse(x, y + 0.012, p["eye_size"] * 1.30, tall * 1.55)
    c.paint(c.inside(socket, 2) * 0.35, p["skin"] * 0.66)
    white = _ellipse(x, y, p["eye_size"], tall)
    seen = c.inside(white)
    c.paint(seen, torch.tensor([0.97, 0.97, 0.96]).expand(len(u), 3))
    gaze = u.sign() * m["gaze_x"] * p["eye_size"] * 0.6
    iris = _ellipse(
        x - gaze, y - m["gaze_y"] * tall * 0.5, p["eye_size"] * 0.56, p["eye_size"] * 0.56
    )
    c.paint(c.inside(iris) * seen, p["iris"])
    c.paint(c.inside(iris + p["eye_size"] * 0.28) * seen, torch.full((len(u), 3), 0.03))
    lid = torch.maximum(white.abs() - 0.014, y + tall * 0.15)
    c.paint(c.inside(lid) * 0.9, p["skin"] * 0.28)
    by = v - (p["eye_y"] - p["brow_y"] - m["brow_lift"]) - p["brow_tilt"] * x + 1.6 * x**2
    brow = torch.maximum(x.abs() - p["eye_size"] * 1.38, by.abs() - p["brow_thick"])
    c.paint(c.inside(brow) * 0.92, p["hair_colour"] * 0.70)


def _hair_in_front(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    style = p["style"]
    crop, side = (style == STYLES.index(name) for name in ("crop", "side"))
    volume = p["volume"] * torch.where(crop, 0.55, 1.0)
    ripple = p["curl"] * 0.025 * torch.sin(10 * torch.atan2(v + 0.2, u))
    scalp = (
        _ellipse(u, v + 0.05, p["width"] + volume * 0.55, p["height"] * 0.97 + volume * 0.75)
        - ripple
    )
    swept = torch.where(
        side, 0.55 * (u - p["parting"] * 0.4).abs() * u.sign() * p["parting"].sign() * -1, 0.0 * u
    )
    line = (
        p["hairline"]
        + 0.20 * p["fringe"]
        + 0.85 * (1 - p["fringe"]) * (u / p["width"]) ** 2 * 0.38
        + swept
    )
    cap = torch.maximum(scalp, v - line)
    burns = torch.maximum(
        torch.maximum(scalp, p["width"] * 0.86 - u.abs()), v - torch.where(crop, -0.02, 0.10)
    )
    hair = torch.minimum(cap, burns)
    strands = 1 + 0.05 * torch.sin(u * 26 + 4 * p["parting"] + 6 * v)
    shine = strands * (1.0 + 0.22 * torch.exp(-(((v + 0.48) / 0.10) ** 2)))
    c.paint(c.inside(hair), p["hair_colour"][:, :, None, None] * shine[:, None])


def _glasses(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    x, y = u.abs() - p["eye_gap"] - 0.008, v - p["eye_y"] - 0.012
    square = torch.maximum(x.abs() - p["lens"], y.abs() - p["lens"] * 0.72)
    lens = torch.where(p["lens_square"] > 0, square, _ellipse(x, y, p["lens"], p["lens"] * 0.95))
    dark = torch.tensor([0.07, 0.07, 0.09]).expand(len(u), 3)
    c.paint(c.inside(lens) * p["sunglasses"] * 0.92, dark)
    rim = lens.abs() - p["rim"]
    bridge = torch.maximum(
        u.abs() - p["eye_gap"] + p["lens"] * 0.85, (y + 0.035).abs() - p["rim"] * 0.9
    )
    temple = torch.maximum(
        torch.maximum(p["eye_gap"] + p["lens"] - u.abs(), u.abs() - p["width"] * 1.02),
        (y + 0.04).abs() - p["rim"] * 0.8,
    )
    frame = torch.minimum(rim, torch.minimum(bridge, temple))
    c.paint(c.inside(frame), p["frame"])


def _hat(c: Canvas, p: Values, m: Values, u: Tensor, v: Tensor) -> None:
    wide = p["width"] + p["volume"] * 0.7
    dome = torch.maximum(_ellipse(u, v + 0.36, wide, torch.full_like(wide, 0.44)), v + 0.36)
    brim = _ellipse(u, v + 0.36, wide * 1.25, torch.full_like(wide, 0.060))
    c.paint(c.inside(dome), m["hat_colour"])
    c.paint(c.inside(brim), m["hat_colour"] * 0.75)


def _develop(c: Canvas, m: Values) -> Tensor:
    """Apply light, colour temperature, contrast and grain to the whole image."""
    image = c.image
    falloff = 1 + 0.5 * m["light"] * (m["light_x"] * c.x + m["light_y"] * c.y)
    tint = torch.cat([1 + m["warmth"], torch.ones_like(m["warmth"]), 1 - m["warmth"]], 1)[..., None]
    falloff = falloff * (1 - m["vignette"] * (c.x**2 + c.y**2))
    image = image * (falloff * m["exposure"])[:, None] * tint
    image = (image - 0.5) * m["contrast"][:, None] + 0.5
    wave = torch.sin(c.x * 1231.7 + c.y * 1847.3 + m["grain_seed"] * math.tau) * 43758.5453
    image = image + ((wave - wave.floor() - 0.5) * m["grain"] * 2)[:, None]
    return image.clamp_(0, 1)
