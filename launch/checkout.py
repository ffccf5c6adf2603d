"""Lets the scripts beside this file run from a checkout that was not installed.

Imported by them for its effect; where the package is installed there is none.
"""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("gyre_megatron") is None:
    root = str(Path(__file__).resolve().parent.parent)
    sys.path.append(root)
    # The control plane and the engines are processes of their own and find the package like this.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
