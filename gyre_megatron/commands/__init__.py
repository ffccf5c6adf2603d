"""Subcommands of `gyre` that no room below owns; each module has `main(arguments) -> exit code`."""
