"""`python -m pluribus` is the command line."""

import sys

from pluribus.cli import main

sys.exit(main())
