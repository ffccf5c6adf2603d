"""`torchrun --nproc-per-node N launch/train_gyre.py --config FILE`: the same as `gyre train`."""

import sys

if __name__ == "__main__":
    import checkout  # noqa: F401  makes an uninstalled checkout importable

    from gyre_megatron.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
