"""``python -m ringmpi``: the same as the ``ringmpi`` command."""

import sys

from ringmpi.cli import main

sys.exit(main())
