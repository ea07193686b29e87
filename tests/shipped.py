"""The configs in the repository."""

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
# The files of worlds/ are settings, which are merged into a config.
PATHS = [path for path in sorted(CONFIGS.rglob("*.toml")) if path.parent != CONFIGS / "worlds"]
