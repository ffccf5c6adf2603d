"""`python launch/plan.py --config FILE ...`: the same as `gyre plan`."""

import sys

if __name__ == "__main__":
    import checkout  # noqa: F401  makes an uninstalled checkout importable

    from gyre_megatron.cli import main

    sys.exit(main(["plan", *sys.argv[1:]]))
