"""The evaluator: what is left in the workspace to a reward in [0, 1]."""


def share_of_digits(workspace, task):
    """Share of decimal digits in answer.txt; 0 if the harness left none."""
    file = workspace / "answer.txt"
    text = file.read_text() if file.exists() else ""
    digits = [character for character in text if character in "0123456789"]
    return len(digits) / max(len(text), 1)
