def get(data, path, default=None):
    for step in path.replace("[", ".").replace("]", "").split("."):
        try:
            data = data[int(step)] if isinstance(data, list) else data[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return default
    return data
