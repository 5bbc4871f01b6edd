"""As in tests/: no process is left when a run of tests is killed."""

import os
import sys

from support.left_open import start_reaper

if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
    start_reaper()
