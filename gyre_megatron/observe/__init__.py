"""What a person sees of a run: its journal, progress, report and metrics files."""
