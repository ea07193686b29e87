"""The shares and ranges from which procedural people and their photos are drawn."""

from dataclasses import dataclass

Range = tuple[float, float]  # lowest and highest value of a uniform number
Bell = tuple[float, float]  # centre and spread of a roughly normal number
Shares = tuple[float, ...]


@dataclass(frozen=True)
class Look:
    """A population and the way it is photographed; the defaults are those of private people.

    `hair` are the shares of the hair colours, `styles` of the hair styles, `beards` of none, full,
    goatee and stubble. `light_angle` is where light comes from (0 is the right side, a quarter turn
    is below). Walls are greyish colours: `wall` is their grey, `wall_colour` how colourful they
    are. `shelves` is the share of photos in front of shelves; `vignette` darkens the corners.
    """

    # The people.
    hair: Shares = (0.20, 0.15, 0.15, 0.08, 0.10, 0.13, 0.04, 0.07, 0.03, 0.025, 0.025)
    styles: Shares = (0.10, 0.24, 0.18, 0.16, 0.20, 0.12)
    beards: Shares = (0.64, 0.14, 0.12, 0.10)
    tone: Range = (0.0, 1.0)
    glasses: float = 0.32
    width: Bell = (0.475, 0.045)
    height: Bell = (0.63, 0.045)
    jaw: Range = (0.05, 0.42)
    eye_size: Bell = (0.092, 0.014)
    eye_shape: Range = (0.45, 0.85)
    brow_thick: Range = (0.018, 0.055)
    nose_width: Range = (0.055, 0.125)
    mouth_width: Bell = (0.155, 0.028)
    curl: float = 0.35
    # The photos.
    zoom: Bell = (1.10, 0.085)
    light_angle: Range = (0.0, 6.2832)
    light: Range = (0.0, 0.60)
    exposure: Bell = (0.98, 0.20)
    warmth: Bell = (0.0, 0.11)
    contrast: Bell = (1.0, 0.13)
    wall: Range = (0.12, 0.88)
    wall_colour: float = 0.5
    shelves: float = 0.0
    vignette: Range = (0.0, 0.0)
    hat: float = 0.06
    grain: Range = (0.0, 0.012)


# Another country and another camera: mostly dark, often long or curly hair, rounder heads, bigger
# eyes; indoors, harder light from above, warmer, more contrast, furnished rooms, dark corners.
LOOKS = {
    "same": Look(),
    "other": Look(
        hair=(0.52, 0.22, 0.06, 0.02, 0.01, 0.02, 0.01, 0.09, 0.05, 0.0, 0.0),
        styles=(0.03, 0.10, 0.07, 0.22, 0.30, 0.28),
        beards=(0.82, 0.05, 0.04, 0.09),
        tone=(0.15, 0.85),
        glasses=0.12,
        width=(0.520, 0.040),
        height=(0.585, 0.040),
        jaw=(0.0, 0.22),
        eye_size=(0.108, 0.013),
        eye_shape=(0.40, 0.65),
        brow_thick=(0.030, 0.065),
        nose_width=(0.080, 0.145),
        mouth_width=(0.170, 0.028),
        curl=0.60,
        zoom=(1.0, 0.06),
        light_angle=(4.2, 5.2),
        light=(0.20, 0.55),
        exposure=(1.0, 0.14),
        warmth=(0.10, 0.06),
        contrast=(1.15, 0.08),
        wall=(0.20, 0.65),
        wall_colour=0.4,
        shelves=0.6,
        vignette=(0.10, 0.30),
        hat=0.02,
        grain=(0.01, 0.03),
    ),
}
