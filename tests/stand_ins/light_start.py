"""Imported whenever the interpreter of tests/integration/light.py starts: what stands in for what.

Three of a small run's processes spend seconds on imports, though few tests are about what they do: torchrun, the
evaluation report with scikit-learn and matplotlib, and the recorder, which is forked.
"""

import sys

_ASKED = sys.orig_argv[1:3]
if any(word.endswith("trainers/torchrun.py") for word in _ASKED[:1]):
    from pathlib import Path  # here: most processes need none of this

    sys.path.insert(0, str(Path(__file__).parent / "torchrun"))
elif _ASKED == ["-m", "pipeline.evaluation"]:
    import report_libraries  # type: ignore[import-not-found]  # beside this file, whose folder is on the path

    report_libraries.install()
elif _ASKED == ["-m", "pipeline.tracking"]:
    import forked_recorders  # type: ignore[import-not-found]

    forked_recorders.stand_in()
