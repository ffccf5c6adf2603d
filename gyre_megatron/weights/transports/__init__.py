"""Ways to carry a bucket from one process to another, behind `base.Transport`."""
