"""A study with people: they compare and identify reconstructions in a browser."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.study.app import study_app
    from frostglass.study.folder import StudyFolder, read_study
    from frostglass.study.make import StudyOptions, make_study
    from frostglass.study.results import study_results
    from frostglass.study.serve import serve_study

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
