"""`python launch/simulate.py --config FILE ...`: the same as `gyre simulate`."""

import sys

if __name__ == "__main__":
    import checkout  # noqa: F401  makes an uninstalled checkout importable

    from gyre_megatron.cli import main

    sys.exit(main(["simulate", *sys.argv[1:]]))
