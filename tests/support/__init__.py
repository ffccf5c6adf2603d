"""What tests of several rooms share: tiny checkpoints, a scripted engine, a proxy to run
against."""
