"""Parts of bench_swap: models, our reshard, and what it is compared with. Run by forked ranks."""
