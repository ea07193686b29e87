"""A small Frostglass plugin: one defense and one attack."""
