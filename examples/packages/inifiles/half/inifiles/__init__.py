def loads(text):
    data, section = {}, ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line[1:-1]
            data[section] = {}
        elif "=" in line and line[0] not in "#;":
            key, value = line.split("=", 1)
            data.setdefault(section, {})[key.strip()] = value.strip()
    return data
