"""The words of a report in plain language."""

SHARED = {
    "Audit": "One attack on one model (or on one protection), measured with its controls.",
    "Reconstruction, guess": "An image that an attack makes of a person; it may keep several.",
    "Recognised": "A face verifier takes the reconstruction for that person, at the stated rate of "
    "false alarms.",
    "False-accept rate": "The share of strangers whom the verifier takes for a person by mistake.",
    "Top-1": "A classifier that must choose one of the private people chose the right one. This is "
    "not recognition.",
    "Evaluator": "A separate network that judges reconstructions; nothing is selected with it.",
    "Prior-only baseline": "What the attacker's image generator scores without the model: luck.",
    "Positive control": "The same attack where nothing is defended. If it fails there, its failure "
    "elsewhere proves nothing.",
    "Vacuous": "The audit proves nothing, because the attack could not be shown to work.",
    "Interval": "The range that holds the true value in 95 of 100 such audits of other people.",
    "Inconclusive": "Neither pass nor fail: the data is not enough, or something is missing.",
}
MODELS = {
    "Decoys": "Strangers who are trained into each class, so that an attack finds one of many."
}
FEATURES = {
    "Features": "The numbers that leave the device instead of the image.",
    "Similarity": "How alike two faces are to a separate network: 1 for the same image.",
    "Utility (MCC)": "How well the server predicts attributes: 1 is perfect, 0 is guessing.",
}


def glossary(surface: str) -> dict[str, str]:
    """Return the words that a page on a surface uses, with their meaning."""
    return SHARED | (MODELS if surface == "model" else FEATURES)
