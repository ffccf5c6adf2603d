"""Parts of bench_delta: two hosts on one machine, and what runs on each."""
