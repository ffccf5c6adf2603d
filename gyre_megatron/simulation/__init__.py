"""Virtual time: the scheduler in a modelled world."""
