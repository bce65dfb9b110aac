"""The search for garbage is left out while a rank starts, and only then."""

import gc

from trainers.core import garbage


def test_what_a_start_has_made_is_never_looked_through() -> None:
    garbage.resume()  # nobody paused
    before = gc.get_freeze_count()  # some versions of Python begin with a few hundred
    try:
        garbage.pause()
        assert not gc.isenabled()
        garbage.resume()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before + 1000
    finally:
        gc.unfreeze()
        gc.enable()
