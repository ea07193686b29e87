"""Facts about released features: what the server gets from them, and how far they moved."""

from collections.abc import Mapping
from typing import Any

import torch

from frostglass.auditing.products import FeatureExposure
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.metrics._emd import pii_terms
from frostglass.metrics._lda import lda_chance, lda_score
from frostglass.metrics._utility import utility
from frostglass.models.cut import halves
from frostglass.networks.embedding import embed, public_centre
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.training.settings import targets_for

CHUNK = 128
MAX_EMD_SAMPLES = 1000


def feature_facts(
    exposure: FeatureExposure,
    split: Split,
    embedder: Target,
    result: Reconstructions,
    draws: tuple[Reconstructions, Reconstructions],
) -> dict[str, Any]:
    """Return utility of released and plain features, their distance, LDA score and EMD terms."""
    facts = released_facts(exposure)
    facts["facts"] |= _separation(embedder, split, result)
    facts["facts"] |= _transport(result, exposure.images, draws)
    return facts


def released_facts(exposure: FeatureExposure) -> dict[str, Any]:
    """Return utility of released and of plain features, how far apart they are, and their price."""
    price = {"device_share": device_share(exposure.target)}
    return {**_utilities(exposure), "facts": _deviation(exposure) | price}


def device_share(target: Target) -> float:
    """Return the share of a cut network's multiply-adds that the device computes.

    Those of recurrent layers are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    image = torch.zeros(1, *target.image_shape, device=device_of(target.module))
    counts, fast = [], torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know its operator
    try:
        for network in (halves(target).encoder, target.module):
            with frozen(network), torch.no_grad(), FlopCounterMode(display=False) as counter:
                network(image)
            counts.append(counter.get_total_flops())
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counts[0] / max(counts[1], 1)


def _plain_features(exposure: FeatureExposure) -> torch.Tensor:
    encoder = halves(exposure.target).encoder
    device = device_of(encoder)
    with frozen(encoder), torch.no_grad():
        parts = torch.arange(len(exposure.images)).split(CHUNK)
        return torch.cat([encoder(exposure.images.floats(part).to(device)).cpu() for part in parts])


def _utilities(exposure: FeatureExposure) -> dict[str, Mapping[str, Any]]:
    """Measure the server's answers to released and plain features, and to those of a ceiling."""
    rest = halves(exposure.target).rest
    device = device_of(rest)
    truth = targets_for(exposure.target, exposure.images)
    released = exposure.released
    measured = {"utility": released.features, "plain_utility": _plain_features(exposure)}
    if released.ceiling is not None:
        measured["ceiling_utility"] = released.ceiling
    utilities: dict[str, Mapping[str, Any]] = {}
    with frozen(rest), torch.no_grad():
        for name, features in measured.items():
            logits = [rest(part.to(device)).cpu() for part in features.split(CHUNK)]
            utilities[name] = utility(torch.cat(logits), truth, exposure.images.labels)
    return utilities


def _deviation(exposure: FeatureExposure) -> dict[str, Any]:
    """Measure how far released features are from plain ones."""
    plain, released = _plain_features(exposure), exposure.released.features
    deviation = (released - plain).square().flatten(1).mean(1).mean().item()
    scale = plain.square().mean().item()
    return {
        "deviation": deviation,
        "relative_deviation": deviation / max(scale, 1e-12),
        "feature_shape": list(plain.shape[1:]),
    }


def _separation(embedder: Target, split: Split, result: Reconstructions) -> dict[str, Any]:
    """Measure how far apart people stay in the reconstructions, and what chance gives."""
    groups = result.labels.repeat_interleave(result.images.shape[1])
    if result.images.shape[1] < 2:
        return {"lda": None, "lda_chance": None}
    centre = public_centre(embedder, split.public)
    embeddings = embed(embedder, result.images.flatten(0, 1), centre).cpu()
    means = torch.stack([embeddings[groups == group].mean(0) for group in groups.unique()])
    # Nothing varies within people if everybody gets the same image: the score is undefined.
    constant = torch.equal(embeddings, means[groups.unique(return_inverse=True)[1]])
    lda = None if constant else lda_score(embeddings, groups)
    return {"lda": lda, "lda_chance": lda_chance(groups)}


def _transport(
    result: Reconstructions, victims: Images, draws: tuple[Reconstructions, Reconstructions]
) -> dict[str, Any]:
    """Measure earth mover's distances to prior draws, the terms of Crafter's privacy index."""
    people, candidates = result.images.shape[:2]
    truth = victims.floats().unflatten(0, (people, -1))
    truth = truth.repeat_interleave(candidates // truth.shape[1], 1)
    count = min(MAX_EMD_SAMPLES, people * candidates)
    chosen = torch.linspace(0, people * candidates - 1, count).long()
    sets = (result.images, truth, *(draw.images for draw in draws))
    terms = pii_terms(*(images.flatten(0, 1)[chosen].flatten(1) for images in sets))
    names = {"emd": "reconstructions", "emd_floor": "floor", "emd_originals": "originals"}
    return {name: terms[term] for name, term in names.items()}
