def to_html(text):
    result = []
    for block in text.split("\n\n"):
        if block.startswith("# "):
            result.append(f"<h1>{block[2:]}</h1>")
        else:
            result.append("<p>" + " ".join(block.splitlines()) + "</p>")
    return "\n".join(result)
