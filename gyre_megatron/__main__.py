"""`python -m gyre_megatron`: the same as `gyre`."""

import sys

from gyre_megatron.cli import main

sys.exit(main())
